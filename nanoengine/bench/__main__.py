"""python -m nanoengine.bench offline --help"""

from nanoengine.bench.main import main

if __name__ == "__main__":
    main()
