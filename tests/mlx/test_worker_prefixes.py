"""On real layers a row says bit for bit the same wherever its beginning comes from: nowhere, memory, a file, another process.

Split points around the edges of blocks (256) and nodes (512); log-probabilities show every bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.engine import lm
from runtime.engine.engine import Loaded, RowStep
from runtime.protocol.commands import Load, Prefill, PrefillRow, Sampling
from runtime.protocol.events import AnyEvent
from runtime.worker.prefix_form import form_of
from tests.support.phases import Phases, kept, offered, publish_all, release, restored, said, segments_of, start
from tests.support.prefixes import prompt_of
from tests.support.tiny import MakeTiny

FAMILIES = {"llama": "dense", "gemma3_text": "mixed", "lfm2": "mixed", "mamba2": "checkpoint"}
GREEDY = Sampling(logprobs=0)
SAMPLED = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.4, seed=7, logprobs=0)
LENGTHS = (256, 257, 512, 513, 770)


def load_tiny(directory: Path) -> Loaded:
    return lm.load(Load("m", str(directory)), lambda stage, done, total: None)


def cold(loaded: Loaded, prompt: list[int], sampling: Sampling) -> list[Any]:
    row = start(1, prompt, sampling=sampling).rows[0]
    plain = PrefillRow(
        row.sequence, row.tokens, row.prompt_length, row.max_length, row.limit, sampling=sampling, ignore_eos=row.ignore_eos
    )
    return said(Phases(loaded, [Prefill((plain,))]).run(), 1)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_prompt_says_the_same_from_everywhere(tiny: MakeTiny, family: str, sampling: Sampling, tmp_path: Path) -> None:
    directory = tiny(family)
    loaded, other = load_tiny(directory), load_tiny(directory)
    form = form_of(loaded)
    assert form is not None
    assert form.layout.style == FAMILIES[family]
    assert form == form_of(other)
    for length in LENGTHS:
        prompt = prompt_of(length, seed=length)
        expected = cold(loaded, prompt, sampling)
        stage = Phases(
            loaded, [start(1, prompt, sampling=sampling)], [start(2, prompt, sampling=sampling), release(1)], root=tmp_path
        )
        stage.channel.on_send = publish_all
        events = stage.run()
        segments = segments_of(events, form=form, length=length)
        assert said(events, 1) == said(events, 2) == expected, length
        edge = (length - 1) // 256 * 256
        assert restored(events, 2).length == (edge if form.has_checkpoints else length - 1)
        events = Phases(other, [start(3, prompt, sampling=sampling, segments=segments)], root=tmp_path).run()
        found = restored(events, 3)
        assert found.misses == ()
        in_files = edge if form.has_checkpoints else min(length // 256 * 256, length - 1)
        assert (found.length, found.source) == (in_files, "file" if in_files else "none"), length
        assert said(events, 3) == expected, length


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_says_the_same_as_a_cold_one(tiny: MakeTiny, family: str) -> None:
    loaded = load_tiny(tiny(family))
    first = prompt_of(500)
    begun = Phases(loaded, [start(1, first, max_tokens=30, sampling=SAMPLED)]).run()
    answer = [token for tokens, _ in said(begun, 1) for token in tokens]
    second = [*first, *answer, *prompt_of(300, 5)]
    events = Phases(loaded, [start(1, first, max_tokens=30, sampling=SAMPLED)], [start(2, second)], [start(3, [*second, 9])]).run()
    assert restored(events, 2).length == 529
    assert restored(events, 3).length == len(second)
    assert said(events, 2) == cold(loaded, second, Sampling())


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2", "mamba2"])
def test_chunks_end_where_states_are_kept(tiny: MakeTiny, family: str) -> None:
    loaded = load_tiny(tiny(family))
    prompt = prompt_of(900)
    stage = Phases(
        loaded, [start(1, prompt, boundaries=(100, 600))], [start(2, [*prompt[:600], *prompt_of(9, 4)])], prefill_chunk_tokens=400
    )
    widths: list[int] = []
    original = stage.loop._engine.step

    def step(rows: list[RowStep]) -> Any:
        widths.extend(len(row.tokens) for row in rows if row.tokens is not None)
        return original(rows)

    loaded.engine.step, kept_step = step, original  # type: ignore[method-assign, assignment]
    try:
        events = stage.run()
    finally:
        loaded.engine.step = kept_step  # type: ignore[method-assign]
    assert widths[:6] == [100, 400, 12, 88, 168, 132]
    assert [(node.start, node.end) for node in offered(events)] == [(0, 512), (512, 768)]
    assert restored(events, 2).length == 600
    assert said(events, 2) == cold(loaded, [*prompt[:600], *prompt_of(9, 4)], Sampling())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_that_is_cut_short_goes_on_from_where_it_was(tiny: MakeTiny, family: str) -> None:
    loaded = load_tiny(tiny(family))
    prompt = prompt_of(900)
    stage = Phases(loaded, [start(1, prompt)], [start(2, prompt)], prefill_chunk_tokens=300)
    num_steps = 0
    original = loaded.engine.step

    def step(rows: list[RowStep]) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            stage.channel.waiting.append(release(1))
        return original(rows)

    loaded.engine.step = step  # type: ignore[method-assign, assignment]
    try:
        events: list[AnyEvent] = stage.run()
    finally:
        loaded.engine.step = original  # type: ignore[method-assign]
    assert restored(events, 2).length == kept(events, 1)[-1].length == (600 if family == "llama" else 512)
    assert said(events, 2) == cold(loaded, prompt, Sampling())
