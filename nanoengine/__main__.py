"""The command nanoengine, and python -m nanoengine: both begin here."""

import sys

from nanoengine.cli.interrupts import ended_by_ctrl_c

with ended_by_ctrl_c():  # these imports take half a second
    from nanoengine.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
