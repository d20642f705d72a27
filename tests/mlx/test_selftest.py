"""The self-test believes nothing that a model has not shown, and what it switches off costs speed, never correctness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import msgspec
import pytest
from mlx_lm.models.cache import KVCache

from runtime.engine import lm
from runtime.engine.batch import RaggedBatch
from runtime.engine.engine import LoadError
from runtime.engine.layers import Attention, Composite, Recurrent, Unknown, kinds_of
from runtime.engine.lm_engine import LmEngine
from runtime.engine.prefix_layout import layout_of
from runtime.engine.ragged_cache import RaggedKV
from runtime.engine.recurrent import RaggedState
from runtime.engine.rows import Row
from runtime.engine.selftest import MOST_REJECTED, NothingButNoise, Proof, _SelfTest, prove
from runtime.engine.slots import Family
from runtime.protocol.commands import Load
from tests.support.crowd import load_engine, make_guests, run_alone, run_crowd
from tests.support.tiny import VOCABULARY_SIZE, MakeTiny, make_tiny


def load_model(directory: Any) -> Any:
    model, _ = mlx_lm.load(str(directory))
    return model


def proof_of(model: Any) -> Proof:
    return prove(model, kinds_of(model), VOCABULARY_SIZE)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
def test_attention_models_show_everything(tiny: MakeTiny, family: str) -> None:
    proof = proof_of(load_model(tiny(family)))
    assert proof.capabilities.batched_decode
    assert proof.capabilities.padded_prefill
    assert proof.capabilities.chunked_prefill
    assert proof.capabilities.rollback == "free"
    assert proof.capabilities.prefix
    assert proof.capabilities.verify
    assert proof.capabilities.notes == ()
    assert proof.tap is not None
    assert proof.logits_width == VOCABULARY_SIZE


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "mamba2"])
def test_recurrent_models_that_mind_padding_show_everything_with_replay(tiny: MakeTiny, family: str) -> None:
    capabilities = proof_of(load_model(tiny(family))).capabilities
    assert capabilities.batched_decode
    assert capabilities.padded_prefill
    assert capabilities.rollback == "replay"
    assert capabilities.prefix
    assert capabilities.verify
    assert capabilities.notes == ()


def test_mamba_which_does_not_mind_padding_is_found_out(tiny: MakeTiny) -> None:
    capabilities = proof_of(load_model(tiny("mamba"))).capabilities
    assert capabilities.batched_decode
    assert not capabilities.padded_prefill
    (note,) = capabilities.notes
    assert "right-padded prefill is off: logits differ by" in note


def test_kinds_are_told_by_exact_class(tiny: MakeTiny) -> None:
    assert kinds_of(load_model(tiny("llama"))) == (Attention(None), Attention(None))
    assert set(kinds_of(load_model(tiny("gemma3_text")))) == {Attention(None), Attention(16)}
    assert kinds_of(load_model(tiny("lfm2"))) == (Recurrent(1), Attention(None), Recurrent(1))
    falcon = load_model(tiny("llama"))
    falcon.make_cache = lambda: [mlx_lm.models.cache.CacheList(mlx_lm.models.cache.ArraysCache(size=2), KVCache())] * 2
    assert kinds_of(falcon) == (Composite((Recurrent(2), Attention(None))),) * 2


class ForeignCache(KVCache):  # type: ignore[misc]
    """Works like its parent, but nobody knows that."""


def test_a_model_with_an_unknown_cache_runs_one_row_at_a_time_and_rightly(tiny: MakeTiny) -> None:
    model = load_model(tiny("llama"))
    model.make_cache = lambda: [ForeignCache() for _ in model.layers]
    assert kinds_of(model) == (Unknown("ForeignCache"),) * 2
    proof = proof_of(model)
    assert not proof.capabilities.batched_decode
    assert not proof.capabilities.prefix
    assert proof.layout is None
    assert proof.capabilities.chunked_prefill
    assert proof.capabilities.rollback == "none"
    assert not proof.capabilities.verify
    assert "ForeignCache" in proof.capabilities.notes[0]
    _assert_right(model, proof, tiny)


def test_a_model_whose_positions_depend_on_the_chunk_is_given_its_prompts_in_one_piece(tiny: MakeTiny) -> None:
    """Dynamic NTK scaling looks at the length of what is fed, and cannot be told several lengths at once."""
    directory = tiny("llama", rope_scaling={"type": "dynamic", "factor": 4.0}, max_position_embeddings=8)
    loaded = load_engine(directory)
    capabilities = loaded.facts.capabilities
    assert not capabilities.batched_decode
    assert not capabilities.chunked_prefill
    guests = [guest for guest in make_guests(5, 10, [2, 3, 4, 5], num_tokens=2) if len(guest.prompt) + guest.num_tokens < 8]
    assert len(guests) > 5
    evening = run_crowd(loaded.engine, guests, 3, longest_chunk=3)
    assert evening.said == {guest.sequence: run_alone(loaded.engine, guest) for guest in guests}


def test_rows_that_leak_into_each_other_are_kept_apart(tiny: MakeTiny) -> None:
    model = load_model(tiny("llama"))
    leaky = _Wrapped(model, lambda logits: logits + 0.01 * mx.mean(logits, axis=0, keepdims=True) * (logits.shape[0] > 1))
    proof = proof_of(leaky)
    assert not proof.capabilities.batched_decode
    assert any("batched decode is off: logits differ" in note for note in proof.capabilities.notes)
    _assert_right(leaky, proof, tiny)


def test_a_model_that_raises_on_several_rows_runs_them_one_at_a_time(tiny: MakeTiny) -> None:
    def one_at_a_time(logits: mx.array) -> mx.array:
        if logits.shape[0] > 1:
            raise ValueError("only one row, please")
        return logits

    model = _Wrapped(load_model(tiny("llama")), one_at_a_time)
    proof = proof_of(model)
    assert not proof.capabilities.batched_decode
    assert any("only one row, please" in note for note in proof.capabilities.notes)
    _assert_right(model, proof, tiny)


def test_logits_that_are_no_numbers_prove_nothing(tiny: MakeTiny) -> None:
    model = _Wrapped(load_model(tiny("lfm2")), lambda logits: logits * float("nan"))
    with pytest.raises(NothingButNoise):
        proof_of(model)


def test_a_mask_that_forgets_the_window_is_noticed(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mask = Family._make_mask
    monkeypatch.setattr(Family, "_make_mask", lambda self, window, return_array: make_mask(self, None, return_array))
    assert not proof_of(load_model(tiny("gemma3_text"))).capabilities.batched_decode


def test_a_state_that_is_not_restored_is_noticed(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RaggedState, "restore", lambda self, row, snapshot, source: None)
    capabilities = proof_of(load_model(tiny("lfm2"))).capabilities
    assert capabilities.rollback == "none"
    assert not capabilities.verify
    assert capabilities.padded_prefill
    assert any("rollback is off" in note for note in capabilities.notes)


def test_a_wide_block_that_comes_out_wrong_costs_verifying_and_nothing_else(tiny: MakeTiny) -> None:
    model = load_model(tiny("llama"))
    healthy = proof_of(model).capabilities
    width = 1 + MOST_REJECTED
    spoiled = proof_of(_Wrapped(model, lambda logits: logits * (1.01 if logits.shape[1] == width else 1.0))).capabilities
    (note,) = spoiled.notes
    assert note.startswith("verifying proposed tokens is off: logits differ by")
    assert spoiled == msgspec.structs.replace(healthy, verify=False, notes=(note,))


def test_what_rejected_proposals_leave_behind_costs_verifying_and_nothing_else(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that comes back from a long block a position too far ahead."""
    rewind = RaggedBatch.rewind

    def too_short(self: RaggedBatch, row: Row, length: int) -> list[int] | None:
        is_long = row.num_cached - length >= MOST_REJECTED
        owed = rewind(self, row, length)
        row.num_cached += is_long
        return owed

    monkeypatch.setattr(RaggedBatch, "rewind", too_short)
    capabilities = proof_of(load_model(tiny("llama"))).capabilities
    assert capabilities.rollback == "free"
    assert not capabilities.verify


