"""The process of one child of a sweep: the `fp8rl` command, which does not outlive the sweep.

    python -m flows.child PARENT_PID run|resume ...

A sweep that is killed has no chance to end its children. The kernel tells them: they save the learner
as on any SIGTERM, and the next start of the sweep carries them on.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Has this process get SIGTERM when its parent is gone; exits at once where it is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(f"the sweep (process {parent}) is gone")


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    from flows.cli import main

    sys.argv = ["fp8rl", *sys.argv[2:]]
    main()
