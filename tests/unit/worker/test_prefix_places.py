"""Nodes end where contexts part most often, and what a command asks for is judged before anything is done."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from runtime.engine.engine import RowError
from runtime.protocol.commands import PrefixUse, SegmentRange
from runtime.worker.prefix_places import check_use, node_ends, stops
from tests.unit.worker.stage import row

SCOPE, NAME = bytes(32), bytes(range(32))


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 1, [1]),
        (0, 255, [255]),
        (0, 256, [256]),
        (0, 257, [256, 257]),
        (0, 512, [512]),
        (0, 1000, [512, 768, 1000]),
        (0, 1300, [512, 1024, 1280, 1300]),
        (768, 1100, [1024, 1100]),
        (512, 600, [600]),
    ],
)
def test_whole_blocks_end_at_multiples_of_512_and_at_the_last_edge_and_the_rest_is_a_tail(
    start: int, end: int, expected: list[int]
) -> None:
    assert node_ends(start, end) == expected


@pytest.mark.parametrize(
    ("num_tokens", "boundaries", "expected"),
    [
        (1, (), (1,)),
        (256, (), (256,)),
        (257, (), (256, 257)),
        (512, (), (256, 512)),
        (513, (), (512, 513)),
        (1300, (100, 512, 777), (100, 512, 777, 1024, 1280, 1300)),
    ],
)
def test_a_row_stops_where_its_state_is_to_be_kept_and_at_an_edge_that_leaves_one_token(
    num_tokens: int, boundaries: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert stops(num_tokens, boundaries) == expected


def _segment(start: int, end: int, name: bytes = NAME) -> SegmentRange:
    return SegmentRange(name, start, end, False)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"scope": bytes(31)}, "31 bytes"),
        ({"boundaries": (0,)}, "0 must be"),
        ({"boundaries": (5, 5)}, "5 must be"),
        ({"boundaries": (601,)}, "601 must be"),
        ({"segments": (_segment(256, 512),)}, r"\[256, 512\)"),
        ({"segments": (_segment(0, 256), _segment(257, 512))}, r"\[257, 512\)"),
        ({"segments": (_segment(0, 0),)}, r"\[0, 0\)"),
        ({"segments": (_segment(-256, 256),)}, r"\[-256, 256\)"),
        ({"segments": (_segment(0, 512), _segment(512, 600))}, "end at 600"),
        ({"segments": (_segment(0, 256, b"short"),)}, "this one 5"),
    ],
)
@pytest.mark.parametrize("style", ["dense", "mixed", None])
def test_a_use_that_cannot_be_is_refused(wrong: dict[str, Any], named: str, style: Any) -> None:
    use = PrefixUse(**{"scope": SCOPE, **wrong})
    with pytest.raises(RowError, match=named) as caught:
        check_use(msgspec.structs.replace(row(1, [1] * 600), prefix=use), style)
    assert caught.value.code == "invalid_request"


def test_a_use_that_can_be_passes() -> None:
    use = PrefixUse(SCOPE, (_segment(0, 256), _segment(256, 599)), boundaries=(1, 600))
    check_use(msgspec.structs.replace(row(1, [1] * 600), prefix=use), "dense")
    check_use(row(1, [1]), "dense")


def test_a_model_of_states_alone_needs_no_segment_from_the_beginning() -> None:
    use = PrefixUse(SCOPE, (SegmentRange(NAME, 256, 512, True),))
    check_use(msgspec.structs.replace(row(1, [1] * 600), prefix=use), "checkpoint")
