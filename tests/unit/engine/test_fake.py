"""The fake engine depends on every id fed, keeps rows apart, and misbehaves exactly as scripted."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import testing
from runtime.engine import fake
from runtime.engine.engine import LoadError, RowError, RowStep
from runtime.engine.fake_faults import Faults, ScriptedFault
from runtime.engine.fake_text import EOS, FakeDetokenizer
from runtime.protocol.commands import FakeScript, Fault, Load, Sampling
from runtime.protocol.ids import SequenceId

ONE, TWO = SequenceId(1), SequenceId(2)
PROMPT = list(b"Hello")
WARM = Sampling(temperature=0.8, seed=5)


def engine(script: FakeScript = FakeScript(), incarnation: int = 1) -> fake.FakeEngine:  # noqa: B008
    return fake.FakeEngine(script, Faults(script.faults, incarnation, lambda: None), script.context_length)


def add(made: fake.FakeEngine, sequence: SequenceId, prompt: list[int], sampling: Sampling = Sampling()) -> None:  # noqa: B008
    made.add(sequence, sampling, prompt_length=len(prompt), context=prompt, max_length=1000)


def step(made: fake.FakeEngine, *rows: tuple[SequenceId, list[int] | None, int]) -> list[tuple[int, ...]]:
    return [result.tokens for result in made.step([RowStep(*row) for row in rows]).result()]


def run(made: fake.FakeEngine, sequence: SequenceId, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(step(made, (sequence, prompt, 1))[0])
    while len(tokens) < num_tokens:
        tokens += step(made, (sequence, None, 1))[0]
    return tokens


@pytest.mark.parametrize("sampling", [Sampling(), WARM])
def test_tokens_are_those_the_kit_predicts(sampling: Sampling) -> None:
    made = engine()
    add(made, ONE, PROMPT, sampling)
    assert run(made, ONE, PROMPT, 40) == testing.expected_tokens(PROMPT, max_tokens=40, sampling=sampling)


def test_chunks_and_neighbours_change_nothing() -> None:
    made = engine()
    add(made, ONE, PROMPT)
    add(made, TWO, list(b"Other"), WARM)
    assert step(made, (ONE, PROMPT[:2], 0), (TWO, list(b"Oth"), 0)) == [(), ()]
    first = step(made, (ONE, PROMPT[2:], 1))[0] + step(made, (TWO, list(b"er"), 1), (ONE, None, 1))[1]
    assert list(first) == testing.expected_tokens(PROMPT, max_tokens=2)


@given(st.lists(st.integers(0, 259), min_size=1, max_size=30), st.data())
def test_any_foreign_missing_or_repeated_token_shows(prompt: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(prompt) - 1))
    foreign = [*prompt[:at], (prompt[at] + 1) % 260, *prompt[at + 1 :]]
    repeated = prompt[: at + 1] + prompt[at:]
    missing = prompt[:at] + prompt[at + 1 :]
    right = testing.expected_tokens(prompt, max_tokens=12)
    for wrong in (foreign, repeated, missing):
        assert not wrong or testing.expected_tokens(wrong, max_tokens=12) != right


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 6},
        {"temperature": 0.9},
        {"top_p": 0.9},
        {"top_k": 3},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((65, 1.0),)},
    ],
)
def test_above_temperature_0_every_setting_takes_part(change: dict[str, float]) -> None:
    changed = msgspec.structs.replace(WARM, **change)
    assert testing.expected_tokens(PROMPT, max_tokens=12, sampling=changed) != testing.expected_tokens(
        PROMPT, max_tokens=12, sampling=WARM
    )


def test_at_temperature_0_seed_and_filters_do_not() -> None:
    filtered = Sampling(seed=9, top_p=0.5, top_k=3, min_p=0.1)
    assert testing.expected_tokens(PROMPT, max_tokens=12, sampling=filtered) == testing.expected_tokens(PROMPT, max_tokens=12)


@given(st.text(min_size=1, max_size=8))
def test_hashed_tokens_are_valid_text_with_characters_of_all_lengths(prompt: str) -> None:
    tokens = testing.expected_tokens(testing.text_tokens(prompt), max_tokens=900)
    detokenizer = FakeDetokenizer()
    text = "".join(detokenizer.push(token) for token in tokens)
    assert "\ufffd" not in text
    assert {len(character.encode()) for character in text} >= {1, 2, 3}


def test_rollback_forgets_what_was_fed() -> None:
    made = engine()
    add(made, ONE, PROMPT)
    tokens = run(made, ONE, PROMPT, 6)
    made.truncate(ONE, len(PROMPT) + 2)
    assert made.length(ONE) == len(PROMPT) + 2
    assert step(made, (ONE, tokens[2:4], 2)) == [tuple(tokens[3:5])]


@pytest.mark.parametrize("sampling", [Sampling(), WARM])
@pytest.mark.parametrize("num_right", [0, 2, 4])
def test_a_verified_block_is_drawn_as_plain_decoding_draws_and_goes_on_after_what_stands(
    num_right: int, sampling: Sampling
) -> None:
    made = engine()
    right = testing.expected_tokens(PROMPT, max_tokens=9, sampling=sampling)
    add(made, ONE, PROMPT, sampling)
    step(made, (ONE, PROMPT, 1))
    proposed = [*right[1 : 1 + num_right], 0, 0, 0, 0][:4]
    (samples,) = step(made, (ONE, [right[0], *proposed], 5))
    assert list(samples[: num_right + 1]) == right[1 : num_right + 2]
    made.truncate(ONE, len(PROMPT) + 1 + num_right)
    rest = [step(made, (ONE, None, 1))[0][0] for _ in range(3)]
    assert rest == right[num_right + 2 : num_right + 5]


def test_a_reply_is_said_and_ended() -> None:
    made = engine(FakeScript(reply="né"))
    add(made, ONE, PROMPT)
    assert run(made, ONE, PROMPT, 4) == [*"né".encode(), EOS]
    assert testing.expected_text(PROMPT, max_tokens=9, script=FakeScript(reply="né")) == "né"


def test_an_end_token_comes_once_in_so_many() -> None:
    lengths = [len(testing.expected_tokens([number], max_tokens=1000, script=FakeScript(eos_one_in=20))) for number in range(200)]
    assert 15 < sum(lengths) / len(lengths) < 30


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([260], Sampling(), "prompt: token id 260 is outside the vocabulary"),
        (PROMPT, Sampling(top_p=0.0), "top_p"),
        (PROMPT, Sampling(top_k=-1), "top_k"),
        (PROMPT, Sampling(temperature=float("nan")), "temperature"),
        (PROMPT, Sampling(logit_bias=((1000, 1.0),)), "logit_bias"),
        ([1] * 5000, Sampling(), "context of 4096"),
    ],
)
def test_a_row_that_cannot_be_is_refused(prompt: list[int], sampling: Sampling, words: str) -> None:
    with pytest.raises(RowError, match=words):
        add(engine(), ONE, prompt, sampling)


def test_a_fault_that_names_a_sequence_hits_its_row_alone() -> None:
    script = FakeScript(faults=(Fault("decode", "nonfinite", number=2, sequence_number=2),))
    made = engine(script)
    for sequence in (ONE, TWO):
        add(made, sequence, PROMPT)
    step(made, (ONE, PROMPT, 1), (TWO, PROMPT, 1))
    rows = [RowStep(ONE, None, 1), RowStep(TWO, None, 1)]
    assert [result.error for result in made.step(rows).result()] == [None, None]
    well, failed = made.step(rows).result()
    assert well.tokens
    assert failed.error is not None
    assert failed.error.code == "generation_failed"
    with pytest.raises(KeyError):
        made.length(TWO)


def test_a_fault_without_a_sequence_breaks_the_engine_at_its_number() -> None:
    made = engine(FakeScript(faults=(Fault("prefill", "raise", number=2),)))
    add(made, ONE, PROMPT)
    step(made, (ONE, PROMPT[:2], 0))
    with pytest.raises(ScriptedFault, match="prefill"):
        step(made, (ONE, PROMPT[2:], 1))


def test_a_fault_belongs_to_its_incarnations() -> None:
    faults = Faults((Fault("load", "raise", incarnations=(2,)),), 1, lambda: None)
    faults.reach("load")
    with pytest.raises(ScriptedFault):
        Faults((Fault("load", "raise", incarnations=(2,)),), 2, lambda: None).reach("load")


def test_every_time_means_from_its_number_on() -> None:
    faults = Faults((Fault("prepare", "raise", number=2, every_time=True),), 1, lambda: None)
    faults.reach("prepare")
    for _ in range(3):
        with pytest.raises(ScriptedFault):
            faults.reach("prepare")


def test_a_sleep_in_prefill_is_declared_and_one_in_decode_is_not() -> None:
    made = engine(FakeScript(faults=(Fault("prefill", "sleep", number=2, seconds=30.0), Fault("decode", "sleep", seconds=30.0))))
    add(made, ONE, PROMPT)
    chunk = [RowStep(ONE, PROMPT[:2], 0)]
    assert made.promised_seconds(chunk) == 0
    made.step(chunk).result()
    assert made.promised_seconds([RowStep(ONE, PROMPT[2:], 1)]) == 30.0
    add(made, TWO, PROMPT)
    made.step([RowStep(TWO, PROMPT, 1)])
    assert made.promised_seconds([RowStep(TWO, None, 1)]) == 0


def test_a_fake_model_needs_a_script() -> None:
    with pytest.raises(LoadError, match="FakeScript"):
        fake.load(Load("m", "", kind="fake"), lambda stage, done, total: None)


def test_the_kit_makes_a_spec_in_one_call() -> None:
    spec = testing.fake_model("chat", max_slots=3, reply="hi")
    assert (spec.name, spec.kind, spec.max_slots, spec.fake) == ("chat", "fake", 3, FakeScript(reply="hi"))
    with pytest.raises(TypeError):
        testing.fake_model(replies="hi")
