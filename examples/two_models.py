"""Ask two models the same question at the same time and show both answers as they come.

python examples/two_models.py                       # smollm2-135m and its 4-bit form: 'troupe models fetch' them first
python examples/two_models.py DIRECTORY DIRECTORY   # any two checkpoints; hub ids and fetched names will do, too
"""

from __future__ import annotations

import sys

import anyio

import runtime

QUESTION = "What is the capital of France?"


async def ask(tenant: runtime.Tenant, model: str, question: str) -> runtime.Completion:
    async with tenant.stream(model, messages=[{"role": "user", "content": question}], max_tokens=40) as stream:
        async for event in stream:
            if isinstance(event, runtime.TextDelta) and event.text:
                print(f"{model} says {event.text!r}")
        return await stream.completion()


async def main(first: runtime.ModelSpec, second: runtime.ModelSpec) -> None:
    async with runtime.Runtime() as rt:
        async with anyio.create_task_group() as loading:
            loading.start_soon(rt.load, first)
            loading.start_soon(rt.load, second)
        tenant = rt.tenant("two models")

        async def report(model: str) -> None:
            answer = await ask(tenant, model, QUESTION)
            print(
                f"{model}: {answer.text.strip()} ({answer.usage.completion_tokens} tokens in {answer.timings.total_seconds:.1f} s)"
            )

        async with anyio.create_task_group() as asking:
            for info in rt.models():
                asking.start_soon(report, info.name)


if __name__ == "__main__":
    paths = sys.argv[1:] or ["smollm2-135m", "smollm2-135m-4bit"]
    if len(paths) != 2:
        sys.exit(__doc__)
    try:
        anyio.run(main, runtime.ModelSpec("first", path=paths[0]), runtime.ModelSpec("second", path=paths[1]))
    except* runtime.TroupeError as group:
        sys.exit("\n".join(str(error) for error in group.exceptions))
