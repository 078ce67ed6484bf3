"""python bench.py offline --help"""

from benchmarks.ending import exit_on_sigterm
from benchmarks.main import main

if __name__ == "__main__":
    exit_on_sigterm()
    main()
