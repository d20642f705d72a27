"""How does a task wait for the end of a child process, on asyncio and trio alike?

Children are started with plain `subprocess.Popen` on the event loop's own thread, not through the loop's subprocess
support, for two reasons. A worker asks Linux to be killed when the *thread* that started it ends (PDEATHSIG); trio starts
children from a pool thread that ends after ten idle seconds, and the worker would die with it. And asyncio before Python
3.13 reports an exit only when all pipes are closed, which a grandchild (a compiler, say) may keep open for long.
"""

from __future__ import annotations

import os
import subprocess
import sys

import anyio
import anyio.to_thread


async def wait_for_exit(child: subprocess.Popen[bytes]) -> int:
    """Wait until the child has ended, reap it and give its return code (negative: the signal). Any number of tasks may wait.

    Cancelling leaves the child alone.
    """
    while (code := child.poll()) is None:
        descriptor = _exit_descriptor(child.pid)
        if descriptor is None:
            # The thread ends with the child, so whoever stops waiting must see to it that the child ends.
            return await anyio.to_thread.run_sync(child.wait, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        try:
            await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)
    return code


def _exit_descriptor(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has none."""
    if sys.platform == "linux":
        try:
            return os.pidfd_open(pid)
        except OSError:  # a kernel before 5.3, or a sandbox that forbids it
            return None
    else:
        return None
