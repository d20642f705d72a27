"""Will these models fit into memory together? Answered by their files, without loading any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.memory.ledger import Need


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model, all its replicas together; bytes. load_bytes: beyond the rest while one of them is loading. kv_least_bytes:
    set aside for its sequences, kv_most_bytes: what they could use of what is left over. is_known: its files are here."""

    name: str
    replicas: int
    weights_bytes: int
    process_bytes: int
    prefill_bytes: int
    kv_least_bytes: int
    kv_most_bytes: int
    load_bytes: int
    is_known: bool

    @property
    def resident_bytes(self) -> int:
        return self.weights_bytes + self.process_bytes + self.prefill_bytes + self.kv_least_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """needed_bytes: of all of them, when the last one loads. advice: what to change if they do not fit, else empty."""

    fits: bool
    needed_bytes: int
    budget_bytes: int
    prefix_memory_bytes: int
    models: tuple[ModelPlan, ...]
    advice: str


def plan(needs: Sequence[tuple[str, int, Need, bool]], budget_bytes: int, prefix_memory_bytes: int) -> Plan:
    """needs: by model its name, its replicas, what one replica needs, and whether that is known."""
    models = tuple(_model_plan(*each) for each in needs)
    loading = max((model.load_bytes for model in models), default=0)
    needed = prefix_memory_bytes + sum(model.resident_bytes for model in models) + loading
    fits = needed <= budget_bytes
    return Plan(fits, needed, budget_bytes, prefix_memory_bytes, models, "" if fits else _advice(models, needed - budget_bytes))


def _model_plan(name: str, replicas: int, need: Need, is_known: bool) -> ModelPlan:
    return ModelPlan(
        name=name,
        replicas=replicas,
        weights_bytes=replicas * need.weights_bytes,
        process_bytes=replicas * need.process_bytes,
        prefill_bytes=replicas * need.prefill_bytes,
        kv_least_bytes=replicas * need.kv_least_bytes,
        kv_most_bytes=replicas * need.kv_most_bytes,
        load_bytes=need.load_bytes,
        is_known=is_known,
    )


def _advice(models: Sequence[ModelPlan], excess_bytes: int) -> str:
    enough = [model for model in models if model.resident_bytes >= excess_bytes]
    what = f"{shown_bytes(excess_bytes)} too much"
    if enough:
        least = min(enough, key=lambda model: model.resident_bytes)
        return f"{what}: leave out {least.name!r} ({shown_bytes(least.resident_bytes)}), or take it with fewer bits"
    return f"{what}: more than any single model takes; leave out several, or raise Settings(memory_budget_bytes)"


def shown_bytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MiB"
