"""Who plays in the scheduler's random plays: models with their slots, who drafts for whom, tenants, the length of contexts."""

from __future__ import annotations

from runtime.protocol.ids import ModelName

MODELS = {ModelName("one"): 1, ModelName("four"): 4}
DRAFTERS: dict[str, dict[str, str]] = {
    "none": {},
    "lookup": {"four": "lookup", "one": "lookup"},
    "small": {"four": "one"},
    "large": {"one": "four"},
    "each other": {"one": "four", "four": "one"},
}
TENANTS = ("a", "b", "c")
CONTEXT = 60