@pytest.mark.parametrize("window", [16, 100])
def test_a_window_that_drops_too_much_is_noticed_also_when_it_is_larger_than_the_slack(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    model = load_model(tiny("gemma3_text", sliding_window=window))
    assert proof_of(model).capabilities.verify
    compact = Family.compact
    monkeypatch.setattr(Family, "compact", lambda self, lengths, **options: compact(self, [one + 1 for one in lengths], **options))
    spoiled = proof_of(model).capabilities
    assert spoiled.rollback == "free"
    assert not spoiled.verify


def test_a_prefix_that_comes_back_wrong_is_noticed(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values, a sliding layer's checkpoint, and a recurrent layer's state."""
    positions, of_row = RaggedKV.positions, RaggedState.of_row
    windows: list[int | None] = []

    def altered(self: RaggedKV, row: int, name: str, first: int, end: int) -> mx.array | None:
        array = positions(self, row, name, first, end)
        return array if array is None or self.family.window not in windows else array[:, ::-1]

    monkeypatch.setattr(RaggedKV, "positions", altered)
    for family, window in (("llama", None), ("gemma3_text", 16)):
        windows[:] = [window]
        _assert_prefixes_are_off(proof_of(load_model(tiny(family))))
    windows.clear()
    assert proof_of(load_model(tiny("mamba2"))).capabilities.prefix
    monkeypatch.setattr(RaggedState, "of_row", lambda self, *where: tuple(array * 0 for array in of_row(self, *where)))
    for family in ("lfm2", "mamba2"):
        _assert_prefixes_are_off(proof_of(load_model(tiny(family))))


def _assert_prefixes_are_off(proof: Proof) -> None:
    assert proof.capabilities.batched_decode
    assert proof.capabilities.rollback != "none"
    assert not proof.capabilities.prefix
    assert proof.layout is None
    (note,) = proof.capabilities.notes
    assert note.startswith("keeping prefixes is off: logits differ by")


def test_the_proof_of_prefixes_costs_one_forward(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def num_forwards() -> int:
        calls: list[int] = []
        model = _Wrapped(load_model(tiny("gemma3_text")), lambda logits: calls.append(1) or logits)
        proof_of(model)
        return len(calls)

    with_it = num_forwards()
    monkeypatch.setattr(_SelfTest, "_prove_prefix", lambda self: None)
    assert with_it == num_forwards() + 1


def test_a_layer_without_contents_cannot_be_kept_and_says_so(tiny: MakeTiny) -> None:
    """Such caches exist: keys alone, with values of no size."""
    batch = RaggedBatch([Attention(None)])
    batch.add_fresh([])
    (layer,) = batch.layers
    assert isinstance(layer, RaggedKV)
    layer.keys, layer.values = mx.zeros((1, 2, 8, 4)), mx.zeros((1, 2, 8, 0))
    with pytest.raises(ValueError, match=r"layer 0 has values without contents, of shape \[2, 0\]"):
        layout_of(batch)


def test_a_model_whose_output_bypasses_the_tap_computes_all_logits(tiny: MakeTiny) -> None:
    model = load_model(tiny("llama"))
    head = model.lm_head
    bypass = _Wrapped(model, lambda logits: logits)
    del model.lm_head
    model.projection = head
    model.args.tie_word_embeddings = False
    type_of_model = type(model)
    bypass.call = lambda tokens, cache: model.projection(type_of_model.__getattr__(model, "model")(tokens, cache))
    proof = proof_of(bypass)
    assert proof.tap is None
    assert proof.capabilities.batched_decode
    assert any("logits nobody looks at" in note for note in proof.capabilities.notes)


def test_a_limit_of_open_files_that_mlx_lm_cannot_live_with_is_told_as_that() -> None:
    with pytest.raises(LoadError, match="at most 1024 files"):
        lm.check_open_files(1024)
    lm.check_open_files(4096)
    lm.check_open_files(-1)


class _Wrapped:
    """A model whose logits pass through `change`."""

    def __init__(self, model: Any, change: Any) -> None:
        self._model = model
        self._change = change
        self.call: Any = lambda tokens, cache: model(tokens, cache=cache)

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        return self._change(self.call(tokens, cache))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _assert_right(model: Any, proof: Proof, tiny: MakeTiny) -> None:
    """A crowd through an engine restricted by `proof` says what the healthy model's rows say alone."""
    restricted = LmEngine(
        model, kinds_of(model), proof.capabilities, vocabulary_size=VOCABULARY_SIZE, context_length=2048, tap=proof.tap
    )
    healthy = load_engine(tiny("llama")).engine
    guests = make_guests(9, 10, [1, 5, 30])
    evening = run_crowd(restricted, guests, 4, longest_chunk=12)
    assert evening.said == {guest.sequence: run_alone(healthy, guest) for guest in guests}


def test_others_may_have_the_device_between_two_proofs(tiny: MakeTiny) -> None:
    heard: list[tuple[str, int, int]] = []
    lm.load(Load(name="tiny", path=str(tiny("llama"))), lambda *progress: heard.append(progress))
    turns = [progress for progress in heard if progress[0] == "selftest"]
    assert turns[0] == ("selftest", 0, 1)
    assert turns[-1] == ("selftest", 1, 1)
    assert len(turns) > 5
    assert turns.count(("selftest", 1, 1)) == 1


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_checkpoint_whose_logits_are_never_finite_does_not_load(tmp_path: Path, poison: float) -> None:
    directory = make_tiny(tmp_path / "poisoned", "llama")
    weights = mx.load(str(directory / "model.safetensors"))
    weights["model.norm.weight"] = mx.full(weights["model.norm.weight"].shape, poison)
    mx.eval(weights)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    with pytest.raises(LoadError, match="not finite") as caught:
        lm.load(Load(name="poisoned", path=str(directory)), lambda *_: None)
    assert caught.value.reason == "corrupt_weights"
