"""Proposals never change what is said: tokens and log-probabilities of verified rows are those of plain decoding, to the bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from runtime.engine.engine import Engine, Loaded, RowError, RowStep
from runtime.engine.head import HeadTap
from runtime.engine.layers import kinds_of
from runtime.engine.lm_engine import LmEngine
from runtime.protocol.commands import Sampling
from runtime.protocol.events import Capabilities
from runtime.protocol.ids import SequenceId
from tests.support.crowd import Guest, add, load_engine
from tests.support.tiny import VOCABULARY_SIZE, MakeTiny
from tests.support.verifying import Evening, Host, Propose, Said, at_random, partly_right, perfect, say_alone

A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)
FAMILIES = ["llama", "gemma3_text", "gpt_oss", "lfm2", "qwen3_next"]
NUM_BEYOND = 9
"""Tokens known beyond a guest's last, so that a perfect proposer has something to propose there."""

SAMPLINGS = [
    Sampling(),
    Sampling(logprobs=3),
    Sampling(temperature=0.8, seed=11, logprobs=0),
    Sampling(temperature=1.1, top_p=0.9, top_k=40, seed=1 << 63, logprobs=2),
    Sampling(temperature=0.7, min_p=0.02, presence_penalty=0.9, frequency_penalty=0.6, repetition_penalty=1.3, seed=5, logprobs=2),
    Sampling(repetition_penalty=1.4, frequency_penalty=0.5, logit_bias=((65, 2.0), (66, -3.0)), logprobs=1),
    Sampling(temperature=1.2, presence_penalty=-0.5, frequency_penalty=1.5, top_p=0.8, seed=77),
]


def make_guests(seed: int, num_guests: int) -> list[Guest]:
    rng = random.Random(seed)
    return [
        Guest(
            SequenceId(number),
            [rng.randrange(256) for _ in range(rng.choice([1, 3, 8, 20, 45]))],
            SAMPLINGS[number % len(SAMPLINGS)],
            rng.randint(10, 24),
        )
        for number in range(num_guests)
    ]


def right_of(engine: Engine, guests: list[Guest]) -> dict[SequenceId, Said]:
    return {guest.sequence: say_alone(engine, replace(guest, num_tokens=guest.num_tokens + NUM_BEYOND)) for guest in guests}


def differences(evening: Evening, guests: list[Guest], right: dict[SequenceId, Said]) -> list[tuple[SequenceId, int]]:
    """(sequence, place) of every token that is another than alone, or has other log-probabilities, or is missing."""
    found = []
    for guest in guests:
        said, alone = evening.said[guest.sequence], right[guest.sequence]
        has_logprobs = guest.sampling.logprobs >= 0
        for place in range(guest.num_tokens):
            is_same = said.tokens[place : place + 1] == alone.tokens[place : place + 1]
            if has_logprobs:
                is_same = is_same and said.logprobs[place : place + 1] == alone.logprobs[place : place + 1]
            if not is_same:
                found.append((guest.sequence, place))
        assert len(said.tokens) == guest.num_tokens
        assert len(said.logprobs) == (guest.num_tokens if has_logprobs else 0)
    return found


@pytest.fixture(scope="module")
def loaded(tiny: MakeTiny) -> Loaded:
    return load_engine(tiny("llama"))


@pytest.fixture
def engine(loaded: Loaded) -> Engine:
    loaded.engine.release([A, B, C])
    return loaded.engine


@pytest.mark.parametrize("family", FAMILIES)
def test_a_crowd_that_verifies_says_what_each_says_alone(tiny: MakeTiny, family: str) -> None:
    """Blocks of 1 to 8 proposals in batches of 1 to 8 rows, beside decoding rows and prompts, with joins and leaves."""
    loaded = load_engine(tiny(family))
    assert loaded.facts.capabilities.verify
    guests = make_guests(3, 14)
    right = right_of(loaded.engine, guests)
    for propose in (perfect, at_random, partly_right):
        evening = Host(loaded.engine, guests, right, 7, propose).run()
        assert differences(evening, guests, right) == []
        assert evening.most_blocks_at_once >= 4
        assert evening.most_rows_at_once == 8
        if propose is perfect:
            assert evening.num_accepted == evening.num_proposed > 0
        elif propose is at_random:
            assert evening.num_accepted < evening.num_proposed / 20


@pytest.mark.parametrize("propose", [perfect, at_random, partly_right])
def test_one_row_by_itself_verifies_rightly_with_every_way_to_sample(engine: Engine, propose: Propose) -> None:
    guests = make_guests(5, len(SAMPLINGS))
    right = right_of(engine, guests)
    evening = Host(engine, guests, right, 2, propose, most=1).run()
    assert differences(evening, guests, right) == []
    assert evening.num_blocks > 10


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_recurrent_models_verify_too_also_one_that_cannot_be_padded(tiny: MakeTiny, family: str) -> None:
    loaded = load_engine(tiny(family))
    assert loaded.facts.capabilities.verify
    guests = make_guests(4, 6)
    right = right_of(loaded.engine, guests)
    evening = Host(loaded.engine, guests, right, 5, partly_right).run()
    said = {guest.sequence: evening.said[guest.sequence].tokens for guest in guests}
    assert said == {guest.sequence: right[guest.sequence].tokens[: guest.num_tokens] for guest in guests}


