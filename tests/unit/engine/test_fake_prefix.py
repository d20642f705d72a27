"""The fake engine's rows can be copied out and restored like a real one's, and what is restored wrongly shows in the tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import testing
from runtime.engine import fake
from runtime.engine.engine import RowError, RowStep
from runtime.engine.fake_faults import Faults
from runtime.engine.prefix_parts import PrefixPart
from runtime.protocol.commands import FakeScript, Sampling
from runtime.protocol.ids import SequenceId

ONE, TWO = SequenceId(1), SequenceId(2)
PROMPT = list(b"The quick brown fox jumps over the lazy dog")
WARM = Sampling(temperature=0.8, seed=5)


def engine() -> fake.FakeEngine:
    script = FakeScript()
    return fake.FakeEngine(script, Faults((), 1, lambda: None), script.context_length)


def add(made: fake.FakeEngine, sequence: SequenceId, prompt: list[int], sampling: Sampling = WARM) -> None:
    made.add(sequence, sampling, prompt_length=len(prompt), context=prompt, max_length=1000)


def parts_of(prompt: list[int], *ends: int) -> list[PrefixPart]:
    made = engine()
    add(made, ONE, prompt)
    made.step([RowStep(ONE, prompt, 1)]).result()
    return [made.export(ONE, start, end).part for start, end in zip((0, *ends), ends, strict=False)]


def tokens_after(prompt: list[int], parts: list[PrefixPart], num_tokens: int = 12) -> list[int]:
    made = engine()
    add(made, TWO, prompt)
    made.restore(TWO, parts)
    assert made.length(TWO) == parts[-1].end
    tokens = list(made.step([RowStep(TWO, prompt[parts[-1].end :], 1)]).result()[0].tokens)
    while len(tokens) < num_tokens:
        tokens += made.step([RowStep(TWO, None, 1)]).result()[0].tokens
    return tokens


@given(st.lists(st.integers(1, len(PROMPT) - 1), min_size=1, max_size=4, unique=True).map(sorted))
def test_restored_in_any_parts_it_says_what_it_says_cold(ends: list[int]) -> None:
    assert tokens_after(PROMPT, parts_of(PROMPT, *ends)) == testing.expected_tokens(PROMPT, max_tokens=12, sampling=WARM)


@given(st.integers(0, 39), st.integers(1, 40))
def test_a_part_cut_to_some_positions_is_the_part_exported_of_these(start: int, end: int) -> None:
    made = engine()
    (whole,) = parts_of(PROMPT, 40)
    if start < end:
        cut = made.adopt(whole, start, end)
        assert cut == parts_of(PROMPT, *([start] if start else []), end)[-1]
        assert cut.arrays[0].data is not whole.arrays[0].data or (start, end) == (0, 40)
        assert made.adopt(whole, end=end) == made.adopt(whole, 0, end)
        assert made.adopt(whole, start) == made.adopt(whole, start, 40)
    else:
        with pytest.raises(RowError, match="does not hold the positions"):
            made.adopt(whole, start, end)


@pytest.mark.parametrize(("start", "end"), [(7, 20), (8, 25), (12, 12), (20, 12), (30, 40)])
def test_positions_outside_of_a_part_are_refused(start: int, end: int) -> None:
    part = parts_of(PROMPT, 8, 24)[1]
    with pytest.raises(RowError, match=rf"\[8, 24\) does not hold the positions \[{start}, {end}\)") as caught:
        engine().adopt(part, start, end)
    assert caught.value.code == "invalid_request"


def test_a_part_of_another_context_shows_in_the_tokens() -> None:
    """Also in the middle of a chain, also when its own tokens are the same and only those before it differ."""
    right = parts_of(PROMPT, 8, 16, 24)
    other = parts_of([*b"Xhe", *PROMPT[3:]], 8, 16, 24)
    expected = testing.expected_tokens(PROMPT, max_tokens=12, sampling=WARM)
    for number in range(3):
        assert tokens_after(PROMPT, [*right[:number], other[number], *right[number + 1 :]]) != expected
    assert tokens_after(PROMPT, right) == expected


def test_one_wrong_bit_shows() -> None:
    (part,) = parts_of(PROMPT, 16)
    (array,) = part.arrays
    data = bytearray(array.buffer())
    data[5] ^= 1
    wrong = replace(part, arrays=(replace(array, data=bytes(data)),))
    assert tokens_after(PROMPT, [wrong]) != testing.expected_tokens(PROMPT, max_tokens=12, sampling=WARM)


def test_an_export_holds_no_ids_and_fits_the_layout() -> None:
    made = engine()
    (part,) = parts_of([7] * 40, 32)
    (array,) = part.arrays
    assert made.adopt(part) is part
    assert array.num_bytes == made.layout().num_bytes_in(0, 32)
    assert len({bytes(array.buffer()[at : at + 16]) for at in range(0, 512, 16)}) == 32


def test_a_row_taken_back_exports_what_is_left() -> None:
    made = engine()
    add(made, ONE, PROMPT)
    made.step([RowStep(ONE, PROMPT[:20], 0)]).result()
    made.step([RowStep(ONE, [1, 2, 3], 0)]).result()
    made.truncate(ONE, 20)
    with pytest.raises(RowError, match="20 tokens are fed"):
        made.export(ONE, 0, 21)
    assert made.export(ONE, 0, 16).part == parts_of(PROMPT, 16)[0]


def test_what_does_not_fit_is_refused() -> None:
    first, second = parts_of(PROMPT, 16, 32)
    made = engine()
    add(made, ONE, PROMPT[:32])
    for chain in ([], [second], [first, first], [first, second], [replace(first, arrays=())], [replace(first, end=15)]):
        with pytest.raises(RowError) as caught:
            made.restore(ONE, chain)
        assert caught.value.code == "invalid_request"
        assert made.length(ONE) == 0
    made.restore(ONE, [first])
    with pytest.raises(RowError, match="has begun already"):
        made.restore(ONE, [first])
    with pytest.raises(RowError, match="not in the engine"):
        made.restore(TWO, [first])
    with pytest.raises(RowError, match="not in the engine"):
        made.export(TWO, 0, 1)
