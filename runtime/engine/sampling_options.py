"""Which sampling options can an engine carry out? The last check before MLX sees a value.

MLX does not check: an id outside the vocabulary reads foreign memory, and a bad filter breaks its thread's generator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from runtime.engine.engine import RowError
from runtime.protocol.commands import Sampling

MAX_SEED = (1 << 64) - 1
MAX_LOGPROBS = 20
MAX_TOP_K = 1_000_000
MAX_PENALTY = 10.0
MAX_LOGIT_BIAS = 10_000.0
MAX_TEMPERATURE = 10.0


def check_sampling(sampling: Sampling, vocabulary_size: int) -> None:
    """:raises RowError: "invalid_request", naming the first option at fault, its value and its range."""
    _number("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE)
    _number("top_p", sampling.top_p, 0.0, 1.0, above=True)
    _whole("top_k", sampling.top_k, 0, MAX_TOP_K)
    _number("min_p", sampling.min_p, 0.0, 1.0)
    _number("repetition_penalty", sampling.repetition_penalty, 0.0, MAX_PENALTY, above=True)
    _number("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _number("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _whole("seed", sampling.seed, 0, MAX_SEED)
    _whole("logprobs", sampling.logprobs, -1, MAX_LOGPROBS)
    for token, bias in sampling.logit_bias:
        _whole("logit_bias", token, 0, vocabulary_size - 1, what="token id ")
        _number(f"logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    if len({token for token, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        raise RowError("invalid_request", f"logit_bias: got {sampling.logit_bias!r}; allowed: each token id once")


def checked_ids(option: str, ids: Sequence[int] | Iterable[int], vocabulary_size: int) -> np.ndarray:
    """The ids as an int64 array.

    :raises RowError: "invalid_request", naming the first id outside the vocabulary and its index.
    """
    array = np.array(list(ids))
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise RowError("invalid_request", f"{option}: got {array.dtype} values; allowed: whole token ids")
    outside = np.flatnonzero((array < 0) | (array >= vocabulary_size))
    if outside.size:
        index = int(outside[0])
        raise RowError(
            "invalid_request",
            f"{option}: token id {array[index]} at index {index} is outside the vocabulary; allowed: 0 to {vocabulary_size - 1}",
        )
    return array.astype(np.int64)


def _number(option: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    if not ok or (above and value == low):
        limits = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise RowError("invalid_request", f"{option}: got {value!r}; allowed: a finite number {limits}")


def _whole(option: str, value: object, low: int, high: int, *, what: str = "") -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
        raise RowError("invalid_request", f"{option}: got {what}{value!r}; allowed: a whole number from {low} to {high}")
