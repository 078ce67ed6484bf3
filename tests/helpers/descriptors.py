"""What files, sockets and pipes this process holds open, for tests that nothing is left."""

import contextlib
import gc
import os
from collections import Counter


def open_descriptors() -> Counter[str]:
    """How many descriptors are open of each file, socket or pipe.

    `not open_descriptors() - before` says that none was added. Those of objects that wait for the
    garbage collector, which may be an earlier test's, are closed first.
    """
    gc.collect()
    targets: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them is closed
            targets[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return targets
