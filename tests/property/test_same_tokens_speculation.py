"""The same request gives the same tokens with speculation and without: whatever drafts, however much of it is right.

Tiny real models over real processes on the reference BLAS; requests join, leave and are cancelled at random.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import mlx.core as mx
import numpy as np
import pytest

import runtime
from tests.property.workload import differences, make_workload, run_alone, run_together
from tests.support.tiny import make_tiny

pytestmark = [pytest.mark.anyio, pytest.mark.limit(300)]

DRAFT_TOKENS = {"llama": (1, 3, 6, 8), "gemma3_text": (2, 3, 7, 8), "lfm2": (1, 4, 7)}
"""All lengths on every family is what the fake engine is for."""
SOLO = (0, 3, 7)
NUM_CROWD_TOKENS = 450
"""A crowd of tiny rows says much before its drafter has read all their prompts."""
ENOUGH_PROPOSALS, MAX_CROWDS = 100, 8
SETTINGS = runtime.Settings(blas="reference", stream_window_tokens=8, prefill_chunk_tokens=64, prefix_disk_bytes=0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def _noisy(source: Path, directory: Path, noise: float) -> Path:
    """The same checkpoint with its matrices disturbed by so much of their own size."""
    directory.mkdir()
    for file in source.iterdir():
        if file.name != "model.safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    weights: dict[str, mx.array] = mx.load(str(source / "model.safetensors"))  # type: ignore[assignment]
    random = np.random.default_rng(1)
    for name, value in weights.items():
        if value.ndim >= 2:
            array = np.array(value)
            weights[name] = mx.array(array + noise * array.std() * random.standard_normal(array.shape).astype(np.float32))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    return directory


def _drafters(family: str, root: Path) -> dict[str, Path]:
    """By name. A hybrid model cannot draft, so its target's drafters are of another family, and none is its twin."""
    target = root / "target"
    if family == "lfm2":
        return {
            "random": make_tiny(root / "random", "llama", seed=5),
            "another": make_tiny(root / "another", "gemma3_text", seed=6),
        }
    return {"twin": target, "noisy": _noisy(target, root / "noisy", 0.02), "random": make_tiny(root / "random", "llama", seed=5)}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
async def test_any_drafter_and_any_draft_length_give_the_tokens_of_plain_decoding(family: str, tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / "target", family)
    drafters = _drafters(family, tmp_path)
    asks = make_workload(4711, num_requests=12, longest_prompt=80, greedy_only=False, spread_seconds=0.4)
    rates: dict[str, float] = {}
    async with runtime.Runtime(SETTINGS) as rt:
        await rt.load(runtime.ModelSpec("plain", str(checkpoint), max_slots=8))
        for name, path in drafters.items():
            await rt.load(runtime.ModelSpec(name, str(path), max_slots=8))
        tenants = [rt.tenant(name, runtime.TenantSpec(max_running=16)) for name in ("a", "b")]
        alone = [await run_alone(tenants[0], "plain", ask) for ask in asks]
        assert any(len(answer.token_ids) > 20 for answer in alone)
        for num_tokens in DRAFT_TOKENS[family]:
            names = [list(drafters)[num_tokens % len(drafters)], *(["lookup"] if num_tokens in (4, 8) else [])]
            for name in names:
                spec = runtime.ModelSpec(
                    "target", str(checkpoint), max_slots=8, drafter=name, draft_tokens=num_tokens, draft_ahead=num_tokens % 2 == 0
                )
                await rt.load(spec)
                together = await run_together(tenants, "target", asks)
                (pairing,) = rt.stats().scheduler.pairings
                assert (pairing.state, pairing.late) == ("paired", 0), pairing
                assert pairing.rounds > 0
                assert pairing.guests == 0, "the drafter still holds what is over"
                rates[name] = pairing.accepted / max(pairing.proposed, 1)
                assert differences(asks, together, alone) == [], (family, name, num_tokens)
                assert (await rt.inspect("target")).running == ()
                await rt.unload("target")
    if "twin" in rates:
        assert rates["twin"] > 0.9  # what is not committed was cut off by the end of a sequence
        assert rates["random"] < 0.2
        assert rates["random"] < rates["noisy"] < rates["twin"]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
async def test_of_a_twin_every_proposal_is_right_and_prefixes_on_either_side_change_nothing(family: str, tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / "target", family)
    prompt = [32 + number * 7 % 90 for number in range(300)]
    async with runtime.Runtime(SETTINGS) as rt:
        for name in ("plain", "twin"):
            await rt.load(runtime.ModelSpec(name, str(checkpoint)))
        await rt.load(runtime.ModelSpec("target", str(checkpoint), drafter="twin", draft_tokens=4))
        tenant = rt.tenant("a")
        num_proposed = 0
        for number, temperature in enumerate((0.0, 0.7, 1.2)):
            options = {
                "tokens": prompt[: 290 + number],
                "max_tokens": 161,
                "temperature": temperature,
                "top_p": 0.95,
                "repetition_penalty": 1.1,
                "seed": 3,
                "logprobs": 1,
                "ignore_eos": True,
            }
            plain = await tenant.generate("plain", **options)
            # The second of each finds its prompt in the target's memory and in the drafter's.
            for is_warm in (False, True):
                answer = await tenant.generate("target", **options)
                assert answer.token_ids == plain.token_ids
                assert answer.logprobs == plain.logprobs
                assert answer.text == plain.text
                usage = answer.usage
                assert usage.accepted_tokens == usage.proposed_tokens
                num_proposed += usage.proposed_tokens
                # One free token to begin with, then rounds of at most five.
                assert usage.completion_tokens - usage.accepted_tokens >= 161 // 5
                assert usage.cached_tokens >= 256 or not is_warm
        assert num_proposed > 50
        with pytest.raises(runtime.InvalidRequest, match="speculate"):
            await tenant.generate("plain", prompt="x", speculate=True)
        without = await tenant.generate("target", tokens=prompt, max_tokens=20, speculate=False)
        assert without.usage.proposed_tokens == 0


