"""glibc's malloc, told to keep what it has.

By default it hands large blocks back to the system as soon as they are free, so that a training step on a CPU faults in every page of
its temporaries anew: a third of the time of a small step. The settings are read when a process starts.
"""

import os
import sys
from collections.abc import Mapping
from glob import glob

RETAINED: Mapping[str, str] = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "34359738368",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
_DEVICES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")


def restart_retaining() -> None:
    """Starts this program again, as it was called, with memory retained; returns where that is of no use.

    That is: where any of the settings is set already, where an accelerator is to be used, whose memory is XLA's own, and where
    the C library is another.
    """
    has_accelerator = os.environ.get("JAX_PLATFORMS") != "cpu" and any(map(glob, _DEVICES))
    is_set = not RETAINED.keys().isdisjoint(os.environ)
    if sys.platform == "linux" and not is_set and not has_accelerator:
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **RETAINED})
