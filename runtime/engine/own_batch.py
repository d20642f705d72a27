"""How does a row run whose caches we do not know, or whose batching failed its proof? Alone, in the model's own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from runtime.engine.batch import fence_of
from runtime.engine.rows import Row


class OwnBatch:
    """One row in the model's own cache. Cannot go back."""

    def __init__(self, model: Any, row: Row) -> None:
        self.rows = [row]
        row.batch = self
        self._caches = make_prompt_cache(model)

    def begin_step(self, rows: Sequence[Row]) -> None:
        pass

    def forward(self, model: Any, num_rows: int, tokens: mx.array, widths: Sequence[int] | None) -> mx.array:
        assert num_rows == 1
        assert widths is None
        logits: mx.array = model(tokens, cache=self._caches)
        self.rows[0].num_cached += tokens.shape[1]
        return logits

    def bring_forward(self, rows: Sequence[Row]) -> bool:
        return False

    def remove(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.rows.remove(row)
            row.batch = None

    def give_back(self) -> None:
        pass

    def rewind(self, row: Row, length: int) -> list[int] | None:
        return [] if length == row.num_cached else None

    def arrays(self) -> list[mx.array]:
        return _arrays_in([cache.state for cache in self._caches])

    def fence(self) -> mx.array:
        return fence_of(self.arrays())

    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


def _arrays_in(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, list | tuple):
        return [array for branch in tree for array in _arrays_in(branch)]
    if isinstance(tree, dict):
        return [array for branch in tree.values() for array in _arrays_in(branch)]
    return []
