"""Every way a checkpoint can be wrong gives a typed error that names the fault; every right one loads, whatever its path."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import mlx.core as mx
import mlx_lm
import pytest
from huggingface_hub import errors as hub_errors
from mlx_lm.generate import generate_step

from runtime.engine import checkpoint, checkpoint_config
from runtime.engine.checkpoint import Checkpoint, load_checkpoint
from runtime.engine.engine import LoadError
from runtime.protocol.commands import Load
from tests.support.tiny import FAMILIES, MakeTiny, make_tiny


def ignore_progress(stage: str, done: int, total: int) -> None:
    pass


def load(directory: Path | str, **options: Any) -> Checkpoint:
    return load_checkpoint(Load("tiny", str(directory), **options), ignore_progress)


def refused(directory: Path | str, reason: str, *named: str, **options: Any) -> str:
    """The load fails with `reason`, and the message names each of `named`."""
    with pytest.raises(LoadError) as caught:
        load(directory, **options)
    message, got = str(caught.value), caught.value.reason
    del caught  # its traceback holds the half-loaded weights and their open files
    assert got == reason, message
    for name in named:
        assert name in message, message
    return message


@pytest.fixture
def copy(tiny: MakeTiny, tmp_path: Path) -> Callable[..., Path]:
    def make(family: str = "llama", **options: Any) -> Path:
        return Path(shutil.copytree(tiny(family, **options), tmp_path / "checkpoint"))

    return make


def change_config(directory: Path, **changes: Any) -> None:
    """Replace keys of config.json; `...` removes one."""
    config = json.loads((directory / "config.json").read_text())
    config.update(changes)
    (directory / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


# -- what is right ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_family_loads_and_says_what_it_is(tiny: MakeTiny, family: str) -> None:
    loaded = load(tiny(family))
    assert loaded.model_type == family
    assert loaded.context_length == FAMILIES[family]["max_position_embeddings"]
    assert loaded.weights_bytes == sum(array.nbytes for array in mx.load(str(tiny(family) / "model.safetensors")).values())
    num_attention_layers = {"gemma3_text": 4, "lfm2": 1, "qwen3_next": 1, "mamba": 0, "mamba2": 0}.get(family, 2)
    assert loaded.bytes_per_token == num_attention_layers * 2 * 2 * 16 * 4  # keys and values, heads, dimension, float32
    assert len(loaded.fingerprint) == 64


def test_the_loaded_model_says_what_mlx_lm_says(tiny: MakeTiny) -> None:
    ours, (theirs, _) = load(tiny("llama")).model, mlx_lm.load(str(tiny("llama")))
    first, second = (
        [int(token) for token, _ in generate_step(mx.array([1, 2, 3]), model, max_tokens=12)] for model in (ours, theirs)
    )
    assert first == second


@pytest.mark.parametrize(
    "name",
    ["模型 目录", "Модель", "with spaces", unicodedata.normalize("NFD", "modèle é"), "model [4bit] *?", "🎭", "a'b\"c", "%20", "~"],
)
def test_a_directory_may_be_called_anything(tmp_path: Path, name: str) -> None:
    assert load(make_tiny(tmp_path / name / "x", "llama")).directory == tmp_path / name / "x"


def test_a_relative_path_and_a_link_work(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tiny("llama"))
    monkeypatch.chdir(tmp_path)
    assert load("link").fingerprint == load(tiny("llama")).fingerprint


def test_the_context_is_bounded_by_the_load_and_has_a_default(copy: Callable[..., Path]) -> None:
    directory = copy()
    assert load(directory, max_context_tokens=100).context_length == 100
    assert load(directory, max_context_tokens=1 << 24).context_length == 2048
    change_config(directory, max_position_embeddings=...)
    assert load(directory).context_length == checkpoint_config.DEFAULT_CONTEXT_LENGTH
    change_config(directory, text_config={"max_position_embeddings": 77})
    assert load(directory).context_length == 77


def test_a_load_off_the_main_thread_leaves_nothing_unevaluated_for_that_thread(tiny: MakeTiny) -> None:
    """Rotary tables are private lazy arrays; evaluated where they were made, they can be used anywhere."""
    made: list[Checkpoint] = []
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    directory = tiny("llama", rope_scaling=rope | {"original_max_position_embeddings": 256})
    thread = threading.Thread(target=lambda: made.append(load(directory)))
    thread.start()
    thread.join(60)
    assert mx.isfinite(made[0].model(mx.array([[1, 2, 3]]))).all().item()


def test_progress_runs_from_nothing_to_all_bytes(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_PORTION_BYTES", 50_000)
    seen: list[tuple[str, int, int]] = []
    load_checkpoint(Load("tiny", str(tiny("llama"))), lambda *event: seen.append(event))
    total = (tiny("llama") / "model.safetensors").stat().st_size
    assert {(stage, of) for stage, _, of in seen} == {("weights", total)}
    done = [done for _, done, _ in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == total
    assert len(set(done)) > 4


# -- config ---------------------------------------------------------------------------------------------------------


def test_a_directory_without_config_says_what_lies_there(tmp_path: Path) -> None:
    refused(tmp_path, "malformed_config", "config.json", str(tmp_path), "empty")
    (tmp_path / "x.gguf").touch()
    refused(tmp_path, "malformed_config", "GGUF", "converted")


@pytest.mark.parametrize("text", ["", "{", "nonsense", '{"model_type": "llama",}', "\xff\xfe", "[" * 100_000])
def test_a_config_that_is_no_json_is_malformed(copy: Callable[..., Path], text: str) -> None:
    directory = copy()
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    refused(directory, "malformed_config", "config.json", "not JSON")


@pytest.mark.parametrize("text", ["[]", "null", "42", '"llama"', "[{}]"])
def test_a_config_that_is_no_object_is_malformed(copy: Callable[..., Path], text: str) -> None:
    directory = copy()
    (directory / "config.json").write_text(text)
    refused(directory, "malformed_config", "config.json", "expected an object")


def test_a_generation_config_that_is_no_object_is_malformed(copy: Callable[..., Path]) -> None:
    directory = copy()
    (directory / "generation_config.json").write_text("[2]")
    refused(directory, "malformed_config", "generation_config.json")


@pytest.mark.parametrize("model_type", [None, 42, 1.5, True, [], {}, ["llama"], ""])
def test_a_model_type_that_is_no_name_is_malformed(copy: Callable[..., Path], model_type: object) -> None:
    directory = copy()
    change_config(directory, model_type=model_type)
    refused(directory, "malformed_config", "'model_type' is", repr(model_type))


def test_an_empty_config_and_one_without_model_type_are_malformed(copy: Callable[..., Path]) -> None:
    directory = copy()
    change_config(directory, model_type=...)
    refused(directory, "malformed_config", "'model_type' is missing")
    (directory / "config.json").write_text("{}")
    refused(directory, "malformed_config", "'model_type' is missing")


@pytest.mark.parametrize(
    "model_type",
    [
        "no_such_model",
        "cache",
        "base",
        "switch_layers",
        "rope_utils",
        "activations",
        "../llama",
        "a.b",
        "os.path",
        "llama ",
        "模型",
    ],
)
def test_a_model_type_nobody_knows_or_a_helper_module_is_unsupported(copy: Callable[..., Path], model_type: str) -> None:
    directory = copy()
    change_config(directory, model_type=model_type)
    refused(directory, "unsupported_model_type", repr(model_type), "python -c")


def test_a_misspelt_model_type_is_told_its_neighbours(copy: Callable[..., Path]) -> None:
    directory = copy()
    change_config(directory, model_type="qwen_3")
    refused(directory, "unsupported_model_type", "Similar: ", "qwen3")


@pytest.mark.parametrize("architectures", [42, {"a": 1}, [1], [["LlamaForCausalLM"]], True])
def test_architectures_of_a_wrong_type_are_malformed(copy: Callable[..., Path], architectures: object) -> None:
    directory = copy()
    change_config(directory, architectures=architectures)
    refused(directory, "malformed_config", "'architectures'", "list of class names")


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", ["Whatever"]])
def test_architectures_may_be_absent_or_unknown(copy: Callable[..., Path], architectures: object) -> None:
    directory = copy()
    change_config(directory, architectures=architectures)
    assert load(directory).model_type == "llama"


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_field_is_named(copy: Callable[..., Path], field: str) -> None:
    directory = copy()
    change_config(directory, **{field: ...})
    refused(directory, "malformed_config", repr(field), "missing")


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "64"},
        {"num_attention_heads": 0, "head_dim": ...},
        {"num_hidden_layers": None},
        {"num_hidden_layers": -1.5},
        {"layer_types": ["sliding_attention", "sliding_attention"]},
        {"rope_scaling": {"rope_type": "no such"}},
        {"quantization": 4},
        {"quantization": {"bits": 4}},
        {"quantization_config": [1]},
        {"text_config": "x"},
    ],
    ids=str,
)
def test_a_field_of_a_wrong_kind_is_a_malformed_config(copy: Callable[..., Path], change: dict[str, Any]) -> None:
    directory = copy()
    change_config(directory, **change)
    refused(directory, "malformed_config", str(directory))


# -- foreign code ---------------------------------------------------------------------------------------------------


def test_code_of_the_checkpoint_is_refused_unless_trusted(copy: Callable[..., Path], tmp_path: Path) -> None:
    directory = copy()
    proof = tmp_path / "it ran"
    code = f"import pathlib\npathlib.Path({str(proof)!r}).touch()\nfrom mlx_lm.models.llama import Model, ModelArgs\n"
    (directory / "own_model.py").write_text(code)
    change_config(directory, model_file="own_model.py")
    refused(directory, "remote_code_refused", "own_model.py", "trust_remote_code=True")
    assert not proof.exists()
    assert load(directory, trust_remote_code=True).model_type == "llama"
    assert proof.exists()


@pytest.mark.parametrize("model_file", ["absent.py", 42, []])
def test_a_trusted_model_file_must_exist(copy: Callable[..., Path], model_file: object) -> None:
    directory = copy()
    change_config(directory, model_file=model_file)
    refused(directory, "malformed_config", "'model_file'", trust_remote_code=True)


def test_an_auto_map_that_mlx_lm_never_runs_does_not_hinder(copy: Callable[..., Path]) -> None:
    directory = copy()
    (directory / "modeling_x.py").write_text("raise SystemExit")
    change_config(directory, auto_map={"AutoModelForCausalLM": "modeling_x.Model"})
    assert load(directory).model_type == "llama"


# -- weights ----------------------------------------------------------------------------------------------------------


def rewrite_weights(directory: Path, change: Callable[[dict[str, mx.array]], Any]) -> None:
    file = directory / "model.safetensors"
    weights = dict(mx.load(str(file)))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})


def test_no_weight_files_at_all_names_what_could_be_converted(copy: Callable[..., Path]) -> None:
    directory = copy()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(directory, "missing_weights", "model*.safetensors", "pytorch_model.bin", "convert")


def test_missing_parameters_are_named(copy: Callable[..., Path]) -> None:
    directory = copy()
    rewrite_weights(directory, lambda weights: [weights.pop(name) for name in list(weights) if "layers.1" in name])
    refused(directory, "missing_weights", "9 parameters", "model.layers.1.", "and 5 more")


def test_extra_parameters_are_named(copy: Callable[..., Path]) -> None:
    directory = copy()
    rewrite_weights(directory, lambda weights: weights.update({"model.extra.weight": mx.zeros(3)}))
    refused(directory, "missing_weights", "1 parameters", "does not have", "model.extra.weight")


def test_weights_of_another_shape_are_named(copy: Callable[..., Path]) -> None:
    directory = copy()
    rewrite_weights(directory, lambda weights: weights.update({"model.norm.weight": mx.zeros(32)}))
    refused(directory, "missing_weights", "(32,)", "model.norm.weight")


def shard_of(directory: Path) -> tuple[Path, bytes]:
    file = directory / "model.safetensors"
    return file, file.read_bytes()


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, 4000, -100_000, -1])
def test_a_truncated_file_is_corrupt_with_its_sizes(copy: Callable[..., Path], kept: int) -> None:
    directory = copy()
    file, data = shard_of(directory)
    file.write_bytes(data[:kept])
    message = refused(directory, "corrupt_weights", "model.safetensors", str(len(data[:kept])))
    if kept < 0:
        assert f"expected {len(data)} bytes, found {len(data[:kept])}" in message


def with_header(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    return struct.pack("<Q", len(new)) + new + data[8 + length :]


NORM = "model.norm.weight"
NORM_BEFORE = "model.layers.1.input_layernorm.weight"
CORRUPTIONS: dict[str, Callable[[bytes], bytes]] = {
    "random bytes": lambda data: bytes(range(256)) * 20,
    "zeros": lambda data: bytes(len(data)),
    "header length beyond the file": lambda data: struct.pack("<Q", len(data)) + data[8:],
    "header length near 2**64": lambda data: struct.pack("<Q", (1 << 64) - 1) + data[8:],
    "header no JSON": lambda data: data[:8] + b"x" + data[9:],
    "header no UTF-8": lambda data: data[:8] + b"\xff" + data[9:],
    "header an array": lambda data: struct.pack("<Q", 2) + b"[]" + data,
    "trailing bytes": lambda data: data + b"0",
    "offsets beyond the end": lambda data: with_header(data, lambda h: h[NORM].update(data_offsets=[0, 1 << 40])),
    "offsets reversed": lambda data: with_header(data, lambda h: h[NORM].update(data_offsets=[256, 0])),
    "offsets negative": lambda data: with_header(data, lambda h: h[NORM].update(data_offsets=[-256, 0])),
    "two tensors in one place": lambda data: with_header(
        data, lambda h: h[NORM].update(data_offsets=h[NORM_BEFORE]["data_offsets"])
    ),
    "bytes between tensors": lambda data: with_header(data, lambda h: h.pop(NORM)),
    "offsets no numbers": lambda data: with_header(data, lambda h: h[NORM].update(data_offsets="ab")),
    "shape and offsets disagree": lambda data: with_header(data, lambda h: h[NORM].update(shape=[65])),
    "shape no list": lambda data: with_header(data, lambda h: h[NORM].update(shape=None)),
    "entry no object": lambda data: with_header(data, lambda h: h.update({NORM: 3})),
    "type unknown": lambda data: with_header(data, lambda h: h[NORM].update(dtype="F99")),
    "a Git LFS pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_file_is_named_before_mlx_sees_it(copy: Callable[..., Path], name: str) -> None:
    directory = copy()
    file, data = shard_of(directory)
    file.write_bytes(CORRUPTIONS[name](data))
    message = refused(directory, "corrupt_weights")
    if name != "type unknown":  # left to MLX, which may know more types than we do
        assert "model.safetensors" in message
        assert "fetch it again" in message


def test_a_directory_in_place_of_a_weight_file_is_corrupt(copy: Callable[..., Path]) -> None:
    directory = copy()
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()
    refused(directory, "corrupt_weights", "model.safetensors")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(copy: Callable[..., Path], name: str) -> None:
    directory = copy()
    (directory / name).unlink()
    os.mkfifo(directory / name)
    refused(directory, "malformed_config", name, "pipe")


def test_a_config_of_more_layers_than_there_are_tensors_is_refused_before_the_model_is_built(copy: Callable[..., Path]) -> None:
    directory = copy()
    change_config(directory, num_hidden_layers=10_000_000)
    refused(directory, "missing_weights", "num_hidden_layers", "10000000")


def split(directory: Path) -> list[Path]:
    """The checkpoint's weights in two files with an index, as large models have them."""
    weights = dict(mx.load(str(directory / "model.safetensors")))
    mx.eval(weights)
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        mx.save_safetensors(str(directory / file), {name: weights[name] for name in part})
    (directory / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, part in halves.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return [directory / file for file in halves]


def test_split_weights_load_and_an_absent_part_is_named(copy: Callable[..., Path]) -> None:
    directory = copy()
    parts = split(directory)
    assert load(directory).model_type == "llama"
    parts[1].unlink()
    refused(directory, "missing_weights", parts[1].name, "1 of the 2")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": []}}'])
def test_a_damaged_index_is_corrupt(copy: Callable[..., Path], text: str) -> None:
    directory = copy()
    split(directory)
    (directory / "model.safetensors.index.json").write_text(text)
    refused(directory, "corrupt_weights", "model.safetensors.index.json")


# -- identity -----------------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_the_contents_not_the_place(tiny: MakeTiny, copy: Callable[..., Path]) -> None:
    original = load(tiny("llama")).fingerprint
    directory = copy()
    os.utime(directory / "config.json", (0, 0))
    (directory / "README.md").write_text("hello")
    assert load(directory).fingerprint == original
    assert load(tiny("llama", seed=1)).fingerprint != original
    assert load(tiny("llama", chat_template=False)).fingerprint != original


CHANGES: dict[str, Callable[[Path], Any]] = {
    "another context": lambda d: change_config(d, max_position_embeddings=1024),
    "a template file": lambda d: (d / "chat_template.jinja").write_text("{{ messages }}"),
    "tokenizer settings": lambda d: (d / "tokenizer_config.json").write_text("{}"),
    "one tensor retrained a little": lambda d: rewrite_weights(d, lambda w: w.update({NORM: w[NORM] * 1.0001})),
    "the last matrix retrained": lambda d: rewrite_weights(d, lambda w: w.update({"lm_head.weight": w["lm_head.weight"] + 1e-6})),
    "two matrices exchanged": lambda d: rewrite_weights(d, exchange),
}


def exchange(weights: dict[str, mx.array]) -> None:
    first, second = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    weights[first], weights[second] = weights[second], weights[first]


@pytest.mark.parametrize("name", CHANGES)
def test_the_fingerprint_changes_when_the_model_does(copy: Callable[..., Path], name: str) -> None:
    directory = copy()
    before = load(directory).fingerprint
    CHANGES[name](directory)
    assert load(directory).fingerprint != before


# -- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/no/such/place", "a\0b", "x" * 5000, ""])
def test_a_path_to_nowhere_is_not_found(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reason = "not_found" if path else "malformed_config"  # "" is the current directory, here an empty one
    refused(path, reason)


def test_a_file_in_place_of_a_directory_is_not_found(tiny: MakeTiny) -> None:
    refused(tiny("llama") / "config.json", "not_found", "is a file")


def answer(status: int) -> Any:
    """As much of an HTTP response as the hub library's errors look at."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


HUB_FAILURES = {
    "unknown": (hub_errors.RepositoryNotFoundError("404", response=answer(404)), "check the name"),
    "gated": (hub_errors.GatedRepoError("403", response=answer(403)), "accept its terms"),
    "revision": (hub_errors.RevisionNotFoundError("404", response=answer(404)), "this revision"),
    "offline": (hub_errors.LocalEntryNotFoundError("not cached"), "go online"),
    "no network": (ConnectionError("refused"), "go online"),
    "server": (hub_errors.HfHubHTTPError("500", response=answer(500)), "try again"),
    "disk": (OSError(28, "No space left on device"), "space"),
    "anything": (RuntimeError("odd"), "try again"),
}


@pytest.mark.parametrize("name", HUB_FAILURES)
def test_each_failure_of_the_hub_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, advice = HUB_FAILURES[name]

    def fail(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refused("owner/name", "not_found", "'owner/name'", advice, is_hub_id=True)


def test_an_id_the_hub_could_never_have_and_an_uncached_one_offline_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused("not an id!", "not_found", "owner/name", is_hub_id=True)
    refused("owner/surely-not-cached", "not_found", "go online", is_hub_id=True)


def test_a_hub_id_is_fetched_with_progress_on_the_callers_thread(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetch(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        bar = options["tqdm_class"](desc="Reconstructing", total=0, initial=0, unit="B", unit_scale=True, name="x")
        files = options["tqdm_class"](range(2), desc="Fetching 2 files", total=2)
        bar.total += 1000
        bar.update(400)
        bar.update(600)
        assert list(files) == [0, 1]
        bar.close()
        return str(tiny("llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    seen: list[tuple[Any, ...]] = []
    loaded = load_checkpoint(
        Load("tiny", "owner/name", is_hub_id=True, revision="v2"), lambda *event: seen.append((threading.get_ident(), *event))
    )
    assert loaded.model_type == "llama"
    assert (asked["repository"], asked["revision"]) == ("owner/name", "v2")
    assert "model*.safetensors" in asked["allow_patterns"]
    assert {thread for thread, *_ in seen} == {threading.get_ident()}
    assert [event for _, *event in seen if event[0] == "download"][-1] == ["download", 1000, 1000]


@pytest.mark.parametrize(
    ("installed", "fits"), [("0.31.9", False), ("0.32.0", True), ("0.32.2", True), ("0.33.0", False), ("1.0", False)]
)
def test_an_untested_mlx_lm_is_refused_with_the_command_that_mends_it(
    installed: str, fits: bool, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_config, "version", lambda name: installed)
    if fits:
        assert load(tiny("llama")).model_type == "llama"
    else:
        refused(tiny("llama"), "error", installed, "pip install 'mlx-lm>=0.32,<0.33'")
