"""Files give a row what another process computed, and never anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.engine.engine import Loaded
from runtime.prefix.segment import SUFFIX
from runtime.protocol.commands import Forget, Publish
from runtime.protocol.events import AnyEvent, Restored, SegmentPublished, SegmentRejected
from runtime.worker.prefix_form import form_of
from tests.support.phases import (
    OWNER,
    SCOPE,
    Phases,
    offered,
    publish_all,
    release,
    restored,
    segments_of,
    start,
)
from tests.unit.worker.fake_prefixes import FORM, expected, load_fake, positions, prompt_of, tokens_of


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
