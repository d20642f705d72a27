"""The tiny checkpoints are real: mlx-lm loads each family and says varied, reproducible things with it."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step

from tests.support import tiny as support
from tests.support.tiny import FAMILIES, MakeTiny, make_tiny


def greedy(directory: Path, prompt: bytes, num_tokens: int) -> list[int]:
    model, _ = mlx_lm.load(str(directory))
    return [int(token) for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=num_tokens)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_loads_and_says_varied_things_that_depend_on_the_prompt(tiny: MakeTiny, family: str) -> None:
    first = greedy(tiny(family), b"The troupe enters.", 40)
    second = greedy(tiny(family), b"The troupe leaves!", 40)
    assert len(set(first)) >= 5
    assert first != second
    assert all(0 <= token < support.VOCABULARY_SIZE for token in first)


def test_the_same_arguments_give_the_same_bytes_and_another_seed_gives_others(tmp_path: Path) -> None:
    one, same, other = (make_tiny(tmp_path / name, "llama", seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    for file in sorted(path.name for path in one.iterdir()):
        assert (one / file).read_bytes() == (same / file).read_bytes()
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_the_tokenizer_has_one_token_per_byte_and_knows_its_specials(tiny: MakeTiny) -> None:
    _, tokenizer = mlx_lm.load(str(tiny("llama")))
    text = "aé漢🎭\n"
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert tokenizer.encode("a") == [support.BOS_ID, ord("a")]
    assert tokenizer.encode("<|im_end|><tool_call>", add_special_tokens=False) == [support.IM_END_ID, support.TOOL_CALL_ID]
    assert tokenizer.eos_token_ids == {support.EOS_ID, support.IM_END_ID}
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_checkpoint_without_a_chat_template_has_none(tiny: MakeTiny) -> None:
    _, tokenizer = mlx_lm.load(str(tiny("llama", chat_template=False)))
    assert tokenizer.chat_template is None
    assert tokenizer.eos_token_ids == {support.EOS_ID}
