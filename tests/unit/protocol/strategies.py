"""Hypothesis strategies for every message, derived from the field types, so that a new message is tested at once."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from runtime.protocol.commands import AnyCommand
from runtime.protocol.events import AnyEvent
from runtime.protocol.frames import MAX_INLINE_IDS
from runtime.protocol.tokens import TokenIds

_ids = st.integers(0, 2**32 - 1)
_long_runs = st.integers(MAX_INLINE_IDS - 1, MAX_INLINE_IDS * 3).map(lambda length: [(7919 * i) % 2**32 for i in range(length)])

_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    type(None): st.none(),
    TokenIds: st.one_of(st.lists(_ids, max_size=8), _long_runs).map(TokenIds),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of one field type (or of one message)."""
    if kind in _LEAVES:
        return _LEAVES[kind]
    if isinstance(kind, typing.NewType):
        return values_of(kind.__supertype__)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return st.deferred(lambda: st.builds(kind, *(values_of(hints[name]) for name in kind.__struct_fields__)))
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return st.sampled_from(arguments)
    if get_origin(kind) in (types.UnionType, typing.Union):
        return st.one_of(*map(values_of, arguments))
    assert get_origin(kind) is tuple, kind
    if arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=4).map(tuple)
    return st.tuples(*map(values_of, arguments))


COMMAND_TYPES: tuple[type, ...] = get_args(AnyCommand)
EVENT_TYPES: tuple[type, ...] = get_args(AnyEvent)
