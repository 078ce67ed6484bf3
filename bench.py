"""python bench.py offline --help"""

from nanoengine.benchmark import main

if __name__ == "__main__":
    main()
