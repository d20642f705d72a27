"""How does the benchmark use the runtime? As an app would: a tenant's streams, read to their end."""

from __future__ import annotations

import resource
import time

import anyio

import runtime
from benchmarks.measure import BenchmarkError, Run, StreamRun

_RUN_SECONDS = 300.0


class Subject:
    """A Runtime under measurement. A run's CPU time is the whole host process's, this client's share included."""

    def __init__(self, rt: runtime.Runtime) -> None:
        self.rt = rt
        self._tenant = rt.tenant("benchmark", runtime.TenantSpec(max_running=64))

    async def stream(self, model: str, prompt: str, max_tokens: int) -> Run:
        return await self.crowd(model, [prompt], max_tokens)

    async def crowd(self, model: str, prompts: list[str], max_tokens: int) -> Run:
        """All prompts at once, each a stream of its own. :raises BenchmarkError: one of them made fewer tokens than asked."""
        return await self.together([(model, prompt, max_tokens) for prompt in prompts])

    async def together(self, asks: list[tuple[str, str, int]]) -> Run:
        """Streams of any models, started at one moment; (model, prompt, max_tokens) each."""
        streams = [StreamRun(token_ids=[]) for _ in asks]
        cpu_before = _cpu_seconds()
        started = time.perf_counter()
        with anyio.fail_after(_RUN_SECONDS):
            async with anyio.create_task_group() as group:
                for (model, prompt, max_tokens), stream in zip(asks, streams, strict=True):
                    group.start_soon(self._read, model, prompt, max_tokens, started, stream)
        return Run(streams, cpu_seconds=_cpu_seconds() - cpu_before)

    async def _read(self, model: str, prompt: str, max_tokens: int, started: float, run: StreamRun) -> None:
        assert run.token_ids is not None
        async with self._tenant.stream(model, prompt=prompt, max_tokens=max_tokens, ignore_eos=True) as stream:
            async for event in stream:
                if isinstance(event, runtime.TextDelta):
                    if event.token_ids:
                        run.arrivals.append((time.perf_counter() - started, len(event.token_ids)))
                        run.token_ids.extend(event.token_ids)
                    run.text += event.text
                elif isinstance(event, runtime.Finished):
                    run.prompt_tokens = event.completion.usage.prompt_tokens
        if run.num_tokens != max_tokens:
            raise BenchmarkError(f"model {model!r} made {run.num_tokens} tokens of {max_tokens}")

    def info(self, model: str) -> runtime.ModelInfo:
        return next(info for info in self.rt.models() if info.name == model)

    async def cancel(self, model: str, prompt: str, num_tokens: int, max_tokens: int) -> tuple[float, int]:
        """Leave a stream after `num_tokens`. Returns seconds until the worker reports that nothing runs, and its steps meanwhile.

        The steps are counted from a report taken just before leaving, so the one then under way is among them.
        """
        num_read = 0
        with anyio.fail_after(_RUN_SECONDS):
            async with self._tenant.stream(model, prompt=prompt, max_tokens=max_tokens, ignore_eos=True) as stream:
                async for event in stream:
                    num_read += len(event.token_ids) if isinstance(event, runtime.TextDelta) else 0
                    if num_read >= num_tokens:
                        break
                before = await self.rt.inspect(model)
                left_at = time.perf_counter()
            while True:
                after = await self.rt.inspect(model)
                if not (after.running or after.prefilling or after.parked):
                    return time.perf_counter() - left_at, after.steps - before.steps


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
