"""Streamed text equals the batch decode, never shows half a character, and tokenizers that are wrong say so."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from runtime.engine import detokenizer as engine_detokenizer
from runtime.engine.detokenizer import TableDetokenizer, WindowDetokenizer, detokenizer_factory
from runtime.engine.engine import Detokenizer, LoadError
from runtime.engine.tokenizer import HfTokenizer, load_tokenizer
from tests.support import tiny as support
from tests.support.tiny import MakeTiny, make_tiny

REPLACEMENT = "\ufffd"
AWKWARD_BYTES = [0x41, 0x80, 0xBF, 0xC3, 0xA9, 0xE6, 0xBC, 0xA2, 0xF0, 0x9F, 0x8E, 0xAD, 0xED, 0xFF]
"""Beginnings, middles and ends of characters, and bytes that occur in none."""
SAMPLE = "Hello, Wörld! 漢字かな 🎭👩‍👩‍👧 naïve “quoted”\n\ttabs  two  spaces \r\n e\u0301 \u202e end "


def load(directory: Path) -> HfTokenizer:
    return load_tokenizer(directory, trust_remote_code=False)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return load(make_tiny(tmp_path_factory.mktemp("bytes"), "llama"))


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


# -- kinds of tokenizer -------------------------------------------------------------------------------------------


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)


def sentence_piece(*, strip: bool) -> PreTrainedTokenizerFast:
    """Letters, a few words, and bytes for everything else."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁Wör", "ld", *"abcdefghijklmnopqrstuvwxyz", "漢"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return wrapped(backend)


def metaspace() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "▁", "▁the", "▁a", "b", "c", "漢", "🎭", "▁🎉", "."]
    backend = Tokenizer(models.Unigram([(piece, -float(index)) for index, piece in enumerate(pieces)], unk_id=0))
    backend.decoder = decoders.Metaspace()
    return wrapped(backend)


def word_piece() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", "the", "un", "##know", "##n", "word", "##s", ".", "漢", "##字"]
    backend = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return wrapped(backend)


