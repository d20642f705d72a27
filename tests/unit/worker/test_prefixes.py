"""A row says the same wherever its beginning comes from, and the host hears truly what was found and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.engine import fake
from runtime.engine.engine import Loaded
from runtime.prefix.segment import SUFFIX
from runtime.protocol.commands import AnyCommand, Configure, FakeScript, Fault, Forget, Inspect, Load, Prefill, Publish, Unpin
from runtime.protocol.events import (
    AnyEvent,
    Inspected,
    Kept,
    Prefilled,
    Refused,
    Released,
    Restored,
    SegmentPublished,
    SegmentRejected,
    StepDone,
)
from runtime.protocol.ids import SequenceId
from runtime.testing import expected_tokens
from runtime.worker.prefix_form import form_of
from tests.support.phases import (
    OWNER,
    SCOPE,
    Phases,
    ends,
    kept,
    offered,
    publish_all,
    release,
    restored,
    said,
    segments_of,
    start,
)

OTHER_SCOPE = bytes(reversed(SCOPE))


def load_fake(*faults: Fault, **script: object) -> Loaded:
    return fake.load(Load("m", "", kind="fake", fake=FakeScript(faults=faults, **script)), lambda stage, done, total: None)  # type: ignore[arg-type]


FORM = form_of(load_fake())
assert FORM is not None


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [32 + (7 * index + seed * (index % 13) + index // 95) % 95 for index in range(length)]


def tokens_of(events: list[AnyEvent], sequence: int) -> list[int]:
    return [token for tokens, _ in said(events, sequence) for token in tokens]


def expected(prompt: list[int], max_tokens: int = 4) -> list[int]:
    return expected_tokens(prompt, max_tokens=max_tokens)


def positions(events: list[AnyEvent]) -> list[tuple[int, int]]:
    return [(node.start, node.end) for node in offered(events)]


# -- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 511, 512, 513, 1000])
def test_a_prompt_asked_again_leaves_one_token_to_compute(length: int) -> None:
    prompt = prompt_of(length)
    events = Phases(load_fake(), [start(1, prompt)], [start(2, prompt)]).run()
    assert tokens_of(events, 1) == tokens_of(events, 2) == expected(prompt)
    assert restored(events, 1) == Restored(SequenceId(1), 0, "none")
    assert restored(events, 2) == Restored(SequenceId(2), length - 1, "memory" if length > 1 else "none")


@pytest.mark.parametrize("shared", [1, 100, 255, 256, 257, 400, 512, 599, 600])
def test_a_prompt_that_parts_anywhere_is_restored_up_to_there(shared: int) -> None:
    first = prompt_of(600)
    second = [*first[:shared], 200, *prompt_of(50, 3)]
    events = Phases(load_fake(), [start(1, first)], [start(2, second)], [start(3, first)]).run()
    assert restored(events, 2).length == shared
    assert restored(events, 3).length == 599
    assert tokens_of(events, 2) == expected(second)
    assert tokens_of(events, 3) == expected(first)


def test_the_next_turn_finds_the_answer_too_but_for_its_last_token() -> None:
    first = prompt_of(500)
    second = [*first, *expected(first, 300), *prompt_of(9)]
    events = Phases(load_fake(), [start(1, first, max_tokens=300)], [start(2, second)]).run()
    assert restored(events, 2).length == 500 + 299
    assert tokens_of(events, 2) == expected(second)
    assert positions(events) == [(0, 256), (256, 512), (512, 768)]


def test_what_is_held_is_copied_once() -> None:
    prompt = prompt_of(1000)
    stage = Phases(load_fake(), [start(1, prompt)], [start(2, prompt)], [start(3, prompt)])
    events = stage.run()
    assert positions(events) == [(0, 512), (512, 768)]
    assert stage.memory.num_bytes == (1000 + 3) * 16


def test_nothing_of_another_scope_is_found() -> None:
    prompt = prompt_of(600)
    events = Phases(load_fake(), [start(1, prompt)], [start(2, prompt, scope=OTHER_SCOPE)]).run()
    assert restored(events, 2).length == 0
    assert tokens_of(events, 2) == expected(prompt)


def test_a_row_that_keeps_nothing_still_finds() -> None:
    prompt = prompt_of(600)
    longer = [*prompt, *prompt_of(300, 5)]
    stage = Phases(load_fake(), [start(1, prompt)], [start(2, longer, keep=False)], [start(3, longer)])
    events = stage.run()
    assert restored(events, 2).length == restored(events, 3).length == 600
    assert kept(events, 2) == []


def test_a_row_without_prefixes_neither_finds_nor_keeps_nor_is_told_of() -> None:
    prompt = prompt_of(600)
    plain = start(1, prompt).rows[0]
    plain = type(plain)(plain.sequence, plain.tokens, plain.prompt_length, plain.max_length, plain.limit)
    stage = Phases(load_fake(), [Prefill((plain,))])
    events = stage.run()
    assert not any(isinstance(event, Restored | Kept) for event in events)
    assert stage.memory.num_nodes == 0


def test_the_host_hears_in_an_order_it_can_act_on() -> None:
    prompt = prompt_of(1300)
    stage = Phases(load_fake(), [start(1, prompt)], [release(1)])
    kinds = [type(event) for event in stage.run()]
    assert kinds[0] is Restored
    assert kinds[1:5] == [Kept, Kept, Kept, Prefilled]
    assert kinds[5] is StepDone
    assert kinds[-2:] == [Kept, Released]
    lengths = [event.length for event in kept(stage.channel.events, 1)]
    assert lengths == [512, 1024, 1300, 1303]


def test_nodes_are_offered_only_once_a_token_proved_them() -> None:
    events = Phases(load_fake(), [start(1, prompt_of(1300))]).run()
    assert [len(event.nodes) for event in kept(events, 1)] == [0, 0, 3, 0]


def test_nothing_is_kept_without_a_budget() -> None:
    prompt = prompt_of(600)
    stage = Phases(load_fake(), [start(1, prompt)], [start(2, prompt)], prefix_memory_bytes=0)
    events = stage.run()
    assert (restored(events, 2).length, kept(events, 1), stage.memory.num_bytes) == (0, [], 0)


def test_a_context_larger_than_the_budget_is_kept_as_far_as_it_fits() -> None:
    prompt = prompt_of(2000)
    stage = Phases(load_fake(), [start(1, prompt)], [start(2, prompt)], prefix_memory_bytes=1100 * 16)
    events = stage.run()
    assert restored(events, 2).length == 1024
    assert tokens_of(events, 2) == expected(prompt)


def test_old_prefixes_make_room_for_new_ones() -> None:
    prompts = [[33 + number, *prompt_of(599)] for number in range(5)]
    phases = [[start(number, prompt)] for number, prompt in enumerate(prompts)]
    stage = Phases(load_fake(), *phases, [start(8, prompts[0]), start(9, prompts[4])], prefix_memory_bytes=1300 * 16)
    events = stage.run()
    assert restored(events, 8).length == 0
    assert restored(events, 9).length == 599
    assert tokens_of(events, 8) == expected(prompts[0])


def test_a_smaller_budget_holds_at_once() -> None:
    stage = Phases(load_fake(), [start(1, prompt_of(600))], [Configure(0, 550 * 16), Inspect(1)])
    report = next(event.report for event in stage.run() if isinstance(event, Inspected))
    assert 0 < report.prefix_memory_bytes <= 550 * 16
    assert report.prefix_nodes == stage.memory.num_nodes


def test_a_budget_below_nothing_is_nothing() -> None:
    stage = Phases(load_fake(), [start(1, prompt_of(600))], [Configure(0, -1), start(2, prompt_of(600))], prefix_memory_bytes=-1)
    assert restored(stage.run(), 2).length == 0


def test_an_engine_that_refuses_a_prefix_computes_it() -> None:
    loaded = load_fake()

    def refuse(*arguments: object) -> None:
        raise fake.RowError("generation_failed", "no")

    loaded.engine.restore = refuse  # type: ignore[method-assign]
    prompt = prompt_of(600)
    events = Phases(loaded, [start(1, prompt)], [start(2, prompt)]).run()
    assert restored(events, 2) == Restored(SequenceId(2), 0, "none")
    assert tokens_of(events, 2) == expected(prompt)


def test_a_malformed_use_is_refused_and_harms_nobody() -> None:
    prompt = prompt_of(600)
    events = Phases(load_fake(), [start(1, prompt, boundaries=(601,)), start(2, prompt)]).run()
    assert [(event.code, event.sequences) for event in events if isinstance(event, Refused)] == [("invalid_request", (1,))]
    assert tokens_of(events, 2) == expected(prompt)


# -- ends before the end ----------------------------------------------------------------------------------


def test_who_gives_up_and_comes_back_gets_further_each_time() -> None:
    prompt = prompt_of(1000)
    stage = Phases(load_fake(), [start(1, prompt)], [start(2, prompt)], [start(3, prompt)], prefill_chunk_tokens=100)
    num_chunks = 0
    original = stage.loop._engine.step

    def step(rows: object) -> object:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks in (2, 4):
            stage.channel.waiting.append(release(num_chunks // 2))
        return original(rows)  # type: ignore[arg-type]

    stage.loop._engine.step = step  # type: ignore[method-assign, assignment]
    events = stage.run()
    assert [restored(events, number).length for number in (1, 2, 3)] == [0, 200, 400]
    assert tokens_of(events, 3) == expected(prompt)


def test_what_a_cancelled_row_has_said_is_kept() -> None:
    prompt = prompt_of(300)
    stage = Phases(load_fake(), [start(1, prompt, max_tokens=100)], [start(2, [*prompt, *expected(prompt, 100)])])

    def cancel(event: AnyEvent) -> list[AnyCommand]:
        return [release(1)] if isinstance(event, StepDone) and event.rows[0].index == 320 else []

    stage.channel.on_send = cancel
    events = stage.run()
    num_said = len(tokens_of(events, 1))
    assert num_said < 100
    assert restored(events, 2).length == 300 + num_said - 1
    assert tokens_of(events, 2) == expected([*prompt, *expected(prompt, 100)])


@pytest.mark.parametrize("action", ["nonfinite", "raise"])
@pytest.mark.parametrize(("at", "number"), [("prefill", 1), ("prefill", 2), ("prefill", 3), ("decode", 1), ("decode", 3)])
def test_of_a_row_that_fails_nothing_is_kept(at: str, number: int, action: str) -> None:
    fault = Fault(at, action, number=number, sequence_number=1)  # type: ignore[arg-type]
    prompt = prompt_of(1300)
    stage = Phases(load_fake(fault), [start(1, prompt, max_tokens=9)], [Inspect(1)], [start(2, prompt)])
    events = stage.run()
    report = next(event.report for event in events if isinstance(event, Inspected))
    assert report.prefix_nodes == report.prefix_memory_bytes == 0
    assert any(isinstance(event, Refused) and event.sequences == (1,) for event in events)
    assert restored(events, 2).length == 0
    assert tokens_of(events, 2) == expected(prompt)


def test_a_failing_row_leaves_the_whole_blocks_that_others_had_kept() -> None:
    fault = Fault("decode", "nonfinite", sequence_number=2)
    prompt = prompt_of(600)
    longer = [*prompt, *prompt_of(600, 2)]
    events = Phases(load_fake(fault), [start(1, prompt, max_tokens=1)], [start(2, longer)], [start(3, longer)]).run()
    assert restored(events, 2).length == 600
    assert restored(events, 3).length == 512


def test_the_step_under_way_is_not_kept_when_a_row_ends_before_its_result() -> None:
    """The end token comes with a step, and by then the next one has been submitted with it."""
    prompt = prompt_of(300)
    loaded = load_fake(reply="Hello")
    row = start(1, prompt, max_tokens=50).rows[0]
    row = type(row)(row.sequence, row.tokens, row.prompt_length, row.max_length, row.limit, prefix=row.prefix)
    stage = Phases(loaded, [Prefill((row,))])
    events = stage.run()
    assert kept(events, 1)[-1].length == 300 + len("Hello")


# -- explicit prefill -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 255, 256, 512, 600, 1300])
def test_a_prefill_alone_computes_all_says_nothing_and_is_pinned(length: int) -> None:
    prompt = prompt_of(length)
    phases: list[list[AnyCommand]] = [[start(number, prompt, max_tokens=0, prefill_only=True, pin=True)] for number in (1, 2)]
    stage = Phases(load_fake(), *phases, [start(3, [*prompt, 99])])
    events = stage.run()
    for number in (1, 2):
        assert (ends(events, number), tokens_of(events, number)) == (["length"], [])
        assert [(event.length, event.pinned_length) for event in kept(events, number)][-1] == (length, length)
        told = [event for event in events if isinstance(event, Kept | Prefilled)]
        assert any(isinstance(event, Prefilled) and event.rows == ((number, length),) for event in told)
    assert restored(events, 2).length == length - 1
    assert restored(events, 3).length == length
    assert stage.memory.pinned_bytes == length * 16


def test_a_pin_outlives_pressure_until_it_is_taken_off() -> None:
    prompt = prompt_of(600)
    others: list[list[AnyCommand]] = [[start(number, [33 + number, *prompt_of(599)])] for number in range(10, 14)]
    pinned = start(1, prompt, max_tokens=0, prefill_only=True, pin=True)
    stage = Phases(
        load_fake(),
        [pinned],
        *others,
        [start(2, prompt, keep=False)],
        [Unpin((SequenceId(1), SequenceId(77)))],
        *[[start(number, [33 + number, *prompt_of(599)])] for number in range(20, 24)],
        [start(3, prompt)],
        prefix_memory_bytes=1300 * 16,
    )
    events = stage.run()
    assert restored(events, 2).length == 599
    assert restored(events, 3).length == 0


def test_forgetting_a_scope_drops_it_and_keeps_nothing_more_of_it() -> None:
    prompt = prompt_of(600)
    stage = Phases(
        load_fake(),
        [start(1, prompt, pin=True), start(2, prompt, scope=OTHER_SCOPE)],
        [Forget((SCOPE, bytes(32))), start(3, prompt)],
    )
    events = stage.run()
    assert restored(events, 3).length == 0
    assert tokens_of(events, 3) == expected(prompt)
    assert {node.scope for node in stage.memory._nodes.values()} == {OTHER_SCOPE}


# -- files ------------------------------------------------------------------------------------------------


def published(root: Path, prompt: list[int]) -> list[AnyEvent]:
    stage = Phases(load_fake(), [start(1, prompt)], root=root)
    stage.channel.on_send = publish_all
    return stage.run()


def files(root: Path) -> list[Path]:
    return sorted(root.rglob(f"*{SUFFIX}"))


def test_what_one_loop_publishes_another_restores(tmp_path: Path) -> None:
    prompt = prompt_of(1300)
    before = published(tmp_path, prompt)
    segments = segments_of(before, form=FORM, length=1 << 20)
    assert [(segment.start, segment.end) for segment in segments] == [(0, 512), (512, 1024), (1024, 1280)]
    assert len(files(tmp_path)) == 3
    events = Phases(load_fake(), [start(1, prompt, segments=segments)], [start(2, prompt)], root=tmp_path).run()
    first = restored(events, 1)
    assert (first.length, first.source, first.num_files, first.misses) == (1280, "file", 3, ())
    assert first.num_bytes > 1280 * 16
    assert first.seconds > 0
    assert restored(events, 2).source == "memory"
    assert tokens_of(events, 1) == tokens_of(events, 2) == expected(prompt)
    assert offered(events) == [], "what lies in files was offered for files"


def test_a_whole_prompt_in_a_file_leaves_one_token(tmp_path: Path) -> None:
    prompt = prompt_of(512)
    (segment,) = segments_of(published(tmp_path, prompt), form=FORM, length=1 << 20)
    cut = type(segment)(segment.name, 0, 511, False)
    events = Phases(load_fake(), [start(1, prompt, segments=[cut])], [start(2, [*prompt, 99])], root=tmp_path).run()
    assert restored(events, 1).length == 511
    assert restored(events, 2).length == 512, "memory has the whole blocks that were read"
    assert tokens_of(events, 1) == expected(prompt)


def test_files_are_read_without_memory(tmp_path: Path) -> None:
    prompt = prompt_of(1300)
    segments = segments_of(published(tmp_path, prompt), form=FORM, length=1 << 20)
    events = Phases(load_fake(), [start(1, prompt, segments=segments)], root=tmp_path, prefix_memory_bytes=0).run()
    assert restored(events, 1).length == 1280
    assert tokens_of(events, 1) == expected(prompt)


def test_files_go_on_where_memory_ends(tmp_path: Path) -> None:
    prompt = prompt_of(1300)
    segments = segments_of(published(tmp_path, prompt), form=FORM, length=1 << 20)
    shorter = [*prompt[:700], 99]
    events = Phases(load_fake(), [start(1, shorter)], [start(2, prompt, segments=segments)], root=tmp_path).run()
    found = restored(events, 2)
    assert (found.length, found.source, found.num_files) == (1280, "file", 2)
    assert tokens_of(events, 2) == expected(prompt)


def test_no_file_is_read_when_memory_reaches_as_far(tmp_path: Path) -> None:
    prompt = prompt_of(1300)
    segments = segments_of(published(tmp_path, prompt), form=FORM, length=1 << 20)
    events = Phases(load_fake(), [start(1, prompt)], [start(2, prompt, segments=segments)], root=tmp_path).run()
    assert (restored(events, 2).source, restored(events, 2).num_files) == ("memory", 0)


def test_eight_rows_that_want_the_same_files_read_them_once(tmp_path: Path) -> None:
    prompt = prompt_of(1300)
    segments = segments_of(published(tmp_path, prompt), form=FORM, length=1 << 20)
    phase = [start(number, [*prompt, 40 + number], segments=segments) for number in range(8)]
    events = Phases(load_fake(), phase, root=tmp_path).run()
    assert [restored(events, number).length for number in range(8)] == [1280] * 8
    assert sum(restored(events, number).num_files for number in range(8)) == 3
    for number in range(8):
        assert tokens_of(events, number) == expected([*prompt, 40 + number])


@pytest.mark.parametrize("place", [9, 300, -1])
def test_a_damaged_file_is_removed_and_what_it_held_is_computed(tmp_path: Path, place: int) -> None:
    prompt = prompt_of(1300)
    segments = segments_of(published(tmp_path, prompt), form=FORM, length=1 << 20)
    (path,) = [path for path in files(tmp_path) if segments[1].name.hex() in path.name]
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    events = Phases(load_fake(), [start(1, prompt, segments=segments)], root=tmp_path).run()
    found = restored(events, 1)
    assert found.length == 512
    assert [(miss.name, miss.is_removed) for miss in found.misses] == [(segments[1].name, True)]
    assert not path.exists()
    assert tokens_of(events, 1) == expected(prompt)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_evicted_file_shortens_the_chain(tmp_path: Path, number: int) -> None:
    prompt = prompt_of(1300)
    segments = segments_of(published(tmp_path, prompt), form=FORM, length=1 << 20)
    (path,) = [path for path in files(tmp_path) if segments[number].name.hex() in path.name]
    path.unlink()
    events = Phases(load_fake(), [start(1, prompt, segments=segments)], root=tmp_path).run()
    found = restored(events, 1)
    assert (found.length, found.source) == (512 * number, "file" if number else "none")
    assert [(miss.reason, miss.is_removed) for miss in found.misses] == [("absent", False)]
    assert tokens_of(events, 1) == expected(prompt)


def test_another_prompts_files_are_never_taken(tmp_path: Path) -> None:
    segments = segments_of(published(tmp_path, prompt_of(1300)), form=FORM, length=1 << 20)
    other = [35, *prompt_of(1299)]
    events = Phases(load_fake(), [start(1, other, segments=segments)], root=tmp_path).run()
    assert restored(events, 1).length == 0
    assert tokens_of(events, 1) == expected(other)


def test_a_row_released_while_its_files_are_read_is_gone_and_the_next_one_finds_them(tmp_path: Path) -> None:
    prompt = prompt_of(1300)
    segments = segments_of(published(tmp_path, prompt), form=FORM, length=1 << 20)
    phase = [start(1, prompt, segments=segments), release(1), start(2, prompt, segments=segments)]
    events = Phases(load_fake(), phase, root=tmp_path).run()
    assert restored(events, 2).length == 1280
    assert tokens_of(events, 2) == expected(prompt)
    assert not [event for event in events if isinstance(event, Restored) and event.sequence == 1]


def test_a_node_that_had_to_go_is_not_written(tmp_path: Path) -> None:
    stage = Phases(load_fake(), [start(1, prompt_of(600))], [Forget((SCOPE,)), Publish(((1, OWNER), (99, OWNER)))], root=tmp_path)
    rejected = [(event.node, event.reason) for event in stage.run() if isinstance(event, SegmentRejected)]
    assert rejected == [(1, "absent"), (99, "absent")]
    assert files(tmp_path) == []


def test_without_a_directory_nothing_is_written() -> None:
    stage = Phases(load_fake(), [start(1, prompt_of(600))])
    stage.channel.on_send = publish_all
    assert [event.reason for event in stage.run() if isinstance(event, SegmentRejected)] == ["io"]


def test_a_directory_that_cannot_be_written_is_a_rejection_and_the_node_is_offered_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    prompt = prompt_of(600)
    stage = Phases(load_fake(), [start(1, prompt)], [start(2, prompt)], root=tmp_path / "file")
    stage.channel.on_send = publish_all
    events = stage.run()
    assert [event.reason for event in events if isinstance(event, SegmentRejected)] == ["io", "io"]
    assert positions(events) == [(0, 512), (0, 512)]
    assert tokens_of(events, 2) == expected(prompt)


def test_two_loops_of_one_model_write_one_file(tmp_path: Path) -> None:
    prompt = prompt_of(600)
    first, second = published(tmp_path, prompt), published(tmp_path, prompt)
    (one,) = [event for event in first if isinstance(event, SegmentPublished)]
    (other,) = [event for event in second if isinstance(event, SegmentPublished)]
    assert (one.name, one.is_new, other.is_new) == (other.name, True, False)
    assert one.num_bytes == files(tmp_path)[0].stat().st_size


def test_the_fingerprint_is_the_same_in_every_process_and_another_for_other_models_and_machines() -> None:
    def fingerprint(loaded: Loaded) -> str:
        form = form_of(loaded)
        assert form is not None
        return form.facts.fingerprint

    loaded = load_fake()
    elsewhere = Loaded(loaded.engine, loaded.tokenizer, loaded.facts, "another library")
    prints = [fingerprint(one) for one in (loaded, load_fake(), load_fake(eos_one_in=9), elsewhere)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    form = form_of(loaded)
    assert form is not None
    assert (form.facts.style, form.facts.slice_bytes_per_token, form.facts.checkpoint_bytes) == ("dense", 16, 0)
