"""The loop gives every row the tokens it would have alone, whatever joins, leaves, parks or fails beside it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.fake_text import EOS, FakeDetokenizer, FakeTokenizer
from runtime.protocol.commands import (
    AnyCommand,
    Configure,
    FakeScript,
    Fault,
    Grant,
    Inspect,
    Load,
    Prefill,
    PrefillRow,
    Release,
    Sampling,
    Shutdown,
)
from runtime.protocol.events import AnyEvent, Inspected, Prefilled, Refused, Released, StepDone
from runtime.protocol.frames import FrameError
from runtime.protocol.ids import RequestId, SequenceId
from runtime.testing import expected_text, expected_tokens
from tests.unit.worker.stage import Stage, ends_of, row, step_of_release, text_of, tokens_of

HELLO = list(b"Hello")
LONG = list(range(32, 127)) * 3


def release(*sequences: int) -> Release:
    return Release((), tuple(SequenceId(sequence) for sequence in sequences))


def grant(sequence: int, limit: int) -> Grant:
    return Grant(((SequenceId(sequence), limit),))


def refusals(events: list[AnyEvent]) -> list[tuple[str, tuple[int, ...]]]:
    return [(event.code, event.sequences) for event in events if isinstance(event, Refused)]


# -- one sequence -----------------------------------------------------------------------------------------


def test_a_sequence_is_prefilled_then_decoded_to_its_length() -> None:
    events = Stage([[Prefill((row(1, HELLO),))]]).run()
    assert tokens_of(events, 1) == expected_tokens(HELLO, max_tokens=8)
    assert text_of(events, 1) == expected_text(HELLO, max_tokens=8)
    assert ends_of(events, 1) == [("length", None)]
    assert isinstance(events[0], Prefilled)
    assert events[0].rows == ((1, 5),)


def test_no_step_is_submitted_beyond_the_length() -> None:
    stage = Stage([[Prefill((row(1, HELLO),))]])
    stage.run()
    assert len(stage.engine.steps) == 8


def test_an_end_token_ends_it_and_is_not_listed() -> None:
    events = Stage([[Prefill((row(1, HELLO, max_tokens=50),))]], script=FakeScript(reply="Hi")).run()
    assert tokens_of(events, 1) == [72, 105]
    assert ends_of(events, 1) == [("stop", None)]


def test_an_end_token_first_gives_no_token_at_all() -> None:
    events = Stage([[Prefill((row(1, HELLO),))]], script=FakeScript(reply="")).run()
    assert (tokens_of(events, 1), text_of(events, 1), ends_of(events, 1)) == ([], "", [("stop", None)])


def test_an_ignored_end_token_is_committed_without_text() -> None:
    events = Stage([[Prefill((row(1, HELLO, max_tokens=4, ignore_eos=True),))]], script=FakeScript(reply="Hi")).run()
    assert tokens_of(events, 1) == [72, 105, EOS, EOS]
    assert (text_of(events, 1), ends_of(events, 1)) == ("Hi", [("length", None)])


def test_a_stop_string_ends_it_and_nothing_of_it_is_shown() -> None:
    events = Stage(
        [[Prefill((row(1, HELLO, max_tokens=50, stop=("END", "ENDING")),))]], script=FakeScript(reply="xENDING, it said")
    ).run()
    assert (text_of(events, 1), ends_of(events, 1)) == ("x", [("stop", "ENDING")])
    assert bytes(tokens_of(events, 1)) == b"xENDING"


def test_a_character_cut_by_the_length_becomes_a_replacement_character_only_at_the_end() -> None:
    events = Stage([[Prefill((row(1, HELLO, max_tokens=3),))]], script=FakeScript(reply="a🎉")).run()
    assert [r.text for event in events if isinstance(event, StepDone) for r in event.rows] == ["a", "", "\ufffd"]


def test_nothing_to_generate_is_an_end_without_a_step() -> None:
    stage = Stage([[Prefill((row(1, HELLO, max_tokens=0),))]])
    assert ends_of(stage.run(), 1) == [("length", None)]
    assert stage.engine.steps == []


def test_an_idle_loop_waits_for_a_command() -> None:
    stage = Stage([[], [], [], [Inspect(1)]])
    stage.run()
    assert stage.channel.num_idle == 2


# -- chunks -----------------------------------------------------------------------------------------------


def test_a_long_prompt_is_fed_in_chunks_between_decode_steps() -> None:
    stage = Stage([[Prefill((row(1, HELLO, max_tokens=40),))], [Prefill((row(2, LONG),))]], prefill_chunk_tokens=32)
    events = stage.run()
    kinds = "".join("d" if step[0].tokens is None else "p" for step in stage.engine.steps)
    assert "ppp" not in kinds.lstrip("p")
    assert kinds.count("p") == 1 + -(-len(LONG) // 32)
    assert tokens_of(events, 2) == expected_tokens(LONG, max_tokens=8)


def test_a_chunk_is_bounded_over_all_its_rows() -> None:
    rows = tuple(row(number, LONG[: 40 * number]) for number in range(1, 6))
    stage = Stage([[Prefill(rows)]], prefill_chunk_tokens=64)
    events = stage.run()
    for step in stage.engine.steps:
        widths = [len(r.tokens) for r in step if r.tokens is not None]
        assert not widths or len(widths) * max(widths) <= 64
    for number in range(1, 6):
        assert tokens_of(events, number) == expected_tokens(LONG[: 40 * number], max_tokens=8)


def test_a_model_that_cannot_split_prompts_gets_each_whole_and_alone() -> None:
    stage = Stage([[Prefill((row(1, LONG), row(2, HELLO)))]], prefill_chunk_tokens=16, chunked_prefill=False)
    events = stage.run()
    fed = [[len(r.tokens) for r in step if r.tokens is not None] for step in stage.engine.steps if step[0].tokens is not None]
    assert fed == [[len(HELLO)], [len(LONG)]]
    assert tokens_of(events, 1) == expected_tokens(LONG, max_tokens=8)


def test_a_short_prompt_overtakes_a_long_one() -> None:
    events = Stage([[Prefill((row(1, LONG),)), Prefill((row(2, HELLO),))]], prefill_chunk_tokens=16).run()
    assert [event.rows[0][0] for event in events if isinstance(event, Prefilled)] == [2, 1]


def test_no_more_rows_decode_at_once_than_there_are_slots() -> None:
    stage = Stage([[Prefill(tuple(row(number, HELLO) for number in range(5)))]], max_slots=2)
    events = stage.run()
    assert max(len(step) for step in stage.engine.steps if step[0].tokens is None) == 2
    assert all(tokens_of(events, number) == expected_tokens(HELLO, max_tokens=8) for number in range(5))


# -- limits -----------------------------------------------------------------------------------------------


def test_a_sequence_parks_at_its_limit_and_goes_on_where_it_was() -> None:
    stage = Stage([[Prefill((row(1, HELLO, limit=8),))], [Inspect(1)], *([[]] * 12), [Inspect(2), grant(1, 100)]])
    events = stage.run()
    before = events[: next(i for i, event in enumerate(events) if isinstance(event, Inspected) and event.number == 2)]
    assert tokens_of(before, 1) == expected_tokens(HELLO, max_tokens=3)
    assert tokens_of(events, 1) == expected_tokens(HELLO, max_tokens=8)
    assert len(stage.engine.steps) == 8, "a step was submitted beyond a limit or the length"
    report = next(event.report for event in events if isinstance(event, Inspected) and event.number == 2)
    assert (report.parked, report.running) == ((1,), ())


def test_a_lower_or_repeated_or_unknown_grant_is_ignored() -> None:
    turns = [[Prefill((row(1, HELLO, limit=8),)), grant(1, 7), grant(1, 8), grant(99, 50)], [], [grant(1, 9), grant(1, 6)]]
    events = Stage(turns).run()
    assert tokens_of(events, 1) == expected_tokens(HELLO, max_tokens=4)


def test_a_replay_at_its_limit_computes_no_token_until_it_is_granted_one() -> None:
    output = expected_tokens(HELLO, max_tokens=3)
    stage = Stage([[Prefill((row(1, HELLO, output=output, limit=8),))], *([[]] * 5), [Inspect(1), grant(1, 100)]])
    events = stage.run()
    report = next(event.report for event in events if isinstance(event, Inspected))
    assert (report.parked, report.running, report.prefilling) == ((1,), (), ())
    assert isinstance(events[0], Inspected)
    assert output + tokens_of(events, 1) == expected_tokens(HELLO, max_tokens=8)


def test_a_parked_replay_holds_up_none_of_its_batch_mates() -> None:
    output = expected_tokens(HELLO, max_tokens=3)
    events = Stage([[Prefill((row(1, HELLO, output=output, limit=8), row(2, LONG)))]], prefill_chunk_tokens=16).run()
    assert tokens_of(events, 1) == []
    assert tokens_of(events, 2) == expected_tokens(LONG, max_tokens=8)


# -- replays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_before", range(9))
def test_a_replay_goes_on_as_if_nothing_had_happened(num_before: int) -> None:
    reply = "né END"
    said = list(reply.encode())
    script = FakeScript(reply="né ENDE")
    events = Stage(
        [[Prefill((row(1, HELLO, max_tokens=50, output=said[: min(num_before, len(said))], stop=("ENDE",)),))]], script=script
    ).run()
    whole = Stage([[Prefill((row(1, HELLO, max_tokens=50, stop=("ENDE",)),))]], script=script).run()
    shown_before = "".join(
        r.text for event in whole if isinstance(event, StepDone) for r in event.rows if r.index < 5 + min(num_before, len(said))
    )
    assert shown_before + text_of(events, 1) == text_of(whole, 1) == "né "
    assert ends_of(events, 1) == [("stop", "ENDE")]


def test_positions_are_absolute_and_without_gaps() -> None:
    output = expected_tokens(HELLO, max_tokens=3)
    events = Stage([[Prefill((row(1, HELLO, output=output),))]]).run()
    assert [r.index for event in events if isinstance(event, StepDone) for r in event.rows] == [8, 9, 10, 11, 12]


# -- release ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", range(12))
def test_a_release_takes_effect_before_the_next_step_whatever_the_state(turn: int) -> None:
    """At turn 0 the sequence is not yet fed, then prefills in chunks, decodes, and has ended at last."""
    turns: list[list[AnyCommand]] = [[Prefill((row(1, LONG[:70], max_tokens=4), row(2, HELLO, max_tokens=30)))]]
    turns += [[] for _ in range(turn)]
    turns += [[release(1)]]
    stage = Stage(turns, prefill_chunk_tokens=32)
    events = stage.run()
    released_at = step_of_release(events, 1)
    assert all(number <= released_at or all(r.sequence != 1 for r in step) for number, step in enumerate(stage.engine.steps, 1))
    after = events[next(i for i, event in enumerate(events) if isinstance(event, Released)) + 1 :]
    assert tokens_of(after, 1) == []
    assert tokens_of(events, 2) == expected_tokens(HELLO, max_tokens=30)


def test_a_released_sequence_may_start_again_at_once() -> None:
    turns: list[list[AnyCommand]] = [[Prefill((row(1, HELLO, max_tokens=50),))], [], [], [], [release(1), Prefill((row(1, LONG),))]]
    events = Stage(turns).run()
    after = events[next(i for i, event in enumerate(events) if isinstance(event, Released)) + 1 :]
    assert tokens_of(after, 1) == expected_tokens(LONG, max_tokens=8)


def test_releases_are_answered_also_for_the_unknown() -> None:
    events = Stage([[release(7, 8), Release((RequestId(3),), ()), Release()]]).run()
    assert [(event.requests, event.sequences) for event in events if isinstance(event, Released)] == [
        ((), (7, 8)),
        ((3,), ()),
        ((), ()),
    ]


# -- duplicates and refusals ------------------------------------------------------------------------------


def test_the_same_prefill_twice_is_one_also_after_its_end() -> None:
    start = Prefill((row(1, HELLO),))
    events = Stage([[start, start], [start], *([[]] * 20), [start]]).run()
    assert tokens_of(events, 1) == expected_tokens(HELLO, max_tokens=8)
    assert (len(ends_of(events, 1)), refusals(events)) == (1, [])


def test_a_sequence_that_is_asked_to_be_two_things_is_ended() -> None:
    events = Stage([[Prefill((row(1, HELLO), row(2, HELLO))), Prefill((row(1, LONG),))]]).run()
    assert refusals(events) == [("conflict", (1,))]
    assert tokens_of(events, 1) == []
    assert tokens_of(events, 2) == expected_tokens(HELLO, max_tokens=8)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (row(1, [1] * 64), "context_length_exceeded"),
        (row(1, [1] * 99), "context_length_exceeded"),
        (row(1, [300]), "invalid_request"),
        (row(1, []), "invalid_request"),
        (row(1, HELLO, sampling=Sampling(top_p=7.0)), "invalid_request"),
        (row(1, HELLO, first_index=3), "invalid_request"),
    ],
)
def test_a_row_that_cannot_start_is_refused_alone(wrong: PrefillRow, code: str) -> None:
    events = Stage([[Prefill((row(2, HELLO), wrong, row(3, HELLO)))]], script=FakeScript(context_length=64)).run()
    assert refusals(events) == [(code, (1,))]
    assert tokens_of(events, 2) == tokens_of(events, 3) == expected_tokens(HELLO, max_tokens=8)


def test_a_length_beyond_the_context_ends_at_the_context() -> None:
    events = Stage([[Prefill((row(1, HELLO, max_tokens=1000),))]], script=FakeScript(context_length=64)).run()
    assert (len(tokens_of(events, 1)), ends_of(events, 1)) == (59, [("length", None)])


@pytest.mark.parametrize("at", ["prefill", "decode"])
@pytest.mark.parametrize("action", ["raise", "nonfinite"])
def test_a_row_that_fails_in_a_step_is_refused_and_its_batch_mates_go_on(at: str, action: str) -> None:
    script = FakeScript(faults=(Fault(at, action, sequence_number=2),))
    stage = Stage([[Prefill(tuple(row(number, HELLO) for number in (1, 2, 3)))]], script=script)
    events = stage.run()
    assert refusals(events) == [("generation_failed", (2,))]
    assert len(tokens_of(events, 2)) == (0 if at == "prefill" else 1)
    assert tokens_of(events, 1) == tokens_of(events, 3) == expected_tokens(HELLO, max_tokens=8)


def test_a_detokenizer_that_fails_ends_its_row_alone() -> None:
    class Detokenizer(FakeDetokenizer):
        def push(self, token: int) -> str:
            if token == ord("!"):
                raise KeyError(token)
            return super().push(token)

    class Tokenizer(FakeTokenizer):
        def detokenizer(self) -> FakeDetokenizer:
            return Detokenizer()

    rows = (row(1, HELLO, max_tokens=50), row(2, HELLO, max_tokens=2))
    events = Stage([[Prefill(rows)]], script=FakeScript(reply="ab!c"), tokenizer=Tokenizer()).run()
    assert refusals(events) == [("generation_failed", (1,))]
    assert (text_of(events, 1), ends_of(events, 2)) == ("ab", [("length", None)])


def test_an_exception_of_the_engine_comes_out_of_the_loop() -> None:
    stage = Stage([[Prefill((row(1, HELLO),))]], script=FakeScript(faults=(Fault("decode", "raise", number=2),)))
    with pytest.raises(RuntimeError, match="scripted"):
        stage.loop.run()
    assert len(tokens_of(stage.channel.events, 1)) == 2
    stage.desk.close()


# -- other commands ---------------------------------------------------------------------------------------


def test_malformed_frames_are_counted_and_only_some_are_answered() -> None:
    flood: list[AnyCommand | FrameError] = [FrameError("malformed", "no command") for _ in range(1000)]
    events = Stage([[*flood, Prefill((row(1, HELLO),)), Inspect(1)]]).run()
    assert 1 <= refusals(events).count(("malformed", ())) <= 20
    report = next(event.report for event in events if isinstance(event, Inspected))
    assert report.malformed_frames == 1000
    assert tokens_of(events, 1) == expected_tokens(HELLO, max_tokens=8)


def test_a_flood_of_commands_does_not_keep_rows_from_decoding() -> None:
    flood = [Configure(1, 0) for _ in range(5000)]
    stage = Stage([[Prefill((row(1, HELLO),)), *flood, Inspect(1)]])
    report = next(event.report for event in stage.run() if isinstance(event, Inspected))
    assert report.steps == 8


def test_a_second_load_is_refused() -> None:
    assert refusals(Stage([[Load("m", "")]]).run()) == [("conflict", ())]


def test_shutdown_takes_the_step_under_way_and_starts_no_other() -> None:
    stage = Stage([[Prefill((row(1, HELLO, max_tokens=2000),))], [], [], [], [Shutdown()]])
    events = stage.run()
    assert len(tokens_of(events, 1)) == len(stage.engine.steps) < 10


# -- all together -----------------------------------------------------------------------------------------


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[list[AnyCommand]], list[PrefillRow], set[int]]:
    """Turns of commands, the rows they start, and which of them they release."""
    rows: list[PrefillRow] = []
    turns: list[list[AnyCommand]] = []
    released: set[int] = set()
    for _ in range(draw(st.integers(1, 12))):
        turn: list[AnyCommand] = []
        for _ in range(draw(st.integers(0, 2))):
            kind = draw(st.sampled_from(["prefill", "prefill", "grant", "release"]))
            if kind == "prefill":
                batch = [draw(new_rows(len(rows) + number)) for number in range(draw(st.integers(1, 4)))]
                rows += batch
                turn.append(Prefill(tuple(batch)))
            elif rows and kind == "grant":
                one = draw(st.sampled_from(rows))
                turn.append(grant(one.sequence, one.limit + draw(st.integers(-3, 6))))
            elif rows:
                one = draw(st.sampled_from(rows))
                released.add(one.sequence)
                turn.append(release(one.sequence))
        turns += [turn, *([[]] * draw(st.integers(0, 6)))]
    everything = [Grant(tuple((one.sequence, 1 << 20) for one in rows))]
    return [*turns, *([[]] * 100), everything], rows, released


@st.composite
def new_rows(draw: st.DrawFn, number: int) -> PrefillRow:
    prompt = draw(st.lists(st.integers(32, 126), min_size=1, max_size=40))
    sampling = draw(st.sampled_from([Sampling(), Sampling(temperature=0.7, seed=number), Sampling(repetition_penalty=1.2)]))
    num_output = draw(st.sampled_from([0, 0, 3]))
    script = FakeScript(eos_one_in=30)
    output = expected_tokens(prompt, max_tokens=num_output, sampling=sampling, script=script)
    num_known = len(prompt) + len(output)
    limit = num_known + draw(st.integers(0, 12))
    return row(number, prompt, output=output, max_tokens=draw(st.integers(4, 20)), limit=limit, sampling=sampling)


@settings(max_examples=150)
@given(workloads(), st.integers(1, 4), st.sampled_from([1, 8, 64]))
def test_every_row_gets_the_tokens_it_would_have_alone(
    workload: tuple[list[list[AnyCommand]], list[PrefillRow], set[int]], max_slots: int, chunk_tokens: int
) -> None:
    turns, rows, released = workload
    stage = Stage(turns, script=FakeScript(eos_one_in=30), max_slots=max_slots, prefill_chunk_tokens=chunk_tokens)
    events = stage.run()
    assert refusals(events) == []
    gone: set[int] = set()
    for event in events:
        if isinstance(event, Released):
            gone.update(event.sequences)
        elif isinstance(event, StepDone):
            assert not gone & {r.sequence for r in event.rows}
    for start in rows:
        prompt = start.tokens.tolist()[: start.prompt_length]
        whole = expected_tokens(
            prompt,
            max_tokens=start.max_length - start.prompt_length,
            sampling=start.sampling,
            script=FakeScript(eos_one_in=30),
        )
        committed = start.tokens.tolist()[start.prompt_length :] + tokens_of(events, start.sequence)
        if start.sequence in released:
            assert committed == whole[: len(committed)]
        else:
            assert committed == whole
            assert len(ends_of(events, start.sequence)) == 1
    left = {start.sequence for start in rows} - released
    stage.engine.release(tuple(SequenceId(sequence) for sequence in left))
    assert stage.engine.cache_bytes() == 0
