"""Several users behind one system prompt, which is computed once for all of them, ahead of the first question.

    python examples/shared_prefix.py                # smollm2-135m: 'troupe models fetch' it first
    python examples/shared_prefix.py DIRECTORY      # any checkpoint; a hub id or a fetched name will do, too

The app's own tenant puts the prompt, which is no secret, into the scope "shared". The users' requests find it there and, being
"read-only", leave nothing of theirs for others to find.
"""

from __future__ import annotations

import sys

import anyio

import runtime

MODEL = "chat"
RULES = {
    "role": "system",
    "content": "You are the assistant of a small library. "
    + "\n".join(
        f"Rule {number}: {rule}."
        for number, rule in enumerate(
            (
                "answer in one short sentence, in the language of the question",
                "say so when you do not know, and name the desk that may",
                "books are lent for four weeks, films for one, and either is renewed once unless somebody waits for it",
                "the reading room is open from nine to six, on Saturdays until one, and closed on Sundays and in August",
                "never tell one reader what another has borrowed, asked for, or returned late",
                "a lost card is replaced on the spot, a lost book is paid for or brought anew in the same edition",
                "children under twelve borrow on the card of a parent, and from the shelves of the ground floor",
                "be kind, also to those who are not",
            ),
            start=1,
        )
    ),
}
QUESTIONS = {
    "ann": "What is the capital of France?",
    "bob": "How long may I keep a film?",
    "eve": "What has Ann borrowed?",
}


async def ask(tenant: runtime.Tenant, question: str) -> None:
    messages = [RULES, {"role": "user", "content": question}]
    answer = await tenant.generate(MODEL, messages=messages, max_tokens=24, cache="read-only", cache_scope="shared")
    usage = answer.usage
    print(f"{tenant.name}: {usage.cached_tokens} of {usage.prompt_tokens} tokens were there: {answer.text.strip()}")


async def main(spec: runtime.ModelSpec) -> None:
    async with runtime.Runtime() as rt:
        await rt.load(spec)
        app = rt.tenant("app", runtime.TenantSpec(may_share=True))
        async with await app.prefill(MODEL, messages=[RULES], cache_scope="shared") as rules:  # stays in memory inside this block
            print(f"ahead of use: {rules.cached_tokens} tokens")
            async with anyio.create_task_group() as asking:
                for name, question in QUESTIONS.items():
                    asking.start_soon(ask, rt.tenant(name, runtime.TenantSpec(may_share=True)), question)
        found = rt.stats().scheduler.prefixes
        print(
            f"{found.hits_memory} found it in memory, {found.hits_file} in files: {found.cached_tokens} tokens not computed again"
        )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    try:
        anyio.run(main, runtime.ModelSpec(MODEL, path=sys.argv[1] if len(sys.argv) == 2 else "smollm2-135m"))
    except* runtime.TroupeError as group:
        sys.exit("\n".join(str(error) for error in group.exceptions))
