"""Which values may a client ask for? Every option of `generate` and `stream`, its range, and the check of all of them.

Pure, and done before anything is sent: what passes here can be encoded, and can only be refused by a worker for reasons that
need the model (a token id outside its vocabulary, a prompt its template cannot render).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar, cast

from runtime.errors import InvalidRequest, shown
from runtime.prompts import checked_text, checked_token, make_prompt, whole_number
from runtime.protocol.commands import Prompt, Sampling
from runtime.protocol.tokens import TokenIds

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1000
MAX_LOGIT_BIASES = 1024

Cache = Literal["on", "read-only", "off"]
CacheScope = Literal["tenant", "shared"]
Priority = Literal["interactive", "background"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "background")
CACHES: tuple[Cache, ...] = ("on", "read-only", "off")
CACHE_SCOPES: tuple[CacheScope, ...] = ("tenant", "shared")
_Word = TypeVar("_Word", bound=str)


class PromptOptions(TypedDict, total=False):
    """What the model is given; exactly one of `prompt`, `tokens` and `messages` is required.

    prompt: text, continued as it stands. tokens: token ids, fed as they are. messages: a chat, rendered by the model's template.
    tools, reasoning_effort, primer (text the reply begins with): given to the template, so only with `messages`.
    """

    prompt: str
    tokens: Sequence[int] | TokenIds
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    reasoning_effort: str | None
    primer: str | None


class GenerateOptions(PromptOptions, total=False):
    """Keyword options of `Tenant.generate` and `Tenant.stream`: those of the prompt (see `PromptOptions`), and

    max_tokens: of one sequence, 1024 when not given. temperature: from 0, the default, which takes the likeliest token, to 10.
    top_p, top_k, min_p: draw from the likeliest tokens only; off at 1, 0 and 0, the defaults.
    repetition_penalty (over prompt and output, 1 is off), presence_penalty, frequency_penalty (over the output, 0 is off).
    logit_bias: token id → what is added to its logit.
    stop: one or up to 16 texts that end a sequence; they are never part of the result.
    seed: None draws one, reported in the completion. n: sequences from one prompt, up to 16.
    logprobs: None, or how many alternatives to report beside each chosen token, up to 20.
    ignore_eos: go on past the model's end token. priority: "interactive" or "background".
    deadline_seconds: from submission to the end, else `DeadlineExceeded`.
    cache: "on", the default, restores what is kept of a prompt's beginning and keeps what is computed; "read-only" keeps nothing
    new; "off" neither finds nor keeps. cache_scope: who shares it, "tenant" or, if `TenantSpec.may_share`, "shared".
    speculate: False keeps the model's drafter out of it, True is refused where there is none that fits, None leaves it to the
    runtime; the tokens are the same.

    What is out of its range is an `InvalidRequest` that names the range.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    seed: int | None
    n: int
    logprobs: int | None
    ignore_eos: bool
    priority: Priority
    deadline_seconds: float | None
    cache: Cache
    cache_scope: CacheScope
    speculate: bool | None


