"""A converted GGUF is the model it was: tensors under the checkpoint's names, rotary rows in order, the same text."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from runtime import store
from runtime.catalog import SMOLLM2_135M
from runtime.config import Settings
from runtime.engine import convert
from tests.support import gguf


def interleaved(rows: mx.array, num_heads: int) -> mx.array:
    """What the makers of a GGUF do to q and k, written row by row."""
    half = rows.shape[0] // num_heads // 2
    order = [2 * half * head + half * side + pair for head in range(num_heads) for pair in range(half) for side in (0, 1)]
    return rows[mx.array(order)]


@pytest.mark.parametrize("num_heads", [1, 3])
def test_halving_undoes_interleaving(num_heads: int) -> None:
    rows = mx.random.normal((num_heads * 8, 5))
    assert not mx.array_equal(interleaved(rows, num_heads), rows)
    assert mx.array_equal(convert.halves(interleaved(rows, num_heads), num_heads), rows)


def test_a_tiny_gguf_becomes_a_checkpoint_that_mlx_lm_loads(tmp_path: Path) -> None:
    gguf.write(tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    out.mkdir()
    convert.convert(tmp_path / "tiny.gguf", out, "float32")
    model, tokenizer = mlx_lm.load(str(out))
    weights = gguf.tensors()
    layer = model.model.layers[0]
    assert mx.array_equal(layer.mlp.down_proj.weight, weights["blk.0.ffn_down.weight"])
    assert mx.array_equal(interleaved(layer.self_attn.k_proj.weight, gguf.KV_HEADS), weights["blk.0.attn_k.weight"])
    assert mx.array_equal(interleaved(layer.self_attn.q_proj.weight, gguf.HEADS), weights["blk.0.attn_q.weight"])
    text = "abc é 東京<|im_end|>"
    ids = tokenizer.encode(text)
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == {2}


def test_an_unknown_tensor_is_named() -> None:
    with pytest.raises(convert.ConversionError, match=r"blk\.0\.mystery"):
        convert.checkpoint_name("blk.0.mystery")


def test_a_file_that_is_no_gguf_ends_with_one_line_and_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"no")
    assert convert.main([str(tmp_path / "bad.gguf"), str(tmp_path), "--form", "4bit"]) == 1
    assert capsys.readouterr().err.startswith("cannot convert bad.gguf: ")


@pytest.mark.real_model
@pytest.mark.parametrize("form", ["float32", "4bit"])
def test_both_forms_of_smollm2_know_the_capital_of_france(form: str, tmp_path: Path) -> None:
    """Needs the download that `make model` keeps in the user's cache."""
    convert.convert(store.download_path(Settings().home_directory(), SMOLLM2_135M.sha256), tmp_path, form)
    assert ("quantization" in json.loads((tmp_path / "config.json").read_text())) == (form == "4bit")
    model, tokenizer = mlx_lm.load(str(tmp_path))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=12) == "The capital of France is Paris."
