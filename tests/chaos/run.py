"""Chaos: many tenants on many models while workers are killed and stopped, files damaged and memory taken away; nobody may notice.

Every answer is compared with what the same request got when nothing disturbed it. All that is random comes from one seed; what the
processes make of it depends on the machine, so a failing run leaves the recording of its scheduler (`recorder.py`).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio

import runtime
from runtime.protocol.ids import ModelName
from runtime.scheduler.stimuli import MemorySet
from runtime.testing import FakeScript
from tests.property.workload import Answer, Ask, make_workload, run_alone
from tests.support.tiny import make_tiny
from tests.support.waiting import until

SCRIPT: Final = FakeScript(prefill_seconds_per_token=0.00005, decode_seconds_per_step=0.002)
DRAFTER: Final = FakeScript(decode_seconds_per_step=0.0005, disagrees_one_in=5)
FAKES: Final = ("plain", "target", "finder", "pair")
"""They all say the same. "finder" proposes from its own text, "pair" has two replicas."""
NUM_CLIENTS: Final = 12
CALM_SECONDS: Final = 0.6
"""Between two strikes at one worker: three in a row without any progress would rightly end a request."""


@dataclass
class Tally:
    """What was done, and what came of it. wrong: one line for each answer that was not the undisturbed one."""

    seed: int
    seconds: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return not (self.wrong or self.errors or self.leaks)

    def slopes(self) -> dict[str, float]:
        """Resident MiB a minute, by least squares over the last three quarters of what was seen: of the host, and of the steepest
        among the workers that lived for eight looks. Those are young, for nobody lives long here."""
        slopes = {name: _slope(points[len(points) // 4 :]) for name, points in self.memory.items() if len(points) >= 8}
        workers = [slope for name, slope in slopes.items() if name != "host"]
        return {"host": slopes.get("host", 0.0), "worst worker": max(workers, default=0.0)}

    def summary(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "done": dict(sorted(self.done.items())),
            "wrong": self.wrong[:5],
            "errors": self.errors[:5],
            "leaks": self.leaks[:5],
            "resident_mib_per_minute": {name: round(slope, 2) for name, slope in self.slopes().items()},
        }


def _slope(points: list[tuple[float, int]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return 0.0 if not spread else rise / spread * 60 / (1 << 20)


class Chaos:
    def __init__(self, rt: runtime.Runtime, home: Path, seed: int) -> None:
        self.rt = rt
        self.home = home
        self.tally = Tally(seed)
        self.chance = random.Random(seed)
        self.asks: dict[str, list[tuple[Ask, Answer]]] = {}
        self.struck: dict[str, float] = {}
        self.is_over = False

    # -- before ---------------------------------------------------------------------------------------------

    async def prepare(self, checkpoint: Path) -> None:
        """Load the models, and have everything answered once in peace."""
        rt = self.rt
        await rt.load(runtime.ModelSpec("plain", kind="fake", fake=SCRIPT, max_slots=6))
        await rt.load(runtime.ModelSpec("drafter", kind="fake", fake=DRAFTER))
        await rt.load(runtime.ModelSpec("target", kind="fake", fake=SCRIPT, max_slots=6, drafter="drafter", draft_tokens=3))
        await rt.load(runtime.ModelSpec("finder", kind="fake", fake=SCRIPT, max_slots=4, drafter="lookup", draft_tokens=3))
        await rt.load(runtime.ModelSpec("pair", kind="fake", fake=SCRIPT, max_slots=3, replicas=2))
        await rt.load(runtime.ModelSpec("tiny", str(checkpoint), max_slots=4))
        solo = rt.tenant("solo", runtime.TenantSpec(may_share=True))
        for model, num_asks, longest in (("plain", 24, 700), ("tiny", 8, 200)):
            asks = make_workload(
                self.tally.seed, num_requests=num_asks, longest_prompt=longest, greedy_only=False, spread_seconds=0
            )
            self.asks[model] = [(ask, await run_alone(solo, model, ask)) for ask in asks]

    # -- the clients ------------------------------------------------------------------------------------------

    async def client(self, number: int) -> None:
        chance = random.Random(f"{self.tally.seed} {number}")
        tenant = self.rt.tenant(f"tenant {number % 4}", runtime.TenantSpec(weight=1.0 + number % 3, may_share=True))
        while not self.is_over:
            model = chance.choice([*FAKES, *FAKES, "tiny"])
            ask, expected = chance.choice(self.asks["tiny" if model == "tiny" else "plain"])
            options: dict[str, Any] = dict(ask.options)
            options["priority"] = chance.choice(["interactive", "background"])
            options["cache"] = chance.choice(["on", "on", "read-only", "off"])
            if chance.random() < 0.2:
                options["cache_scope"] = "shared"
            leaves_after = chance.randint(0, 30) if chance.random() < 0.2 else None
            pause = chance.choice([0.0, 0.0, 0.0, 0.01, 0.05])
            try:
                with anyio.fail_after(60):
                    await self._one(tenant, model, ask, options, expected, leaves_after, pause)
            except (runtime.TroupeError, TimeoutError) as error:
                self.tally.errors.append(f"{model} {ask.number} {options}: {error!r}")
            await anyio.sleep(chance.random() * 0.05)

    async def _one(
        self,
        tenant: runtime.Tenant,
        model: str,
        ask: Ask,
        options: dict[str, Any],
        expected: Answer,
        leaves_after: int | None,
        pause: float,
    ) -> None:
        here = Answer()
        async with tenant.stream(model, tokens=ask.tokens, **options) as stream:
            async for event in stream:
                if isinstance(event, runtime.TextDelta):
                    here.token_ids.extend(event.token_ids)
                    here.text += event.text
                    here.logprobs.extend(event.logprobs)
                    if leaves_after is not None and len(here.token_ids) >= leaves_after:
                        break
                    if pause:
                        await anyio.sleep(pause)
                elif isinstance(event, runtime.Finished):
                    here.finish_reason = event.completion.finish_reason
        if here.finish_reason is None:
            self.tally.done["cancelled"] += 1
            length = len(here.token_ids)
            is_right = here.token_ids == expected.token_ids[:length] and expected.text.startswith(here.text)
        else:
            self.tally.done["answers"] += 1
            is_right = here == expected
        if not is_right:
            self.tally.wrong.append(
                f"{model} {ask.number} {options}: {here.token_ids} {here.text!r}, expected {expected.token_ids}"
            )

    # -- the saboteurs ----------------------------------------------------------------------------------------

    async def saboteur(self) -> None:
        acts = [(self.kill, 6), (self.stop, 1), (self.damage, 3), (self.take_memory, 2), (self.erase, 1), (self.swap_in_and_out, 1)]
        while not self.is_over:
            await anyio.sleep(self.chance.uniform(0.05, 0.4))
            (act,) = self.chance.choices([act for act, _ in acts], [weight for _, weight in acts])
            await act()

    def _victim(self) -> tuple[str, int] | None:
        """A ready worker that has had its calm."""
        now = time.monotonic()
        ready = [info for info in self.rt.models() if info.state == "ready" and info.pid is not None]
        calm = [info for info in ready if now - self.struck.get(info.name, 0.0) > CALM_SECONDS]
        if not calm:
            return None
        info = self.chance.choice(calm)
        self.struck[info.name] = now + 0.4
        assert info.pid is not None
        return info.name, info.pid

    async def kill(self) -> None:
        if (victim := self._victim()) is not None:
            self.tally.done["kills"] += 1
            os.kill(victim[1], signal.SIGKILL)

    async def stop(self) -> None:
        """Stopped for a moment, or until its host loses patience."""
        if (victim := self._victim()) is not None:
            self.tally.done["stops"] += 1
            os.kill(victim[1], signal.SIGSTOP)
            if self.chance.random() < 0.7:
                await anyio.sleep(self.chance.uniform(0.0, 0.3))
                try:
                    os.kill(victim[1], signal.SIGCONT)
                except ProcessLookupError:
                    pass

    async def damage(self) -> None:
        """A prefix file is cut, changed or gone."""
        files = sorted((self.home / "prefix").rglob("*.safetensors"))
        if not files:
            return
        path = self.chance.choice(files)
        self.tally.done["damages"] += 1
        try:
            match self.chance.randrange(3):
                case 0:
                    path.unlink()
                case 1:
                    os.truncate(path, self.chance.randrange(max(1, path.stat().st_size)))
                case _:
                    _scratch(path, self.chance.randrange(max(1, path.stat().st_size)))
        except OSError:
            pass  # evicted meanwhile

    async def take_memory(self) -> None:
        name = ModelName(self.chance.choice(["plain", "target", "pair", "tiny"]))
        self.tally.done["shortages"] += 1
        self.rt._scheduler.offer(MemorySet(name, self.chance.choice([20, 100, 300])))
        await anyio.sleep(self.chance.uniform(0.05, 0.3))
        self.rt._scheduler.offer(MemorySet(name, None))

    async def erase(self) -> None:
        self.tally.done["erasures"] += 1
        await self.rt.erase_tenant(f"tenant {self.chance.randrange(4)}")

    async def swap_in_and_out(self) -> None:
        self.tally.done["loads"] += 1
        await self.rt.load(runtime.ModelSpec("guest", kind="fake", fake=SCRIPT))
        await self.rt.unload("guest")

    # -- the watchers -----------------------------------------------------------------------------------------

    async def measure(self) -> None:
        start = time.monotonic()
        while not self.is_over:
            now = time.monotonic() - start
            pids = {f"{info.name} {info.pid}": info.pid for info in self.rt.models() if info.state == "ready" and info.pid}
            for name, pid in {"host": os.getpid(), **pids}.items():
                if (resident := _resident_bytes(pid)) is not None:
                    self.tally.memory.setdefault(name, []).append((now, resident))
            await anyio.sleep(0.5)

    def _all_ready(self) -> bool:
        return all(info.state == "ready" for info in self.rt.models())

    async def look_for_leaks(self) -> None:
        """When all is over: nothing may be held for anybody any more."""
        leaks = self.tally.leaks
        with anyio.move_on_after(30) as scope:
            await until(lambda: not self.rt._scheduler.state.book.requests and self._all_ready())
        if scope.cancelled_caught:
            leaks.append(f"not at rest: {[(info.name, info.state) for info in self.rt.models()]}")
            return
        book = self.rt._scheduler.state.book
        self.rt._scheduler.state.validate()
        if book.prefixes.index.holders():
            leaks.append(f"leases: {book.prefixes.index.holders()}")
        for name, model in book.models.items():
            if model.sequences or model.returning or model.preparing:
                leaks.append(f"slots of {name}: {list(model.sequences)}, {list(model.returning)}, {list(model.preparing)}")
        for name in [info.name for info in self.rt.models() if "#" not in info.name]:
            report = await self._report(name)
            if report.running or report.prefilling or report.parked or report.preparing:
                leaks.append(f"in the worker of {name}: {report}")

    async def _report(self, name: str) -> runtime.WorkerReport:
        """Of a worker that was left stopped, once it has been replaced."""
        while True:
            try:
                return await self.rt.inspect(name)
            except runtime.ModelUnavailable:
                await until(self._all_ready)


def _scratch(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(b"\xff\x00")


def _resident_bytes(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, IndexError):
        return None


async def run(directory: Path, seed: int, seconds: float) -> Tally:
    """directory: an empty one for the models and the prefix files of this run."""
    home = directory / "home"
    checkpoint = make_tiny(directory / "tiny", "llama")
    settings = runtime.Settings(
        home=home,
        blas="reference",
        silence_seconds=2.0,
        max_restarts=1_000_000,
        prefix_memory_bytes=64 << 20,
        prefix_disk_bytes=8 << 20,
        prefix_free_bytes=0,
    )
    async with runtime.Runtime(settings) as rt:
        chaos = Chaos(rt, home, seed)
        await chaos.prepare(checkpoint)
        start = time.monotonic()
        async with anyio.create_task_group() as group:
            for number in range(NUM_CLIENTS):
                group.start_soon(chaos.client, number)
            group.start_soon(chaos.saboteur)
            group.start_soon(chaos.measure)
            await anyio.sleep(seconds)
            chaos.is_over = True
        await chaos.look_for_leaks()
        chaos.tally.seconds = time.monotonic() - start
        stats = rt.stats().scheduler
        chaos.tally.done["replays"], chaos.tally.done["preemptions"] = stats.replayed, stats.preempted
        return chaos.tally
