"""python bench.py offline --help"""

import sys

from benchmarks.ending import exit_on_sigterm
from benchmarks.main import main
from nanoengine import EngineError

if __name__ == "__main__":
    exit_on_sigterm()
    try:
        main()
    except EngineError as error:
        sys.exit(f"error: {error}")
