"""Which library multiplies matrices in this process, and with how many threads?"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import mlx.core as mx


def blas_name() -> str:
    """ "metal", "accelerate", "openblas" (preloaded) or "reference" (what MLX's Linux wheel bundles)."""
    if mx.default_device() == mx.gpu:
        return "metal"
    if sys.platform == "darwin":
        return "accelerate"
    return "openblas" if _openblas_set_num_threads() is not None else "reference"


def set_compute_threads(threads: int) -> None:
    """Threads of the next matrix products; 0 leaves them as they are. No effect where we do not choose (Metal, Accelerate)."""
    set_num_threads = _openblas_set_num_threads()
    if threads > 0 and set_num_threads is not None:
        set_num_threads(ctypes.c_int(threads))


def is_exact_over_batch_shapes() -> bool:
    """Canary: whether matrix products give a row the same bits alone, among few rows, and among 32.

    As large as a small model's layers: below that, libraries that do differ may use one kernel for every shape.
    """
    rows = mx.random.normal((32, 640), key=mx.random.key(1))
    weights = mx.random.normal((1024, 640), key=mx.random.key(2)).T
    together = rows @ weights
    return all(bool(mx.array_equal(together[:num], rows[:num] @ weights).item()) for num in (1, 2, 3, 8))


def _openblas_set_num_threads() -> Any:
    """The preloaded OpenBLAS's setter: a preload shows in the process's global symbols."""
    try:
        return ctypes.CDLL(None).openblas_set_num_threads
    except AttributeError:
        return None
