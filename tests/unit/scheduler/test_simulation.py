"""Whatever happens in whatever order: no request is lost, each stream is exactly its own, nothing is left over at the end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import Settings
from runtime.errors import (
    AdmissionError,
    ContextTooLong,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    ModelNotLoaded,
    WorkerCrashed,
)
from runtime.protocol.commands import Sampling, TextPrompt
from runtime.protocol.events import AnyEvent, Drafted, ModelFacts, Verified
from runtime.protocol.ids import Incarnation, ModelName, RequestId, TenantId
from runtime.scheduler.request import Request, sequence_seed
from runtime.scheduler.stimuli import (
    Cancel,
    MemorySet,
    ModelAdded,
    ModelRemoved,
    Read,
    Reject,
    Submit,
    TenantSet,
    Tick,
    Unwindow,
    WorkerLost,
    WorkerSaid,
    WorkerUp,
)
from tests.unit.scheduler.cast import CONTEXT, DRAFTERS, MODELS, TENANTS
from tests.unit.scheduler.house import House, crash, facts
from tests.unit.scheduler.imagined_worker import FAILING_SEED, REFUSED_TEXT, ImaginedWorker, tokenize, whole_output


class Drama:
    """Two models with imagined workers, three tenants, and chance."""

    context = CONTEXT

    def __init__(self, seed: int, window_tokens: int, max_queued: int, drafters: str = "none") -> None:
        self.chance = random.Random(seed)
        self.drafters = DRAFTERS[drafters]
        self.seen: Counter[str] = Counter()
        self.house = self.build(stream_window_tokens=window_tokens, max_queued=max_queued)
        self.requests: dict[RequestId, Request] = {}
        self.workers: dict[ModelName, ImaginedWorker] = {}
        self.incarnations: Counter[ModelName] = Counter()
        self.told = 0
        self.heard: dict[ModelName, list[tuple[int, AnyEvent]]] = {model: [] for model in MODELS}
        self.num_rejected = 0
        for name, weight in zip(TENANTS, (1.0, 2.0, 0.5), strict=True):
            self.house.tenant(name, weight=weight, max_running=3, max_queued=6)
        for model in MODELS:
            self.add(model)

    def build(self, **options: Any) -> House:
        return House(Settings(prefill_batch_tokens=40, **options))

    def hire(self, model: ModelName) -> tuple[ImaginedWorker, ModelFacts]:
        return ImaginedWorker(MODELS[model]), facts(self.context)

    def add(self, model: ModelName) -> None:
        self.house.do(ModelAdded(model, MODELS[model], self.drafters.get(model), 3, self.chance.choice([None, False, True])))

    # -- what may happen ---------------------------------------------------------------------------------------------

    def actions(self) -> list[tuple[Callable[[], None], float]]:
        return [
            (self.submit, 6),
            (self.work, 30),
            (self.listen, 30),
            (self.read, 8),
            (self.cancel, 1.5),
            (self.unwindow, 0.5),
            (self.wait, 1),
            (self.repeat, 3),
            (self.lose, 0.3),
            (self.arrive, 3),
            (self.unload, 0.1),
            (self.retune, 0.3),
            (self.crowd, 0.5),
        ]

    def act(self) -> None:
        actions, weights = zip(*self.actions(), strict=True)
        self.chance.choices(actions, weights)[0]()
        self.pass_on()

    def invent(self, request_id: RequestId) -> Request:
        chance = self.chance
        length = chance.choice([1, 2, 5, 17, 30, CONTEXT - 1, CONTEXT])
        text = REFUSED_TEXT if chance.random() < 0.03 else "".join(chance.choices("abcdefgh", k=length))
        return Request(
            id=request_id,
            tenant=TenantId(chance.choice(TENANTS)),
            model=chance.choice(list(MODELS)),
            prompt=TextPrompt(text),
            sampling=Sampling(seed=FAILING_SEED if chance.random() < 0.03 else chance.randrange(100)),
            max_tokens=chance.choice([1, 3, 20, 500]),
            num_sequences=chance.choice([1, 1, 1, 2, 6]),
            priority=chance.choice(["interactive", "background"]),
            deadline_seconds=chance.choice([None, None, 5.0, 50.0]),
            windowed=chance.random() < 0.7,
            speculate=chance.choice([None, None, None, False]),
        )

    def submit(self) -> None:
        request_id = RequestId(1 + len(self.requests) + self.num_rejected)
        request = self.invent(request_id)
        answer = self.house.do(Submit(request))[0]
        if isinstance(answer, Reject):
            assert isinstance(answer.error, AdmissionError | ModelNotLoaded)
            self.num_rejected += 1
        else:
            self.requests[request_id] = request

    def work(self) -> None:
        for worker in self.workers.values():
            match self.chance.randrange(3):
                case 0 if worker.commands:
                    worker.take_command()
                case 1 if worker.preparing:
                    worker.prepare_one()
                case 2:
                    worker.step(self.chance)

    def listen(self) -> None:
        """Take in an event of one of a worker's two channels."""
        for model, worker in self.workers.items():
            channels = [channel for channel in (worker.text_events, worker.step_events) if channel]
            if channels:
                event = self.chance.choice(channels).popleft()
                self.heard[model].append((self.incarnations[model], event))
                self.house.do(WorkerSaid(model, Incarnation(self.incarnations[model]), event))
                if isinstance(event, Verified):
                    self.seen["verified"] += len(event.rows)
                    self.seen["accepted"] += sum(row.num_matched for row in event.rows)
                elif isinstance(event, Drafted):
                    self.seen["drafted"] += len(event.rows)
                    self.seen["lost"] += len(event.lost)

    def repeat(self) -> None:
        """Hear something again that was said before, perhaps by a worker that is gone."""
        model = self.chance.choice(list(MODELS))
        if self.heard[model]:
            incarnation, event = self.chance.choice(self.heard[model][-12:])
            self.house.do(WorkerSaid(model, Incarnation(incarnation), event))

    def read(self) -> None:
        """A client reads some or all of what it has."""
        for request in self.some_request():
            number = self.chance.randrange(self.requests[request].num_sequences)
            have = len(self.house.tokens(request, number))
            self.house.do(Read(request, number, have if self.chance.random() < 0.7 else self.chance.randint(0, have)))

    def cancel(self) -> None:
        for request in self.some_request():
            self.house.do(Cancel(request))

    def unwindow(self) -> None:
        for request in self.some_request():
            self.house.do(Unwindow(request))

    def wait(self) -> None:
        self.house.now += self.chance.choice([0.1, 3.0])
        before = self.num_late()
        self.house.do(Tick())
        self.seen["late"] += self.num_late() - before

    def lose(self) -> None:
        model = self.chance.choice(list(MODELS))
        incarnation = self.incarnations[model]
        if self.workers.pop(model, None) is not None:
            self.house.do(WorkerLost(model, Incarnation(incarnation), crash(model, incarnation), None, True))

    def arrive(self) -> None:
        for model in [model for model in MODELS if model not in self.workers]:
            self.workers[model], found = self.hire(model)
            self.incarnations[model] += 1
            self.house.do(WorkerUp(model, Incarnation(self.incarnations[model]), found))

    def unload(self) -> None:
        model = self.chance.choice(list(MODELS))
        self.workers.pop(model, None)
        self.house.do(ModelRemoved(model, ModelNotLoaded(model, "was unloaded")))
        self.add(model)

    def retune(self) -> None:
        spec: Any = self.house.state.book.tenants[TenantId("a")].spec
        self.house.do(TenantSet(TenantId("b"), spec))

    def crowd(self) -> None:
        """Memory grows scarce, or is there again."""
        room = self.chance.choice([None, 1, 40, 120])
        self.house.do(MemorySet(self.chance.choice(list(MODELS)), room))

    def num_late(self) -> int:
        models = self.house.state.book.models.values()
        return sum(model.pairing.counts.late for model in models if model.pairing is not None)

    def some_request(self) -> list[RequestId]:
        return [self.chance.choice(list(self.requests)[-20:])] if self.requests else []

    def pass_on(self) -> None:
        """Commands reach the worker they are for; those to a lost one are dropped."""
        for model, incarnation, command in self.house.sent[self.told :]:
            if model in self.workers and self.incarnations[model] == incarnation:
                self.workers[model].commands.append(command)
        self.told = len(self.house.sent)

    # -- the last act ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everybody reads and answers until nothing moves any more."""
        self.arrive()
        self.pass_on()
        for _ in range(100_000):
            if len(self.house.outcomes) == len(self.requests) and all(worker.is_quiet for worker in self.workers.values()):
                return
            self.work()
            self.listen()
            if self.chance.random() < 0.2:
                for request in self.requests.keys() - self.house.outcomes.keys():
                    for number in range(self.requests[request].num_sequences):
                        self.house.do(Read(request, number, len(self.house.tokens(request, number))))
            self.pass_on()
        raise AssertionError(f"without an end: {self.requests.keys() - self.house.outcomes.keys()}")

    def check(self) -> None:
        house, book = self.house, self.house.state.book
        assert house.breaches == []
        assert set(house.outcomes) == set(self.requests), "every accepted request ends, and no other"
        for request_id, request in self.requests.items():
            self.check_stream(request_id, request)
        assert book.requests == {}
        assert all(not model.sequences and not model.preparing and not model.batches for model in book.models.values())
        assert all(tenant.num_running == 0 for tenant in book.tenants.values())
        assert all(not worker.rows for worker in self.workers.values())

    def check_stream(self, request_id: RequestId, request: Request) -> None:
        outcome = self.house.outcomes[request_id]
        assert isinstance(request.prompt, TextPrompt)
        prompt = tokenize(request.prompt.text)
        assert outcome.prompt_tokens.tolist() in ([], prompt)
        max_length = min(len(prompt) + request.max_tokens, self.context)
        for number in range(request.num_sequences):
            expected, reason = whole_output(request.prompt.text, sequence_seed(request.sampling.seed, number), max_length)
            pieces = [piece for piece in self.house.pieces[request_id] if piece.number == number]
            tokens = [token for piece in pieces for token in piece.tokens]
            assert tokens == expected[: len(tokens)], "each stream is its own request's, in order, without gap or repeat"
            assert "".join(piece.text for piece in pieces) == "".join(f"<{token}>" for token in tokens)
            if outcome.state == "finished":
                assert tokens == expected
                assert [piece.finish for piece in pieces][-1] == reason
        expected_errors = (WorkerCrashed, ModelNotLoaded, DeadlineExceeded, InvalidRequest, ContextTooLong, GenerationFailed)
        assert (outcome.state == "failed") == isinstance(outcome.error, expected_errors)


