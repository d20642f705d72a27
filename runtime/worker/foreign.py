"""How is a checkpoint's own code kept from holding up the worker? It runs on a thread that is left behind after a deadline.

Chat templates are programs: they may raise, and they may run for ever. One that runs Python is told to end; one that is inside C
code goes on until it leaves it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Abandoned(SystemExit):
    """Sent into a stuck thread to end it quietly; no template's `except Exception` stops it."""


def interrupt(thread: threading.Thread) -> None:
    """Raise `Abandoned` in a thread at its next Python instruction."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))


def bounded(work: Callable[[], T], seconds: float) -> T:
    """What `work` returns or raises. :raises TimeoutError: it took longer; its thread is told to end and not waited for."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # a library written in Rust may panic, which is no Exception
            errors.append(error)

    thread = threading.Thread(target=run, name="foreign", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        interrupt(thread)
        raise TimeoutError(f"it took longer than {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
