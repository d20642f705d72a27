"""Which kinds of cache does this model want, and with what do we stand in for each?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from runtime.engine.ragged_cache import RaggedKV
from runtime.engine.recurrent import RaggedState
from runtime.engine.slots import Family


@dataclass(frozen=True, slots=True)
class Attention:
    window: int | None


@dataclass(frozen=True, slots=True)
class Recurrent:
    num_arrays: int


@dataclass(frozen=True, slots=True)
class Composite:
    children: tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """A cache we have no stand-in for: the model runs one row at a time with its own."""

    name: str


Kind = Attention | Recurrent | Composite | Unknown


def kinds_of(model: Any) -> tuple[Kind, ...]:
    """One kind for each entry of the model's own cache list (which need not be one a layer)."""
    return tuple(_kind_of(cache) for cache in make_prompt_cache(model))


def _kind_of(cache: Any) -> Kind:
    # By exact class: a subclass may do anything.
    if type(cache) is KVCache:
        return Attention(None)
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return Attention(cache.max_size)
    if type(cache) is ArraysCache and cache.left_padding is None and all(array is None for array in cache.cache):
        return Recurrent(len(cache.cache))
    if type(cache) is CacheList:
        children = tuple(_kind_of(child) for child in cache.caches)
        unknown = [child for child in children if isinstance(child, Unknown)]
        return unknown[0] if unknown else Composite(children)
    return Unknown(type(cache).__name__)


def flattened(kinds: Sequence[Kind]) -> list[Kind]:
    flat: list[Kind] = []
    for kind in kinds:
        flat += flattened(kind.children) if isinstance(kind, Composite) else [kind]
    return flat


class Layers:
    """The stand-ins for one batch, in the shape the model expects, and sorted by what they need from us."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.families: dict[int | None, Family] = {}
        self.attention: list[RaggedKV] = []
        self.recurrent: list[RaggedState] = []
        self.flat: list[RaggedKV | RaggedState] = []
        """All of them, in the order of `flattened` kinds."""
        self.caches = [self._make(kind) for kind in kinds]

    def _make(self, kind: Kind) -> Any:
        match kind:
            case Attention(window):
                family = self.families.setdefault(window, Family(window))
                self.attention.append(RaggedKV(family))
                self.flat.append(self.attention[-1])
                return self.attention[-1]
            case Recurrent(num_arrays):
                self.recurrent.append(RaggedState(num_arrays))
                self.flat.append(self.recurrent[-1])
                return self.recurrent[-1]
            case Composite(children):
                return CacheList(*(self._make(child) for child in children))
            case Unknown(name):
                raise TypeError(f"there is no stand-in for a cache of class {name}")

    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.attention) + sum(layer.nbytes for layer in self.recurrent)
