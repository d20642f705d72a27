"""`troupe run MODEL PROMPT`: load one model, ask it once, stream the answer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any, cast

import anyio
import anyio.to_thread

from runtime import ModelSpec, Runtime, Settings
from runtime.cli.bars import Bars
from runtime.cli.models import ensure_fetched
from runtime.completion import Completion, TextDelta
from runtime.errors import InvalidRequest
from runtime.options import GenerateOptions, validate
from runtime.watch import LoadProgress

SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "ignore_eos",
)


async def main(options: argparse.Namespace) -> int:
    asked = request_of(options, sys.stdin.read() if options.prompt == "-" else options.prompt)
    validate(asked)  # a wrong option must not cost a download
    settings = Settings(blas=options.blas)
    await ensure_fetched(options.model, settings.home_directory())
    async with Runtime(settings) as rt:
        spec = ModelSpec(options.model, options.model, revision=options.revision, trust_remote_code=options.trust_remote_code)
        await load_with_bars(rt, spec)
        tenant = rt.tenant("troupe run")
        if options.json:
            completion = await tenant.generate(options.model, **asked)
            print(json.dumps(as_json(completion)))
        else:
            async with tenant.stream(options.model, **asked) as stream:
                async for event in stream:
                    if isinstance(event, TextDelta):
                        # In a thread: a terminal that is held must not hold the runtime.
                        await anyio.to_thread.run_sync(show, event.text, abandon_on_cancel=True)
                completion = await stream.completion()
            if not completion.text.endswith("\n"):
                print()
        for warning in completion.warnings:
            print(f"troupe: {warning}", file=sys.stderr)
    return 0


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def request_of(options: argparse.Namespace, prompt: str) -> GenerateOptions:
    """:raises InvalidRequest: options that exclude each other."""
    asked: dict[str, Any] = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    if options.raw:
        if options.system is not None:
            raise InvalidRequest("--system", "needs the chat template, which --raw leaves out; give one of them")
        asked["prompt"] = prompt
    else:
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        asked["messages"] = [*system, {"role": "user", "content": prompt}]
    return cast(GenerateOptions, asked)


async def load_with_bars(rt: Runtime, *specs: ModelSpec) -> None:
    """Load models side by side, with progress on stderr."""
    with Bars() as bars:

        async def watch() -> None:
            async with rt.watch() as events:
                async for event in events:
                    if isinstance(event, LoadProgress):
                        bars.update(event.model, event.stage, event.done, event.total)

        async with anyio.create_task_group() as watching:
            watching.start_soon(watch)
            async with anyio.create_task_group() as loading:
                for spec in specs:
                    loading.start_soon(rt.load, spec)
            watching.cancel_scope.cancel()


def as_json(completion: Completion) -> dict[str, Any]:
    usage = completion.usage
    return {
        "model": completion.model,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "matched_stop": completion.matched_stop,
        "usage": {**dataclasses.asdict(usage), "total_tokens": usage.total_tokens},
        "timings": dataclasses.asdict(completion.timings),
        "seed": completion.seed,
        "fingerprint": completion.fingerprint,
        "warnings": list(completion.warnings),
    }
