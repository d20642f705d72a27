"""Who ends this process when its host is gone? Armed before anything heavy is imported.

Three independent ways, because each has a gap: the end of the stdin pipe tells of any death of the host on any system;
Linux's parent-death signal also ends a process whose every thread is stuck in C; macOS's kqueue sees the host's exit
even when some other process has inherited the pipe's other end.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

HOST_GONE_EXIT_CODE = 70
_PR_SET_PDEATHSIG = 1


def arm(host_pid: int) -> None:
    """From now on this process does not outlive its host. Call first of all, on the main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's to handle
    threading.Thread(target=_wait_for_end_of_stdin, name="watchdog-stdin", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    elif sys.platform == "darwin":
        threading.Thread(target=_wait_for_exit_of, args=(host_pid,), name="watchdog-kqueue", daemon=True).start()
    if os.getppid() != host_pid:  # it died before we could ask to be told
        os._exit(HOST_GONE_EXIT_CODE)


def _wait_for_end_of_stdin() -> None:
    try:
        while os.read(0, 4096):
            pass
    finally:
        os._exit(HOST_GONE_EXIT_CODE)


if sys.platform == "darwin":

    def _wait_for_exit_of(pid: int) -> None:
        queue = select.kqueue()
        exit_of_host = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
        try:
            queue.control([exit_of_host], 1)
        except ProcessLookupError:
            pass
        os._exit(HOST_GONE_EXIT_CODE)
