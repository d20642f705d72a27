"""(e) What does the runtime cost beside the tokens: time to ready, memory, host CPU, and how fast does a cancel take hold?"""

from __future__ import annotations

import time

import runtime
from benchmarks import prompts
from benchmarks.children import in_process, resident_bytes
from benchmarks.report import Figure, Target
from benchmarks.stage import RUNTIME, Stage, say

MEBIBYTE = 1 << 20
BARE = "bare mlx-lm process"
STEPS_AFTER_CANCEL = Target("worst", at_most=1)
_NUM_TOKENS_AFTER_LOAD = 16
_NUM_TOKENS_BEFORE_CANCEL = 5
_NUM_CROWD = 8


async def costs(stage: Stage) -> list[Figure]:
    figures = await _loads(stage)
    for model in stage.plan.models:
        figures += await _host_cpu(stage, model)
        figures += await _cancels(stage, model)
    return figures


async def _loads(stage: Stage) -> list[Figure]:
    """Alternately: a model loaded by the runtime, and by `mlx_lm.load` in a new process; both then make the same few tokens.

    Both times begin before the process is started. The runtime's includes its hand-shake and self-test.
    """
    model = stage.plan.main_model
    subject = await stage.subject()
    spec = runtime.ModelSpec("load-and-unload", path=str(stage.path(model)))
    prompt = prompts.single(0)
    ready: list[float] = []
    bare_ready: list[float] = []
    resident: list[float] = []
    bare_resident: list[float] = []
    for number in range(stage.plan.num_load_runs):
        started = time.perf_counter()
        await subject.rt.load(spec)
        ready.append(time.perf_counter() - started)
        await subject.stream(spec.name, prompt, _NUM_TOKENS_AFTER_LOAD)
        pid = subject.info(spec.name).pid
        assert pid is not None
        resident.append(await resident_bytes(pid) / MEBIBYTE)
        await subject.rt.unload(spec.name)

        started = time.perf_counter()
        async with in_process(stage.environment) as child:
            await child.load(stage.path(model))
            bare_ready.append(time.perf_counter() - started)
            await child.stream(prompt, _NUM_TOKENS_AFTER_LOAD)
            bare_resident.append(await resident_bytes(child.pid) / MEBIBYTE)
        say(f"e {model}: load {number + 1}/{stage.plan.num_load_runs} runtime {ready[-1]:.2f} s, bare {bare_ready[-1]:.2f} s")
    above = [ours - theirs for ours, theirs in zip(resident, bare_resident, strict=True)]
    return [
        Figure("e", f"{model}, load to ready", "s", RUNTIME, ready, BARE, bare_ready, note="the runtime's holds its self-test"),
        Figure("e", f"{model}, resident memory", "MiB", RUNTIME, resident, BARE, bare_resident),
        Figure("e", f"{model}, worker's memory above the bare process's", "MiB", RUNTIME, above),
    ]


async def _host_cpu(stage: Stage, model: str) -> list[Figure]:
    """CPU of the host process per token, the reading client included."""
    subject = await stage.subject(model)
    figures = []
    for num_streams in (1, _NUM_CROWD):
        used = []
        for number in range(stage.plan.num_runs):
            run = await subject.crowd(model, prompts.crowd(100 + number, num_streams), stage.plan.num_cpu_tokens[model])
            assert run.cpu_seconds is not None
            used.append(1e6 * run.cpu_seconds / run.num_tokens)
            stage.ledger.note("e", f"{model}, host CPU", RUNTIME, number, run)
        say(f"e {model}: host CPU, {num_streams} streams: {used[-1]:.0f} µs per token")
        figures.append(Figure("e", f"{model}, host CPU per token, {num_streams} streams", "µs", RUNTIME, used))
    return figures


async def _cancels(stage: Stage, model: str) -> list[Figure]:
    """From leaving a stream until the worker itself says that nothing runs any more."""
    subject = await stage.subject(model)
    seconds, steps = [], []
    for number in range(stage.plan.num_runs):
        took, num_steps = await subject.cancel(
            model, prompts.single(number), _NUM_TOKENS_BEFORE_CANCEL, stage.plan.num_cancel_tokens
        )
        seconds.append(1e3 * took)
        steps.append(float(num_steps))
        say(f"e {model}: cancel {number + 1}/{stage.plan.num_runs} stopped in {1e3 * took:.1f} ms, {num_steps} steps")
    return [
        Figure("e", f"{model}, cancel to stop", "ms", RUNTIME, seconds),
        Figure("e", f"{model}, steps run after a cancel", "steps", RUNTIME, steps, target=STEPS_AFTER_CANCEL),
    ]
