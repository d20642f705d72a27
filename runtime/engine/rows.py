"""What does the engine know of one sequence?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from runtime.engine.engine import RowError
from runtime.engine.sampling import RowSampler
from runtime.protocol.ids import SequenceId

if TYPE_CHECKING:
    from runtime.engine.batch import Batch

Draw = tuple[int, mx.array, int, int]
"""What a step drew for a row, perhaps still on its way: (first absolute position, drawn tokens of the step, index of the first in
them, how many). The positions and the indices go up by one."""


class Row:
    """One sequence.

    num_cached: tokens whose effect is in the caches. owed: tokens that count as fed but wait for the row's next forward (a
    rollback's replay; or chunks of a prompt, in a model that must see it in one piece). known: ids by position, fed or drawn.
    context: ids it was added with, until the first is fed. must_rewind: what the sampler has counted may not be what is `known`.
    """

    __slots__ = (
        "batch",
        "context",
        "draws",
        "epoch",
        "error",
        "known",
        "must_rewind",
        "num_cached",
        "owed",
        "prompt_length",
        "sampler",
        "sequence",
    )

    def __init__(self, sequence: SequenceId, sampler: RowSampler, prompt_length: int, context: Sequence[int] = ()) -> None:
        self.sequence = sequence
        self.sampler = sampler
        self.prompt_length = prompt_length
        self.context = context
        self.batch: Batch | None = None
        self.num_cached = 0
        self.owed: list[int] = []
        self.known: list[int] = []
        self.draws: tuple[Draw, ...] = ()
        self.must_rewind = False
        self.epoch = 0
        self.error: RowError | None = None

    @property
    def length(self) -> int:
        return self.num_cached + len(self.owed)

    def note_fed(self, tokens: Sequence[int]) -> None:
        """`tokens`, drawn or not, are about to be fed at the present length. Waits for drawn ones before them that are not here."""
        if len(self.known) < self.length:
            self.settle()
        self.known[self.length :] = tokens
        self.context = ()
        self.must_rewind = True

    def note_draw(self, position: int, tokens: mx.array, index: int, num: int = 1) -> None:
        """`num` tokens were drawn, the first for `position`, each as if the tokens fed before it were true."""
        self.draws = (*self.draws[-1:], (position, tokens, index, num))

    def note_result(self, position: int, token: int, epoch: int) -> None:
        """The token drawn for `position` has arrived. One drawn before a truncate says nothing any more."""
        if epoch == self.epoch and position == len(self.known):
            self.known.append(token)

    def next_draw(self) -> tuple[mx.array, int] | None:
        """Where the token for the present length comes from, when this row has drawn it."""
        length = self.length
        for position, tokens, index, num in reversed(self.draws):
            if 0 <= length - position < num:
                return tokens, index + length - position
        return None

    def settle(self) -> None:
        """Fetch the tokens that are still on their way, so that `known` covers them. Waits for their steps."""
        for position, tokens, index, num in self.draws:
            offset = len(self.known) - position
            if 0 <= offset < num:
                fetched: Any = tokens.tolist()
                self.known.append(fetched[index + offset])

    def cut(self, length: int) -> None:
        """`length` is the length again: forget all after it, except which token was drawn for that very position.

        Call after `settle`. A proposal that was fed there gives way to the drawn one.
        """
        self.draws = tuple(
            (position, tokens, index, min(num, length - position + 1))
            for position, tokens, index, num in self.draws
            if position <= length
        )
        draw = self.next_draw()
        if draw is not None:
            fetched: Any = draw[0].tolist()
            self.known[length:] = [fetched[draw[1]]]
        else:
            del self.known[length + 1 :]
        self.epoch += 1
        self.must_rewind = True
