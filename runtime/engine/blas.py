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
    """Canary: whether a matrix product gives a row the same bits alone and among 32 rows."""
    rows = mx.random.normal((32, 96), key=mx.random.key(1))
    weights = mx.random.normal((96, 160), key=mx.random.key(2))
    alone = mx.concatenate([rows[index : index + 1] @ weights for index in range(32)])
    return bool(mx.array_equal(rows @ weights, alone).item())


def _openblas_set_num_threads() -> Any:
    """The preloaded OpenBLAS's setter: a preload shows in the process's global symbols."""
    try:
        return ctypes.CDLL(None).openblas_set_num_threads
    except AttributeError:
        return None