def test_a_window_larger_than_the_slack_is_verified_across_the_moment_when_slots_are_dropped(tiny: MakeTiny) -> None:
    loaded: Any = load_engine(tiny("gemma3_text", sliding_window=96))
    assert loaded.facts.capabilities.verify
    sampling = [Sampling(), Sampling(temperature=0.9, seed=3, logprobs=1), Sampling(temperature=0.9, presence_penalty=0.5, seed=4)]
    guests = [
        Guest(SequenceId(number), [(7 * index + number) % 251 for index in range(470 + 13 * number)], one, 60)
        for number, one in enumerate(sampling)
    ]
    right = right_of(loaded.engine, guests)
    dropped: list[int] = []
    for propose in (at_random, partly_right):
        host = Host(loaded.engine, guests, right, 1, propose)
        accept = host._accept

        def watched(guest: Guest, *rest: Any, accept: Any = accept) -> None:
            accept(guest, *rest)
            batch = loaded.engine._rows[guest.sequence].batch
            (family,) = [family for family in batch._families if family.window == 96]
            dropped.append(family.bases[batch.rows.index(loaded.engine._rows[guest.sequence])])

        host._accept = watched  # type: ignore[method-assign]
        assert differences(host.run(), guests, right) == []
    assert min(dropped) == 0
    assert max(dropped) > 96


def test_a_replaying_row_never_owes_more_than_a_bounded_number_of_tokens(tiny: MakeTiny) -> None:
    """When no block is accepted whole, every way back leads to the same state, unless the owed tokens are fed by themselves."""
    engine: Any = load_engine(tiny("lfm2")).engine
    guests = [Guest(A, [1, 2, 3], Sampling(), 60), Guest(B, [4], Sampling(temperature=1.0, presence_penalty=1.0, seed=2), 60)]
    right = right_of(engine, guests)
    for guest in guests:
        add(engine, guest)
    said = {
        r.sequence: list(r.tokens) for r in engine.step([RowStep(guest.sequence, guest.prompt, 1) for guest in guests]).result()
    }
    most_owed = 0
    for _ in range(50):
        blocks = []
        for sequence, tokens in said.items():
            wrong = (right[sequence].tokens[len(tokens)] + 1) % 256
            blocks.append(RowStep(sequence, [tokens[-1], wrong, 254, 253], 4))
        for result, guest in zip(engine.step(blocks).result(), guests, strict=True):
            said[guest.sequence].append(result.tokens[0])
            engine.truncate(guest.sequence, len(guest.prompt) + len(said[guest.sequence]) - 1)
            most_owed = max(most_owed, len(engine._rows[guest.sequence].owed))
    assert said == {guest.sequence: right[guest.sequence].tokens[:51] for guest in guests}
    assert 4 < most_owed <= 17


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_sixteen_rejected_proposals_are_taken_back_after_others_have_gone_on(tiny: MakeTiny, family: str) -> None:
    engine = load_engine(tiny(family)).engine
    guests = [Guest(A, list(range(40)), Sampling(temperature=0.8, seed=1), 8), Guest(B, [9, 8], Sampling(), 8)]
    right = right_of(engine, guests)
    for guest in guests:
        add(engine, guest)
    first = engine.step([RowStep(guest.sequence, guest.prompt, 1) for guest in guests]).result()
    said = {result.sequence: list(result.tokens) for result in first}
    wrong = [(token + 1) % 256 for token in right[A].tokens[1:17]]
    block = engine.step([RowStep(A, [said[A][0], *wrong], 17), RowStep(B, None, 1)])
    after = engine.step([RowStep(B, None, 1)])
    verified, *others = [*block.result(), *after.result(), *engine.step([RowStep(B, None, 1)]).result()]
    said[A].append(verified.tokens[0])
    for result in others:
        said[B] += result.tokens
    engine.truncate(A, len(guests[0].prompt) + 1)
    while len(said[A]) < 8:
        said[A] += engine.step([RowStep(A, None, 1)]).result()[0].tokens
    assert said == {A: right[A].tokens[:8], B: right[B].tokens[:4]}


def test_a_prompts_last_chunk_may_bring_proposals_along(engine: Engine) -> None:
    """Also when the samples begin within the prompt, whose tokens are no output."""
    for sampling in SAMPLINGS:
        guest = Guest(A, [5, 6, 7, 8], sampling, 6)
        alone = say_alone(engine, guest)
        add(engine, guest)
        (result,) = engine.step([RowStep(A, [*guest.prompt, *alone.tokens[:4], 3], 8)]).result()
        assert result.tokens[2:7] == tuple(alone.tokens[:5])
        assert result.logprobs[2:7] == tuple(alone.logprobs[:5])
        engine.release([A])


