"""Whether a new request may wait, and what a request costs: bounded queues, honest refusals, token estimates.

A request counts as waiting when more requests stand before a slot than there are free slots; one that can start at once
needs no place in a queue.
"""

from __future__ import annotations

from typing import assert_never

from runtime.errors import AdmissionError, Overloaded, TenantLimitReached
from runtime.protocol.commands import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from runtime.scheduler.book import Book
from runtime.scheduler.fairness import Flow, Tenant
from runtime.scheduler.model import Model
from runtime.scheduler.request import RequestRecord

CHARACTERS_PER_TOKEN = 4
UNMEASURED_SERVICE_SECONDS = 1.0
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 300.0


def estimate_prompt_tokens(prompt: Prompt) -> int:
    """Tokens of a prompt that no tokenizer has seen yet."""
    match prompt:
        case TextPrompt(text=text):
            return len(text) // CHARACTERS_PER_TOKEN + 1
        case ChatPrompt(messages_json=messages, tools_json=tools):
            return (len(messages) + len(tools or "")) // CHARACTERS_PER_TOKEN + 1
        case TokenPrompt(tokens=tokens):
            return len(tokens)
        case _:
            assert_never(prompt)


def expected_output(model: Model, record: RequestRecord) -> int:
    """Tokens a sequence of this request will probably generate."""
    return min(record.request.max_tokens, max(1, round(model.output_tokens)))


def row_cost(model: Model, record: RequestRecord) -> int:
    """Tokens that one sequence of this request will probably take of the model."""
    prompt = record.prompt_tokens
    return (estimate_prompt_tokens(record.request.prompt) if prompt is None else len(prompt)) + expected_output(model, record)


def refusal(book: Book, model: Model, tenant: Tenant, now: float) -> AdmissionError | None:
    """Why one more request of this tenant cannot wait for this model; None when it can."""
    excess = tenant_excess(book, model, tenant)
    if excess >= tenant.spec.max_queued:
        parallel = min(tenant.spec.max_running, fair_share(model, tenant))
        return TenantLimitReached(
            f"tenant {tenant.id!r} has too many requests waiting",
            retry_after_seconds=retry_after_seconds(model, parallel, now),
            depth=max(0, excess),
            limit=tenant.spec.max_queued,
        )
    excess = model.num_unstarted - model.num_soon_free_slots
    limit = book.settings.max_queued
    # A full queue is closed to whoever fills it, not to a tenant with less than its share in it: else one tenant's flood would
    # shut out all others. Shares add up to the limit, so the queue never holds more than twice as many.
    if excess >= limit and (excess >= 2 * limit or _num_waiting(model, tenant) + 1 > limit * _share(model, tenant)):
        return Overloaded(
            f"model {model.group!r} has too many requests waiting",
            retry_after_seconds=retry_after_seconds(model, model.max_slots, now),
            depth=max(0, excess),
            limit=limit,
        )
    return None


def _num_waiting(model: Model, tenant: Tenant) -> int:
    flow = tenant.flows.get(model.name)
    return 0 if flow is None else num_unstarted(flow)


def _share(model: Model, tenant: Tenant) -> float:
    """This tenant's part, by weight, among all that wait for the model."""
    weights = {flow.tenant.id: flow.tenant.spec.weight for flow in model.fair.flows.values() if num_unstarted(flow)}
    weights[tenant.id] = tenant.spec.weight
    return tenant.spec.weight / sum(weights.values())


def num_unstarted(flow: Flow) -> int:
    """Requests of this flow no sequence of which has got a slot."""
    return len(flow.queued) + len(flow.preparing) + sum(not record.has_started for record in flow.ready.in_order())


def tenant_excess(book: Book, model: Model, tenant: Tenant) -> int:
    """Its waiting requests beyond those that can start at once; negative when one more for this model could, too."""
    in_all = beyond_slots = 0
    for name, flow in tenant.flows.items():
        here = num_unstarted(flow)
        in_all += here
        beyond_slots += max(0, here - book.models[name].num_soon_free_slots) if name != model.name else here
    beyond_slots -= model.num_soon_free_slots
    beyond_quota = in_all - max(0, tenant.spec.max_running - tenant.num_running)
    return max(beyond_slots, beyond_quota)


def fair_share(model: Model, tenant: Tenant) -> float:
    """Slots this tenant may expect while all that now wait or run go on."""
    active = {flow.tenant.id: flow.tenant.spec.weight for flow in model.fair.flows.values() if flow.num_waiting}
    for sequence in model.sequences.values():
        active[sequence.record.request.tenant] = sequence.record.flow.tenant.spec.weight
    active[tenant.id] = tenant.spec.weight
    return model.max_slots * tenant.spec.weight / sum(active.values())


def retry_after_seconds(model: Model, num_parallel: float, now: float) -> float:
    """Until the next of `num_parallel` sequences ends and its slot's successor leaves the queue, by measured times."""
    longest = max((now - s.placed_at for s in model.sequences.values() if not s.is_going), default=0.0)
    service = model.service_seconds if model.service_seconds is not None else max(longest, UNMEASURED_SERVICE_SECONDS)
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, service / max(1.0, num_parallel)))
