"""The pairings of the speculation benchmark are what they are said to be: of a known cost and acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from benchmarks import pairings

PROMPTS = ["The river is wide and", "A letter came"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pairings.make_random(tmp_path_factory.mktemp("pairings") / "base", 2, is_quick=True)


def logits(path: Path) -> mx.array:
    model = mlx_lm.load(str(path))[0]
    found: mx.array = model(mx.array([[72, 101, 108, 108, 111]]))
    return found


def test_identity_layers_cost_and_change_nothing_else(base: Path, tmp_path: Path) -> None:
    deeper = pairings.with_identity_layers(base, tmp_path / "deeper", 4)
    assert json.loads((deeper / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"] == 6
    assert mx.array_equal(logits(base), logits(deeper))


def test_noise_and_fewer_bits_change_what_is_said(base: Path, tmp_path: Path) -> None:
    noisy = pairings.with_noise(base, tmp_path / "noisy", 0.05)
    coarser = pairings.requantised(base, tmp_path / "coarser", bits=4)
    assert mx.array_equal(logits(base), logits(pairings.with_noise(base, tmp_path / "silent", 0.0)))
    for other in (noisy, coarser):
        assert not mx.array_equal(logits(base), logits(other))
        assert logits(other).dtype == logits(base).dtype


def test_noise_is_found_for_a_wanted_acceptance(base: Path, tmp_path: Path) -> None:
    found = pairings.calibrated(base, tmp_path, PROMPTS, 40, 0.6)
    assert found["agreement"] == pytest.approx(0.6, abs=0.1)
    assert pairings.agreement(base, Path(found["path"]), PROMPTS, 40) == found["agreement"]


def test_guesses_are_compared_with_the_token_they_are_for(base: Path) -> None:
    model, tokenizer = mlx_lm.load(str(base))[:2]
    prompt = list(tokenizer.encode("Hello"))
    text = list(prompt)
    for _ in range(6):
        text.append(int(mx.argmax(model(mx.array([text]))[0, -1]).item()))
    answer = text[len(prompt) :]
    assert pairings.right_guesses(base, [(prompt, answer)]) == [[True] * 6]
    wrong = [*answer[:5], (answer[5] + 1) % 256]
    assert pairings.right_guesses(base, [(prompt, wrong)]) == [[True] * 5 + [False]]