def test_tokens_fed_by_another_hand_count_for_penalties(engine: Engine) -> None:
    """A drafter is told what was accepted, which need not be what it drew."""
    guest = Guest(A, [5, 6, 7, 8], Sampling(frequency_penalty=10.0, logit_bias=((65, 100.0), (66, 95.0))), 4)
    add(engine, guest)
    (drawn,) = engine.step([RowStep(A, guest.prompt, 1)]).result()
    (result,) = engine.step([RowStep(A, [66] * 6, 1)]).result()
    assert (drawn.tokens, result.tokens) == ((65,), (65,))


# -- what a block costs, and what ends a row ----------------------------------------------------------------------------


def test_only_sampled_positions_reach_the_output_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    through = HeadTap.through

    def seen(self: HeadTap, hidden: mx.array) -> mx.array:
        shapes.append(through(self, hidden).shape[:2])
        return through(self, hidden)

    for sequence in (A, B, C):
        add(engine, Guest(sequence, [5, 6, 7, 8], Sampling(), 9))
    first = engine.step([RowStep(sequence, [5, 6, 7, 8], 1) for sequence in (A, B)]).result()
    monkeypatch.setattr(HeadTap, "through", seen)
    blocks = [RowStep(A, [first[0].tokens[0], 1, 2, 3], 4), RowStep(B, [first[1].tokens[0], 1], 2)]
    engine.step(blocks).result()
    assert shapes == [(6, 1)]
    engine.step([*(RowStep(one.sequence, None, 1) for one in blocks), RowStep(C, [5, 6, 7], 0)]).result()
    assert shapes[1:] == [(2, 1), (1, 3)]  # decoding goes through whole; so does a chunk that nobody samples


@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_sample_without_finite_logits_ends_its_row_and_no_other(tiny: MakeTiny, place: int) -> None:
    healthy: Any = load_engine(tiny("llama")).engine
    model = healthy._model

    class Poisoned:
        """Whose logits after token 200 are no numbers."""

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            return mx.where((tokens == 200)[..., None], float("nan"), model(tokens, cache=cache))

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    engine = LmEngine(Poisoned(), kinds_of(model), healthy._capabilities, vocabulary_size=VOCABULARY_SIZE, context_length=2048)
    guests = [Guest(sequence, [5, 6, 7, int(sequence)], SAMPLINGS[3 + sequence], 4) for sequence in (A, B)]
    right = right_of(healthy, guests)
    for guest in guests:
        add(engine, guest)
    engine.step([RowStep(guest.sequence, guest.prompt, 1) for guest in guests]).result()
    poisoned = [9, 9, 9, 9]
    poisoned[place] = 200
    bad, good = engine.step([RowStep(A, poisoned, 4), RowStep(B, right[B].tokens[:3], 3)]).result()
    assert isinstance(bad.error, RowError)
    assert bad.error.code == "generation_failed"
    assert f"position {5 + place} are not finite" in str(bad.error)
    assert bad.tokens == ()
    assert list(good.tokens) == right[B].tokens[1:4]
    assert list(good.logprobs) == right[B].logprobs[1:4]
    (gone,) = engine.step([RowStep(A, None, 1)]).result()
    assert "not in this engine" in str(gone.error)
    assert engine.step([RowStep(B, None, 1)]).result()[0].tokens == (right[B].tokens[4],)


@pytest.mark.parametrize(
    ("step", "what"), [(RowStep(A, [1, 2, 3], 4), "4 samples after 3 tokens"), (RowStep(A, None, 2), "2 samples after 1 token")]
)
def test_more_samples_than_fed_tokens_end_the_row(engine: Engine, step: RowStep, what: str) -> None:
    for sequence in (A, B):
        add(engine, Guest(sequence, [5, 6, 7, 8], Sampling(), 4))
    engine.step([RowStep(sequence, [5, 6, 7, 8], 1) for sequence in (A, B)]).result()
    bad, good = engine.step([step, RowStep(B, [1, 2], 2)]).result()
    assert what in str(bad.error)
    assert len(good.tokens) == 2


def test_a_model_that_did_not_prove_it_refuses_blocks(tiny: MakeTiny) -> None:
    engine: Any = load_engine(tiny("llama")).engine
    engine._capabilities = Capabilities(batched_decode=True, padded_prefill=True, chunked_prefill=True, rollback="free")
    add(engine, Guest(A, [5, 6, 7, 8], Sampling(), 4))
    (result,) = engine.step([RowStep(A, [5, 6, 7, 8], 2)]).result()
    assert "capabilities.verify is false" in str(result.error)
