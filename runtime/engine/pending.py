"""What became of a step: waits for it, and tells each row's share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from runtime.engine.engine import RowError, RowResult, RowStep
from runtime.engine.forward import Group
from runtime.engine.sampling import Drawn

if TYPE_CHECKING:
    from runtime.engine.lm_engine import LmEngine


class Part:
    """One forward's share of a step: the rows it sampled, where, and how often each had been truncated by then.

    positions: one a sample, those of a row together and rising; nums_samples: how many each row has.
    """

    __slots__ = ("_arrays", "drawn", "epochs", "nums_samples", "places", "positions", "rows")

    def __init__(self, group: Group, drawn: Drawn | None, positions: Sequence[int], arrays: tuple[mx.array, ...]) -> None:
        self.rows = group.sampled_rows
        self.places = [place for place, num in zip(group.places, group.nums_samples, strict=True) if num]
        self.nums_samples = [num for num in group.nums_samples if num]
        self.drawn = drawn
        self.positions = positions
        self.epochs = [row.epoch for row in self.rows]
        # A forward without samples holds caches until they are scheduled; afterwards only its fence.
        self._arrays = arrays

    def arrays(self) -> tuple[mx.array, ...]:
        arrays, self._arrays = self._arrays, self._arrays[-1:] if self.drawn is None else ()
        return arrays

    def wait(self) -> None:
        mx.eval(self._arrays)


class LmPendingStep:
    def __init__(
        self,
        engine: LmEngine,
        rows: Sequence[RowStep],
        parts: list[Part],
        errors: dict[int, RowError],
        began: float,
        num_tokens: int,
    ) -> None:
        self.rows = rows
        self.began = began
        self.num_tokens = num_tokens
        self._engine = engine
        self._parts = parts
        self._errors = errors

    def result(self) -> list[RowResult]:
        results = [RowResult(step.sequence, error=self._errors.get(place)) for place, step in enumerate(self.rows)]
        for part in self._parts:
            if part.drawn is None:
                part.wait()
                continue
            tokens: Any = part.drawn.tokens.tolist()
            finite: Any = part.drawn.finite.tolist()
            logprobs = part.drawn.logprobs()
            end = 0
            for row, place, num, epoch in zip(part.rows, part.places, part.nums_samples, part.epochs, strict=True):
                begin, end = end, end + num
                if row.error is None and not all(finite[begin:end]):
                    position = part.positions[finite.index(False, begin)]
                    self._engine.fail(
                        row,
                        RowError(
                            "generation_failed",
                            f"the model's logits for position {position} are not finite; "
                            "the sequence ends here, others are not affected",
                        ),
                    )
                if row.error is not None:
                    results[place] = RowResult(row.sequence, error=row.error)
                    continue
                row.note_result(part.positions[end - 1], tokens[end - 1], epoch)
                results[place] = RowResult(row.sequence, tuple(tokens[begin:end]), tuple(chain(*logprobs[begin:end])))
        self._engine.finish(self)
        return results