def num_proposed(crowds: list[dict[tuple[str, int], runtime.Completion]], name: str) -> int:
    return sum(answers[name, number].usage.proposed_tokens for answers in crowds for number in SOLO)


def rate(answers: dict[tuple[str, int], runtime.Completion], name: str) -> float:
    return sum(answers[name, number].usage.accepted_tokens for number in SOLO) / num_proposed([answers], name)


async def test_one_drafter_serves_two_targets_at_once_and_a_row_is_guessed_alike_in_any_batch(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "base", "llama")
    drafter = _noisy(base, tmp_path / "noisy", 0.05)
    other = make_tiny(tmp_path / "other", "llama", seed=9)
    prompts = [[32 + (number * 13 + place * place) % 90 for place in range(5 + number * 7)] for number in range(8)]

    async def ask(tenant: runtime.Tenant, model: str, number: int, max_tokens: int = NUM_CROWD_TOKENS) -> runtime.Completion:
        return await tenant.generate(model, tokens=prompts[number], max_tokens=max_tokens, ignore_eos=True, cache="off")

    async with runtime.Runtime(SETTINGS) as rt:
        await rt.load(runtime.ModelSpec("drafter", str(drafter), max_slots=16))
        for name, path in (("left", base), ("right", other)):
            await rt.load(runtime.ModelSpec(f"plain {name}", str(path)))
            await rt.load(runtime.ModelSpec(name, str(path), drafter="drafter", draft_tokens=3, draft_ahead=False))
        tenant = rt.tenant("a", runtime.TenantSpec(max_running=32))
        alone = {(name, n): await ask(tenant, name, n, 200) for name in ("left", "right") for n in SOLO}
        plain: dict[tuple[str, int], runtime.Completion] = {}

        async def join(answers: dict[tuple[str, int], runtime.Completion], prefix: str, name: str, number: int) -> None:
            answers[name, number] = await ask(tenant, f"{prefix}{name}", number)

        async def crowd(answers: dict[tuple[str, int], runtime.Completion], prefix: str) -> None:
            async with anyio.create_task_group() as group:
                for name in ("left", "right"):
                    for number in range(8):
                        group.start_soon(join, answers, prefix, name, number)

        await crowd(plain, "plain ")
        crowds: list[dict[tuple[str, int], runtime.Completion]] = []
        # On a busy machine a crowd of tiny rows may be over before the drafter has read the prompts.
        while not crowds or min(num_proposed(crowds, name) for name in ("left", "right")) < ENOUGH_PROPOSALS:
            assert len(crowds) < MAX_CROWDS, [num_proposed(crowds, name) for name in ("left", "right")]
            crowds.append({})
            await crowd(crowds[-1], "")
        left, right = rt.stats().scheduler.pairings
    for key, answer in plain.items():
        assert all(answer.token_ids == together[key].token_ids for together in crowds), key
        assert key not in alone or answer.token_ids[:200] == alone[key].token_ids, key
    assert left.accepted > right.accepted
    for name in ("left", "right"):
        accepted = sum(together[name, number].usage.accepted_tokens for together in crowds for number in SOLO)
        assert accepted / num_proposed(crowds, name) == pytest.approx(rate(alone, name), abs=0.1)


async def test_a_drafter_of_another_vocabulary_is_refused_with_a_reason(tmp_path: Path) -> None:
    target = make_tiny(tmp_path / "target", "llama")
    other = make_tiny(tmp_path / "other", "llama")
    tokenizer = other / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    tokenizer.write_text(text.replace('"A": 65', '"A": 66', 1).replace('"B": 66', '"B": 65', 1), encoding="utf-8")
    assert tokenizer.read_text(encoding="utf-8") != text
    async with runtime.Runtime(SETTINGS) as rt:
        await rt.load(runtime.ModelSpec("other", str(other)))
        await rt.load(runtime.ModelSpec("target", str(target), drafter="other"))
        (pairing,) = rt.stats().scheduler.pairings
        assert pairing.state == "refused"
        assert "vocabulary" in (pairing.reason or "")
        assert any("vocabulary" in note for note in rt.capabilities("target").notes)
        tenant = rt.tenant("a")
        assert (await tenant.generate("target", prompt="Hello", max_tokens=5)).usage.proposed_tokens == 0
        with pytest.raises(runtime.InvalidRequest, match="vocabulary"):
            await tenant.generate("target", prompt="Hello", speculate=True)
