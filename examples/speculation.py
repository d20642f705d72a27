"""The same answers sooner: a model that proposes from its own text what comes next, beside itself without.

    python examples/speculation.py                # smollm2-135m: 'troupe models fetch' it first
    python examples/speculation.py DIRECTORY      # any checkpoint; a hub id or a fetched name will do, too

Another loaded model of the same vocabulary can propose as well: ModelSpec("chat", path=…, drafter="its name").
"""

from __future__ import annotations

import sys

import anyio
import msgspec

import runtime

TASK = """Copy this list of names line by line:
Alice Johnson, 24 Park Road
Bob Miller, 7 Station Street
Carol Smith, 118 High Street
David Brown, 5 Mill Lane
Eve Wilson, 32 Church Road
"""


async def main(spec: runtime.ModelSpec) -> None:
    async with runtime.Runtime() as rt:
        await rt.load(msgspec.structs.replace(spec, name="plain"))
        await rt.load(msgspec.structs.replace(spec, name="quick", drafter="lookup"))
        tenant = rt.tenant("app")
        answers = {}
        for model in ("plain", "quick"):
            for _ in range(2):  # the first time the runtime finds out what pays
                answer = await tenant.generate(
                    model, messages=[{"role": "user", "content": TASK}], max_tokens=96, ignore_eos=True, cache="off"
                )
            first_token, usage = answer.timings.first_token_seconds, answer.usage
            assert first_token is not None
            rate = (usage.completion_tokens - 1) / (answer.timings.total_seconds - first_token)
            print(f"{model}: {rate:.1f} tok/s, {usage.accepted_tokens} of {usage.proposed_tokens} proposed tokens accepted")
            answers[model] = answer.token_ids
        print("the same tokens" if answers["plain"] == answers["quick"] else "other tokens")
        (pairing,) = rt.stats().scheduler.pairings
        print(f"{pairing.rounds} rounds, {pairing.accepted} of {pairing.proposed} proposals right, {pairing.state}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    try:
        anyio.run(main, runtime.ModelSpec("chat", path=sys.argv[1] if len(sys.argv) == 2 else "smollm2-135m"))
    except* runtime.TroupeError as group:
        sys.exit("\n".join(str(error) for error in group.exceptions))
