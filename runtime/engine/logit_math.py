"""Array functions over logits [rows, vocabulary]: penalties, filters, keyed noise, log-probabilities.

All are lazy and treat each row by itself: what a row becomes never depends on the other rows. Logits are float32 here, and a
row must be free of NaN and +inf (single -inf entries are fine: tokens that cannot be drawn).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx


def penalised(
    logits: mx.array,
    counts: mx.array,
    in_prompt: mx.array,
    repetition: mx.array,
    presence: mx.array,
    frequency: mx.array,
) -> mx.array:
    """Repetition as in CTRL (Keskar et al., arXiv 1909.05858) over prompt and output; presence and frequency over output only.

    counts: float [rows, vocabulary], times each token is in the output. in_prompt: bool, same shape. The rest: [rows, 1].
    """
    in_output = counts > 0
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(mx.logical_or(in_prompt, in_output), repeated, logits)
    return logits - presence * in_output - frequency * counts


def scaled(logits: mx.array, temperature: mx.array) -> mx.array:
    """Logits over temperature [rows, 1], shifted so that each row's best is 0: nothing overflows however low the temperature."""
    return (logits - mx.max(logits, axis=-1, keepdims=True)) / temperature


def best_first(scores: mx.array, width: int) -> mx.array:
    """The `width` highest values of each row, in falling order. Values only, so equal ones need no order among themselves."""
    if width < scores.shape[-1]:
        scores = mx.topk(scores, width, axis=-1)
    return -mx.sort(-scores, axis=-1)


def kept_counts(best: mx.array, top_k: mx.array, top_p: mx.array | None) -> mx.array:
    """How many tokens of each row top_k and then top_p keep: int32 [rows, 1], at least 1.

    best: scaled logits in falling order [rows, width], width at least the row's top_k. top_p acts on the distribution that top_k
    left over: the fewest best tokens whose probabilities reach it, 1 keeping all.
    """
    if top_p is None:
        return top_k
    rank = mx.arange(best.shape[-1], dtype=mx.int32)
    probabilities = mx.softmax(mx.where(rank < top_k, best, -mx.inf), axis=-1, precise=True)
    before = mx.cumsum(probabilities, axis=-1, inclusive=False)
    reached = mx.sum(before < top_p, axis=-1, keepdims=True).astype(mx.int32)
    reached = mx.where(top_p >= 1.0, top_k, mx.minimum(reached, top_k))
    return mx.maximum(reached, 1)


def keep_best(scores: mx.array, best: mx.array, num_kept: mx.array) -> mx.array:
    """bool [rows, vocabulary]: exactly the `num_kept` [rows, 1] best of each row; of equal ones the lowest ids."""
    threshold = mx.take_along_axis(best, num_kept - 1, axis=-1)
    above = scores > threshold
    level = scores == threshold
    room = num_kept - mx.sum(above, axis=-1, keepdims=True).astype(mx.int32)
    return mx.logical_or(above, mx.logical_and(level, mx.cumsum(level.astype(mx.int32), axis=-1) <= room))


# -- keyed noise ------------------------------------------------------------------------------------------------


def draw_key(seed: int, position: int) -> tuple[int, int]:
    """The key of the draw at absolute `position`: two 32-bit words that depend on (seed, position) alone."""
    first, second = struct.unpack("<II", hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest())
    return first, second


def gumbel(keys: Sequence[tuple[int, int]], width: int) -> mx.array:
    """Standard Gumbel noise [rows, width], row i from keys[i] alone. Always finite.

    The generator's output depends on the length asked for, and models of one vocabulary may pad it differently; so noise is made
    for a rounded width and cut, which gives a token the same noise in both.
    """
    uniform = _uniform_rows(_padded_width(width))(mx.array(list(keys), dtype=mx.uint32))[:, :width]
    # Large values come from small uniforms, where floats are dense: the tail is fine down to probabilities of 2**-32.
    # uniform is in [0, 1); 0 would be infinite noise.
    exponential = -mx.log1p(-mx.maximum(uniform, 2.0**-33))
    return -mx.log(exponential)


def _padded_width(width: int) -> int:
    step = max(64, (1 << (width - 1).bit_length()) // 32)
    return -(-width // step) * step


@cache
def _uniform_rows(width: int) -> Callable[[mx.array], mx.array]:
    return mx.vmap(lambda key: mx.random.uniform(shape=(width,), key=key))


# -- log-probabilities ------------------------------------------------------------------------------------------


def log_probabilities(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def best_ids(scores: mx.array, num_ids: int) -> mx.array:
    """int32 [rows, num_ids] in rising order: the ids of each row's best scores; of equal ones the lowest ids."""
    vocabulary_size = scores.shape[-1]
    best = best_first(scores, num_ids)
    kept = keep_best(scores, best, mx.full((scores.shape[0], 1), num_ids, dtype=mx.int32))
    ids = mx.where(kept, mx.arange(vocabulary_size, dtype=mx.int32), vocabulary_size)
    lowest = -mx.topk(-ids, num_ids, axis=-1) if num_ids < vocabulary_size else ids
    # A row of NaN keeps nothing; its ids must still lie inside the vocabulary, for they are used as indices.
    return mx.minimum(mx.sort(lowest, axis=-1), vocabulary_size - 1)