def byte_level_with_a_twist() -> PreTrainedTokenizerFast:
    """Decodes through two steps, so that no table is known for it."""
    backend = Tokenizer(models.BPE(vocab={c: b for b, c in enumerate(support._byte_characters())}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return wrapped(backend)


def sentence_piece_with_a_twist() -> PreTrainedTokenizerFast:
    """Byte fallback whose decoder is none of the known ones."""
    tokenizer = sentence_piece(strip=False)
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)


TWISTED = byte_level_with_a_twist()

KINDS: dict[str, tuple[Callable[[], PreTrainedTokenizerFast], type]] = {
    "sentence piece": (lambda: sentence_piece(strip=False), TableDetokenizer),
    "sentence piece, first space stripped": (lambda: sentence_piece(strip=True), TableDetokenizer),
    "metaspace": (metaspace, WindowDetokenizer),
    "word piece": (word_piece, WindowDetokenizer),
    "byte level in two steps": (byte_level_with_a_twist, WindowDetokenizer),
    "sentence piece in another order": (sentence_piece_with_a_twist, WindowDetokenizer),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[PreTrainedTokenizerFast, Callable[[], Detokenizer], type]:
    make, expected = KINDS[request.param]
    tokenizer = make()
    return tokenizer, detokenizer_factory(tokenizer), expected


def test_each_kind_streams_what_it_decodes_wherever_it_is_cut(kind) -> None:
    tokenizer, make, expected = kind
    assert type(make()) is expected
    choose = random.Random(5)
    # Ids that decode to whole characters, and whole characters in bytes where the vocabulary has bytes.
    units = [
        [token] for token in tokenizer.get_vocab().values() if REPLACEMENT not in engine_detokenizer.decode(tokenizer, [token])
    ]
    byte_ids = [tokenizer.get_vocab().get(f"<0x{byte:02X}>") for byte in range(256)]
    if expected is WindowDetokenizer and "Ġ" in tokenizer.get_vocab():
        byte_ids = list(range(256))
    if byte_ids[0] is not None:
        units += [[byte_ids[byte] for byte in character.encode()] for character in "é漢🎭𝄞ß\u0301"]
    for _ in range(150):
        ids = [token for unit in choose.choices(units, k=choose.randrange(30)) for token in unit]
        detokenizer = make()
        pieces = [detokenizer.push(token) for token in ids]
        text = engine_detokenizer.decode(tokenizer, ids)
        assert "".join(pieces) == text
        assert REPLACEMENT not in text
        assert detokenizer.flush() == ""
        assert stream(detokenizer, ids) == text  # as good as new after a flush


def test_window_and_table_agree_where_both_work(byte_tokenizer: HfTokenizer) -> None:
    ids = byte_tokenizer.encode(SAMPLE * 5, add_special_tokens=True)
    window = WindowDetokenizer(
        byte_tokenizer.decode, frozenset(range(support.VOCABULARY_SIZE)) - set(support.SPECIAL_TOKENS.values())
    )
    table = byte_tokenizer.detokenizer()
    for token in ids:
        assert window.push(token) == table.push(token)
    assert window.flush() == table.flush() == ""


@settings(deadline=None)
@given(st.lists(st.sampled_from(AWKWARD_BYTES), max_size=40) | st.lists(st.integers(0, 255), max_size=60))
@example([0xF0, 0x9F, 0x8E] * 8 + list("🎭".encode()))
@example([*"漢é漢".encode(), 0x80, 0xE6, *([0xF0, 0x9F] * 5), *"漢".encode()])
def test_the_window_gives_up_on_invalid_bytes_and_loses_none_of_the_valid(ids: list[int]) -> None:
    window = WindowDetokenizer(partial(engine_detokenizer.decode, TWISTED), frozenset(range(256)))
    text, longest = "", 0
    for token in ids:
        text += window.push(token)
        longest = max(longest, len(window._window))
    assert text + window.flush() == bytes(ids).decode("utf-8", "replace")
    assert longest <= 3 * engine_detokenizer._PATIENCE_TOKENS


def test_the_windows_cost_is_bounded_on_tokens_that_never_show_anything() -> None:
    lengths = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return ""

    window = WindowDetokenizer(decode, frozenset([1]))
    for _ in range(500):
        assert window.push(1) == ""
    assert max(lengths) <= 3 * engine_detokenizer._PATIENCE_TOKENS


# -- bytes to characters --------------------------------------------------------------------------------------------


def test_every_character_of_unicode_appears_with_its_last_byte(byte_tokenizer: HfTokenizer) -> None:
    detokenizer = byte_tokenizer.detokenizer()
    push = detokenizer.push
    for first, last in ((0, 0xD800), (0xE000, 0x110000)):
        for code in range(first, last):
            *begin, end = chr(code).encode()
            for byte in begin:
                if push(byte):
                    pytest.fail(f"half of U+{code:04X} was shown")
            if push(end) != chr(code):
                pytest.fail(f"U+{code:04X} did not appear")


@settings(deadline=None)
@given(st.text(max_size=40), st.data())
def test_a_cut_anywhere_shows_the_whole_characters_before_it(byte_tokenizer: HfTokenizer, text: str, data: st.DataObject) -> None:
    ids = list(text.encode())
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = byte_tokenizer.detokenizer()
    shown = "".join(map(detokenizer.push, ids[:cut]))
    assert shown == bytes(ids[:cut]).decode("utf-8", "ignore")
    assert shown + detokenizer.flush() == byte_tokenizer.decode(ids[:cut])


@settings(deadline=None)
@given(st.lists(st.integers(0, support.VOCABULARY_SIZE + 5), max_size=60))
def test_any_ids_at_all_stream_to_their_batch_decode(byte_tokenizer: HfTokenizer, ids: list[int]) -> None:
    assert stream(byte_tokenizer.detokenizer(), ids) == byte_tokenizer.decode(ids)


@settings(deadline=None)
@given(st.lists(st.sampled_from(AWKWARD_BYTES), max_size=12))
def test_invalid_bytes_become_replacements_exactly_as_in_the_batch_decode(byte_tokenizer: HfTokenizer, ids: list[int]) -> None:
    text = stream(byte_tokenizer.detokenizer(), ids)
    assert text == byte_tokenizer.decode(ids) == bytes(ids).decode("utf-8", "replace")


def test_byte_fallback_keeps_valid_characters_beside_invalid_bytes() -> None:
    tokenizer = sentence_piece(strip=False)
    ids = [tokenizer.get_vocab()[f"<0x{byte:02X}>"] for byte in "é".encode() + b"\xe6\xbc"]
    assert stream(detokenizer_factory(tokenizer)(), ids) == "é" + 2 * REPLACEMENT
    assert stream(detokenizer_factory(tokenizer)(), ids[2:]) == engine_detokenizer.decode(tokenizer, ids[2:]) == 2 * REPLACEMENT


def test_special_tokens_are_left_out_and_tool_call_markup_is_shown(byte_tokenizer: HfTokenizer) -> None:
    ids = byte_tokenizer.encode("a<|im_end|>b<tool_call>c</tool_call></s>", add_special_tokens=True)
    assert ids[0] == support.BOS_ID
    assert stream(byte_tokenizer.detokenizer(), ids) == byte_tokenizer.decode(ids) == "ab<tool_call>c</tool_call>"
    # A special token inside a character ends nothing: the bytes around it still belong together, as in the batch decode.
    ids = [0xC3, support.PAD_ID, 0xA9]
    assert stream(byte_tokenizer.detokenizer(), ids) == byte_tokenizer.decode(ids) == "é"


def test_detokenizers_do_not_share_state(byte_tokenizer: HfTokenizer) -> None:
    one, two = byte_tokenizer.detokenizer(), byte_tokenizer.detokenizer()
    assert one.push(0xC3) == two.push(0xE6) == ""
    assert one.push(0xA9) == "é"
    assert two.push(0xBC) == ""
    assert two.push(0xA2) == "漢"


# -- the tokenizer itself ---------------------------------------------------------------------------------------------


def test_encoding_and_rendering_on_another_thread_disturb_no_detokenizer() -> None:
    """The window kind asks the tokenizer at every token, and encoding with and without truncation changes its state meanwhile."""
    tokenizer = byte_level_with_a_twist()
    make = detokenizer_factory(tokenizer)
    stop = threading.Event()
    errors: list[BaseException] = []

    def encode() -> None:
        while not stop.is_set():
            try:
                tokenizer.encode("abc " * 50, truncation=True, max_length=20)
                tokenizer.encode("abc " * 50)
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=encode)
    thread.start()
    try:
        texts = {stream(make(), list(SAMPLE.encode())) for _ in range(30)}
    finally:
        stop.set()
        thread.join(30)
    assert texts == {SAMPLE}
    assert errors == []


def test_it_encodes_renders_and_knows_its_specials(byte_tokenizer: HfTokenizer) -> None:
    assert byte_tokenizer.encode("é", add_special_tokens=False) == [0xC3, 0xA9]
    assert byte_tokenizer.encode("é", add_special_tokens=True) == [support.BOS_ID, 0xC3, 0xA9]
    messages = [{"role": "user", "content": "Hi"}]
    prompt = byte_tokenizer.render(messages, options={"tools": None}, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert byte_tokenizer.special_token_text("bos_token") == "<s>"
    assert byte_tokenizer.special_token_text("cls_token") is None
    assert byte_tokenizer.special_token_text("<|im_start|>") == "<|im_start|>"
    assert byte_tokenizer.special_token_text("<|nothing|>") is None
    assert byte_tokenizer.special_token_text("encode") is None
    assert byte_tokenizer.vocabulary_size == support.VOCABULARY_SIZE
    assert byte_tokenizer.has_chat_template


def test_the_vocabulary_digest_is_of_tokens_and_ids_alone(tiny: MakeTiny, tmp_path: Path) -> None:
    digest = load(tiny("llama")).vocabulary_digest
    assert len(digest) == 64
    assert load(tiny("qwen3", chat_template=False)).vocabulary_digest == digest
    directory = make_tiny(tmp_path / "x", "llama")
    text = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(text.replace("</tool_call>", "</other>"))
    assert load(directory).vocabulary_digest != digest


@pytest.fixture
def copy(tiny: MakeTiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("llama"), tmp_path / "Токенизатор 漢 [x]"))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, None, {7, support.EOS_ID}),
        ([7, 8], None, {7, 8, support.EOS_ID}),
        (7, {"eos_token_id": [9]}, {7, 9, support.EOS_ID}),
        (None, {"eos_token_id": 9}, {9, support.EOS_ID}),
        (None, {}, {support.EOS_ID}),
        (0, None, {0, support.EOS_ID}),
    ],
)
def test_the_end_tokens_are_all_that_any_file_names(copy: Path, config: Any, generation: Any, expected: set[int]) -> None:
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(values | {"eos_token_id": config}))
    (copy / "generation_config.json").unlink()
    if generation is not None:
        (copy / "generation_config.json").write_text(json.dumps(generation))
    assert load(copy).eos_ids == expected


