"""python bench.py offline --help"""

from benchmarks.main import main

if __name__ == "__main__":
    main()