@given(
    seed=st.integers(0, 2**32),
    num_acts=st.integers(0, 1500),
    window_tokens=st.sampled_from([1, 3, 16]),
    max_queued=st.sampled_from([1, 8, 100]),
    drafters=st.sampled_from(list(DRAFTERS)),
)
@settings(max_examples=30)
def test_whatever_happens_every_stream_is_exactly_its_own_and_nothing_is_left_over(
    seed: int, num_acts: int, window_tokens: int, max_queued: int, drafters: str
) -> None:
    drama = Drama(seed, window_tokens, max_queued, drafters)
    for _ in range(num_acts):
        drama.act()
    drama.settle()
    drama.check()


def test_the_drama_is_not_an_empty_one() -> None:
    """What the test above rests on: with these chances all ends occur."""
    seen: Counter[str] = Counter()
    for seed in range(8):
        drama = Drama(seed, window_tokens=3, max_queued=100, drafters="each other" if seed % 4 else "lookup")
        for _ in range(1000):
            drama.act()
        drama.settle()
        drama.check()
        seen.update(type(o.error).__name__ if o.error else o.state for o in drama.house.outcomes.values())
        seen["rejected"] += drama.num_rejected
        seen["granted"] += len(drama.house.limits())
        seen += drama.seen
        seen["replayed"] += drama.house.state.book.num_replayed
        seen["preempted"] += drama.house.state.book.num_preempted
    ends = {"finished", "cancelled", "ModelNotLoaded", "DeadlineExceeded", "InvalidRequest", "ContextTooLong"}
    assert {*ends, "GenerationFailed", "rejected", "granted"} <= seen.keys()
    assert all(seen[what] > 0 for what in ("verified", "accepted", "drafted", "lost", "late", "replayed", "preempted")), seen
    assert seen["finished"] > 50