@dataclass(frozen=True, slots=True)
class Range:
    """A number's kind, limits (inclusive, but for `above`) and default. The check and the error text both come from here."""

    low: float
    high: float
    default: float | None
    whole: bool = False
    above: bool = False
    optional: bool = False

    def describe(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        limits = f"above {self.low:g} and at most {self.high:g}" if self.above else f"from {self.low} to {self.high}"
        return f"{kind} {limits}{', or None' if self.optional else ''}"

    def check(self, option: str, value: object) -> float | None:
        if value is None and self.optional:
            return None
        number = whole_number(value) if self.whole else _real(value)
        if number is None or number > self.high or number < self.low or (self.above and number == self.low):
            raise InvalidRequest(option, f"got {shown(value)}; allowed: {self.describe()}")
        return number


RANGES: dict[str, Range] = {
    "max_tokens": Range(1, 1_000_000, 1024, whole=True),
    "temperature": Range(0, 10, 0.0),
    "top_p": Range(0, 1, 1.0, above=True),
    "top_k": Range(0, 1_000_000, 0, whole=True),
    "min_p": Range(0, 1, 0.0),
    "repetition_penalty": Range(0, 10, 1.0, above=True),
    "presence_penalty": Range(-10, 10, 0.0),
    "frequency_penalty": Range(-10, 10, 0.0),
    "seed": Range(0, (1 << 64) - 1, None, whole=True, optional=True),
    "n": Range(1, 16, 1, whole=True),
    "logprobs": Range(0, 20, None, whole=True, optional=True),
    "deadline_seconds": Range(0, 1e7, None, above=True, optional=True),
}
"""top_k 0 and min_p 0: off. logprobs 0: the chosen token's alone."""

LOGIT_BIAS = Range(-10_000, 10_000, None)

ALLOWED_OPTIONS = tuple(sorted(GenerateOptions.__optional_keys__))
PROMPT_OPTIONS = tuple(sorted(PromptOptions.__optional_keys__))


@dataclass(frozen=True, slots=True)
class ValidOptions:
    """What a request needs, all within its ranges. `warnings`: what was ignored, for the completion.

    prefill_only, boundaries: see `Request`.
    """

    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    num_sequences: int
    priority: Priority
    deadline_seconds: float | None
    warnings: tuple[str, ...]
    cache: Cache = "on"
    cache_scope: CacheScope = "tenant"
    prefill_only: bool = False
    boundaries: tuple[int, ...] = ()
    speculate: bool | None = None


def validate(options: Mapping[str, Any]) -> ValidOptions:
    """:raises InvalidRequest: names the first option at fault and what is allowed."""
    require_known(options, ALLOWED_OPTIONS)
    numbers = {name: allowed.check(name, options.get(name, allowed.default)) for name, allowed in RANGES.items()}
    stop, warnings = _stop(options.get("stop", ()))
    seed, logprobs = numbers["seed"], numbers["logprobs"]
    sampling = Sampling(
        temperature=cast(float, numbers["temperature"]),
        top_p=cast(float, numbers["top_p"]),
        top_k=cast(int, numbers["top_k"]),
        min_p=cast(float, numbers["min_p"]),
        repetition_penalty=cast(float, numbers["repetition_penalty"]),
        presence_penalty=cast(float, numbers["presence_penalty"]),
        frequency_penalty=cast(float, numbers["frequency_penalty"]),
        logit_bias=_logit_bias(options.get("logit_bias", {})),
        # 53 bits: a drawn seed survives any JSON reader.
        seed=secrets.randbits(53) if seed is None else cast(int, seed),
        logprobs=-1 if logprobs is None else cast(int, logprobs),
    )
    return ValidOptions(
        prompt=make_prompt(options),
        sampling=sampling,
        max_tokens=cast(int, numbers["max_tokens"]),
        stop=stop,
        ignore_eos=_boolean("ignore_eos", options.get("ignore_eos", False)),
        num_sequences=cast(int, numbers["n"]),
        priority=one_of("priority", options.get("priority", "interactive"), PRIORITIES),
        deadline_seconds=numbers["deadline_seconds"],
        warnings=warnings,
        cache=one_of("cache", options.get("cache", "on"), CACHES),
        cache_scope=one_of("cache_scope", options.get("cache_scope", "tenant"), CACHE_SCOPES),
        speculate=_choice("speculate", options.get("speculate")),
    )


def validate_prompt(options: Mapping[str, Any]) -> Prompt:
    """The prompt alone. :raises InvalidRequest: as `validate`."""
    require_known(options, PROMPT_OPTIONS)
    return make_prompt(options)


def require_known(options: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """:raises InvalidRequest: names the first that is not allowed."""
    for name in options:
        if name not in allowed:
            raise InvalidRequest(name, f"unknown option; allowed: {', '.join(allowed)}")


def _real(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _boolean(option: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(option, f"got {shown(value)}; allowed: True or False")
    return value


def _choice(option: str, value: object) -> bool | None:
    if not (value is None or isinstance(value, bool)):
        raise InvalidRequest(option, f"got {shown(value)}; allowed: True, False or None")
    return value


def one_of(option: str, value: object, allowed: tuple[_Word, ...]) -> _Word:
    """:raises InvalidRequest: it is none of them."""
    if isinstance(value, str):
        for word in allowed:
            if value == word:
                return word
    raise InvalidRequest(option, f"got {shown(value)}; allowed: {', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}")


def _stop(value: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stop strings, and a warning for each one ignored: text of spaces alone would end nearly every reply at once."""
    allowed = f"a non-empty string, or at most {MAX_STOP_STRINGS} of them"
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray | memoryview) or len(value) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"got {shown(value)}; allowed: {allowed}")
    texts = dict.fromkeys(checked_text("stop", text, allowed) for text in value)
    if any(len(text.encode()) > MAX_STOP_BYTES for text in texts):
        raise InvalidRequest("stop", f"a stop string has more than {MAX_STOP_BYTES} bytes")
    # Line breaks are stops in earnest ("\n\n" ends a paragraph); spaces stand between nearly all words.
    kept = tuple(text for text in texts if text.strip(" "))
    return kept, tuple(f"stop: {text!r} is spaces only and was ignored" for text in texts if text not in kept)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            "logit_bias", f"got {shown(value)}; allowed: a dict of at most {MAX_LOGIT_BIASES} token ids to numbers"
        )
    pairs = []
    for token, bias in value.items():
        checked = checked_token("logit_bias", token)
        pairs.append((checked, cast(float, LOGIT_BIAS.check(f"logit_bias[{checked}]", bias))))
    return tuple(sorted(pairs))
