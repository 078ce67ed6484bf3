"""python -m nanoengine --help"""

import sys

from nanoengine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
