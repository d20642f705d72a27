"""At which positions of a forward is a token drawn, and what has each draw seen?

A row that samples at several positions is verifying: the tokens it fed after the first of them are proposals, and each draw
takes those before it for true. So it is the draw that plain decoding makes, as long as they are.
"""

from __future__ import annotations

import mlx.core as mx

from runtime.engine.forward import Group
from runtime.engine.pending import Part
from runtime.engine.rows import Row
from runtime.engine.sampling import draw


def drawn_part(group: Group, logits: mx.array, vocabulary_size: int) -> Part:
    """Draw from logits [samples, at least vocabulary_size] of a forward that has been built; the rows note it. Lazy."""
    if not group.samplers:
        return Part(group, None, (), (*group.batch.arrays(), group.batch.fence()))
    nums_samples = [num for num in group.nums_samples if num]
    firsts = [row.num_cached - num + 1 for row, num in zip(group.sampled_rows, nums_samples, strict=True)]
    for row, first in zip(group.sampled_rows, firsts, strict=True):
        if row.must_rewind:
            if row.sampler.recipe.penalised:
                row.sampler.rewind(row.known[row.prompt_length : first])
            row.must_rewind = False
    positions, presumed = firsts, None
    if group.has_blocks:
        blocks = list(zip(group.sampled_rows, firsts, nums_samples, strict=True))
        positions = [first + ahead for _, first, num in blocks for ahead in range(num)]
        presumed = [tokens for block in blocks for tokens in _presumed(*block)]
    if logits.shape[-1] > vocabulary_size:
        logits = logits[:, :vocabulary_size]  # the other columns only fill up a round number
    drawn = draw(logits, group.samplers, positions, presumed)
    index = 0
    for row, first, num in zip(group.sampled_rows, firsts, nums_samples, strict=True):
        row.note_draw(first, drawn.tokens, index, num)
        index += num
    return Part(group, drawn, positions, tuple(drawn.arrays()))


def _presumed(row: Row, first: int, num: int) -> list[list[int]]:
    """For each of `num` draws, the first for position `first`: the output tokens fed from there up to it."""
    if not row.sampler.recipe.penalised:
        return [[]] * num
    begin = max(first, row.prompt_length)
    return [row.known[begin : first + ahead] for ahead in range(num)]
