"""Which prompts are measured? Ragged ones, different in every round, so that no side can reuse what it computed before."""

from __future__ import annotations

_TOPICS = (
    "the sea",
    "a small railway station in the mountains where nobody has waited for a train since the autumn",
    "bread",
    "two sisters who mend clocks, one of them for money and the other because she cannot leave a broken thing alone",
    "how rivers find their way",
    "a letter that arrives forty years late, opened by somebody it was never meant for, on the morning of a wedding by the coast",
    "winter",
    "an orchestra without a conductor",
)


def single(round_number: int) -> str:
    return f"Story number {round_number + 10}. Write a long story about {_TOPICS[round_number % len(_TOPICS)]}. Once upon a time"


def crowd(round_number: int, num_prompts: int = len(_TOPICS)) -> list[str]:
    """`num_prompts` prompts of different lengths for one round."""
    topics = [_TOPICS[number % len(_TOPICS)] for number in range(num_prompts)]
    return [f"Round {round_number + 10}, story {number + 10}: {topic}. Once" for number, topic in enumerate(topics)]