@pytest.mark.parametrize("bad", ["</s>", [1, "x"], -1, 2**32, 2**70, True, {"a": 1}, 1.5])
def test_an_end_token_that_is_no_id_is_a_malformed_config(copy: Path, bad: object) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
    with pytest.raises(LoadError, match=r"generation_config\.json.*eos_token_id") as caught:
        load(copy)
    assert caught.value.reason == "malformed_config"


def test_a_template_of_a_file_of_its_own_is_found(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert load(copy).render([{"role": "user", "content": "Hi"}], options={}, add_generation_prompt=True) == "[Hi]"


def test_without_a_template_it_says_so(tiny: MakeTiny) -> None:
    assert not load(tiny("llama", chat_template=False)).has_chat_template


def refused(directory: Path, reason: str, *named: str) -> None:
    with pytest.raises(LoadError) as caught:
        load(directory)
    assert caught.value.reason == reason, str(caught.value)
    for name in named:
        assert name in str(caught.value)


def test_a_directory_without_tokenizer_is_told_so(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    refused(copy, "tokenizer", str(copy), "tokenizer.json")


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"model": {"type": "none"}}', "\x00\x01"])
def test_a_damaged_tokenizer_file_is_a_tokenizer_error(copy: Path, text: str) -> None:
    (copy / "tokenizer.json").write_text(text)
    refused(copy, "tokenizer", str(copy))


def test_a_tokenizer_with_code_of_its_own_is_refused_and_the_code_does_not_run(copy: Path, tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    (copy / "own_tokenizer.py").write_text(f"import pathlib\npathlib.Path({str(proof)!r}).touch()\nclass OwnTokenizer: pass\n")
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own_tokenizer.OwnTokenizer", None]}}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    refused(copy, "remote_code_refused", "trust_remote_code=True")
    assert not proof.exists()
