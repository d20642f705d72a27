"""A segment on the disk: what was written comes back, or nothing does."""

from __future__ import annotations

import dataclasses
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.prefix import container, publish, restore, segment
from runtime.prefix.hashing import BLOCK_TOKENS, shared_scope
from runtime.prefix.layout import TOKENS, Dense, Field, Layout, Recurrent, Sliding, TensorSpec
from runtime.prefix.publish import Draft, Published, Rejected
from runtime.prefix.restore import Miss, Segment
from tests.unit.prefix.model import (
    ALICE,
    BOB,
    DENSE_LAYOUT,
    KEYS,
    MIXED_LAYOUT,
    STATE_LAYOUT,
    chain_of,
    contents,
    draft,
    files,
    published,
    tokens,
    wanted,
    written,
)

B = BLOCK_TOKENS
PROMPT = tokens(6 * B)


def read(root: Path, of: Draft, **changes: Any) -> Segment:
    result = restore.read(root, wanted(of, **changes))
    assert isinstance(result, Segment), result
    return result


def head_of(data: bytes) -> bytes:
    return data[: 8 + int.from_bytes(data[:8], "little")]


def miss(root: Path, of: Draft, **changes: Any) -> Miss:
    result = restore.read(root, wanted(of, **changes))
    assert isinstance(result, Miss)
    return result


# -- what is sound ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [DENSE_LAYOUT, MIXED_LAYOUT, STATE_LAYOUT])
@pytest.mark.parametrize(("start", "end"), [(0, B), (0, 3 * B), (B, 2 * B), (2 * B, 5 * B)])
def test_what_was_published_is_read_bit_for_bit(tmp_path: Path, layout: Layout, start: int, end: int) -> None:
    original = draft(PROMPT, start, end, layout=layout)
    result = published(tmp_path, original)
    assert result.is_new
    assert result.path.stat().st_size == result.num_bytes
    assert contents(read(tmp_path, original)) == written(original)
    assert {name: spec for name, (spec, _) in read(tmp_path, original).tensors.items()} == layout.tensors(start, end)


def test_the_files_are_private_and_nothing_temporary_is_left(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "cache"
    path = published(root, draft(PROMPT, 0, B)).path
    assert files(root) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for directory in (*path.parents[:4], root / "tmp"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert path.stat().st_nlink == 1


def test_publishing_again_leaves_the_file_that_is_there(tmp_path: Path) -> None:
    first = published(tmp_path, draft(PROMPT, 0, 2 * B))
    inode = first.path.stat().st_ino
    again = published(tmp_path, draft(PROMPT, 0, 2 * B))
    other_cut = published(tmp_path, draft(PROMPT, B, 2 * B))  # ends at the same block, hence has the same name
    assert not again.is_new
    assert not other_cut.is_new
    assert first.path.stat().st_ino == inode


def test_a_safetensors_reader_of_others_can_open_it(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    original = draft(PROMPT, 0, B)
    arrays = mx.load(str(published(tmp_path, original).path))
    assert {name: bytes(memoryview(array.view(mx.uint8))) for name, array in arrays.items()} == written(original)
    assert {name: tuple(array.shape) for name, array in arrays.items()} == {
        name: spec.shape for name, (spec, _) in original.tensors.items()
    }


def test_tokens_are_nowhere_in_the_file(tmp_path: Path) -> None:
    data = published(tmp_path, draft(PROMPT, 0, B)).path.read_bytes()
    encoded = PROMPT.to_bytes()
    assert not any(encoded[place : place + 12] in data for place in range(0, 4 * B - 12, 4))
    header, _ = segment.decode_head(head_of(data))
    assert ALICE.key.hex().encode() not in data
    assert ALICE.secret(header.fingerprint).hex().encode() not in data


def test_two_tenants_files_of_one_prompt_have_no_digest_in_common(tmp_path: Path) -> None:
    first = published(tmp_path, draft(PROMPT, B, 2 * B, scope=ALICE)).path.read_bytes()
    original = draft(PROMPT, B, 2 * B, scope=ALICE)
    second = published(tmp_path, draft(PROMPT, B, 2 * B, scope=BOB, tensors=original.tensors)).path.read_bytes()
    one, other = (segment.decode_head(head_of(data))[0] for data in (first, second))
    for said in ("owner", "parent"):
        assert getattr(one, said) != getattr(other, said)
    assert not set(one.blocks) & set(other.blocks)
    assert not set(one.checksums.values()) & set(other.checksums.values())


def test_a_part_of_a_segment_can_be_read_without_its_checkpoint(tmp_path: Path) -> None:
    original = draft(PROMPT, 0, 3 * B)
    published(tmp_path, original)
    part = read(tmp_path, original, start=B, end=2 * B, with_checkpoint=False)
    assert set(part.tensors) == {"0.keys", "0.values"}
    assert (part.start, part.end) == (0, 3 * B)
    assert part.num_bytes < read(tmp_path, original).num_bytes


def test_a_prompt_that_leaves_in_the_middle_of_a_segment_reads_its_beginning(tmp_path: Path) -> None:
    original = draft(PROMPT, 0, 3 * B, layout=DENSE_LAYOUT)
    published(tmp_path, original)
    fork = chain_of(type(PROMPT)([*PROMPT[: 2 * B], *tokens(B, seed=9)]), layout=DENSE_LAYOUT)
    assert contents(read(tmp_path, original, chain=fork, end=2 * B, with_checkpoint=False)) == written(original)
    exact = read(tmp_path, original, chain=fork, end=2 * B - 1, with_checkpoint=False)  # one token left to compute
    assert contents(exact) == written(original)
    assert miss(tmp_path, original, chain=fork, with_checkpoint=False).reason == "tokens"


def test_every_tensor_is_aligned_to_its_items(tmp_path: Path) -> None:
    original = draft(PROMPT, 0, B)
    published(tmp_path, original)
    for with_checkpoint in (True, False):
        for spec, view in read(tmp_path, original, with_checkpoint=with_checkpoint).tensors.values():
            assert view.readonly
            view.cast({"BF16": "H", "F32": "I", "U8": "B"}[spec.dtype])
    _, parsed = segment.decode_head(head_of(published(tmp_path, original).path.read_bytes()))
    sizes = [span.begin for span in parsed.spans.values() if span.spec.dtype == "F32"]
    assert sizes == [0]


def test_what_was_read_stays_whatever_becomes_of_the_file(tmp_path: Path) -> None:
    original = draft(PROMPT, 0, B)
    path = published(tmp_path, original).path
    held = read(tmp_path, original)
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
        file.truncate(10)  # under a mapping, the next access would be a SIGBUS
    path.unlink()
    assert contents(held) == written(original)


# -- what is not ------------------------------------------------------------------------------------------


def test_an_absent_file_is_a_miss(tmp_path: Path) -> None:
    assert miss(tmp_path, draft(PROMPT, 0, B)).reason == "absent"
    (tmp_path / "file").touch()
    assert miss(tmp_path / "file", draft(PROMPT, 0, B)).reason == "absent"


def test_a_flipped_bit_anywhere_is_a_miss_and_the_file_goes(tmp_path: Path) -> None:
    original = draft(PROMPT, B, 2 * B)
    path = published(tmp_path, original).path
    sound = path.read_bytes()
    head_bytes = len(head_of(sound))
    generator = random.Random(1)
    places = {
        *range(8),
        *range(8, head_bytes, 7),
        *range(head_bytes - 8, head_bytes),
        *range(head_bytes, len(sound), 97),
        len(sound) - 1,
    }
    reasons = set()
    for place in sorted(places):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        found = miss(tmp_path, original)
        assert found.is_removed, (place, found)
        assert not path.exists()
        reasons.add(found.reason)
        if place >= head_bytes:
            assert found.reason == "checksum"
    assert {"malformed", "seal", "checksum"} <= reasons


def test_a_flipped_bit_never_reaches_a_reader_that_skips_the_checkpoint(tmp_path: Path) -> None:
    original = draft(PROMPT, B, 2 * B)
    path = published(tmp_path, original).path
    sound = path.read_bytes()
    dense = {name: data for name, data in written(original).items() if name.startswith("0.")}
    for place in range(0, len(sound), 131):
        damaged = bytearray(sound)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        result = restore.read(tmp_path, wanted(original, with_checkpoint=False))
        assert isinstance(result, Miss) or contents(result) == dense


def test_a_file_cut_or_grown_at_any_boundary_is_a_miss_and_goes(tmp_path: Path) -> None:
    original = draft(PROMPT, 0, B)
    path = published(tmp_path, original).path
    sound = path.read_bytes()
    head_bytes = len(head_of(sound))
    _, parsed = segment.decode_head(head_of(sound))
    boundaries = {0, 1, 7, 8, 9, head_bytes, len(sound)} | {head_bytes + span.end for span in parsed.spans.values()}
    for place in sorted({near for boundary in boundaries for near in (boundary - 1, boundary, boundary + 1)}):
        if place < 0 or place == len(sound):
            continue
        path.write_bytes((sound + b"\0")[:place])
        found = miss(tmp_path, original)
        assert found.is_removed
        assert found.reason == ("malformed" if place < head_bytes else "size")


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 8, b"\xff" * 64, b"\2\0\0\0\0\0\0\0{}", b"\1\0\0\0\0\0\0\0[", b"version https://git-lfs"]
)
def test_other_files_are_malformed(tmp_path: Path, data: bytes) -> None:
    original = draft(PROMPT, 0, B)
    published(tmp_path, original).path.write_bytes(data)
    assert miss(tmp_path, original).reason == "malformed"


def test_a_deeply_nested_header_is_malformed(tmp_path: Path) -> None:
    header = b'{"a":' + b"[" * 200_000
    original = draft(PROMPT, 0, B)
    published(tmp_path, original).path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert miss(tmp_path, original).reason == "malformed"


def _reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a file's description as a faulty writer that knows the secret would have."""
    data = path.read_bytes()
    header, parsed = segment.decode_head(head_of(data))
    said = msgspec.json.decode(parsed.metadata["segment"])
    change(said)
    key = segment.seal_key(ALICE.secret(header.fingerprint))
    metadata = {**parsed.metadata, "segment": msgspec.json.encode(said).decode()}
    head = container.build(metadata, {name: span.spec for name, span in parsed.spans.items()}, key)
    path.write_bytes(head + data[len(head_of(data)) :])


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda said: said.update(values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set(version=2), "format"),
        (_set(block_tokens=128), "format"),
        (_set(fingerprint="0" * 64), "fingerprint"),
        (_set(parent="00" * 32), "parent"),
        (_set(blocks=["00" * 32, chain_of(PROMPT)[2].hex()]), "tokens"),
        (_set(blocks=[chain_of(PROMPT)[1].hex(), "00" * 32]), "name"),
        (_set(layout=msgspec.to_builtins(DENSE_LAYOUT)), "layout"),
        (_set(checksums={}), "checksum"),
        (_set(start=0, parent="", blocks=[block.hex() for block in chain_of(PROMPT)[:3]]), "layout"),
        (_set(start=1), "malformed"),
        (_set(end=B), "malformed"),
        (_set(parent=""), "malformed"),
        (_set(parent="no hash"), "malformed"),
        (_set(blocks=[]), "malformed"),
        (_set(surprise=1), "malformed"),
        (_set(layout=None), "malformed"),
    ],
)
def test_a_description_that_does_not_fit_is_a_miss_with_its_reason(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    original = draft(PROMPT, B, 3 * B)
    path = published(tmp_path, original).path
    _reseal(path, lambda said: None)
    assert contents(read(tmp_path, original)) == written(original)
    _reseal(path, change)
    found = miss(tmp_path, original)
    assert (found.reason, found.is_removed, path.exists()) == (reason, True, False)


def test_a_file_under_another_name_or_secret_is_a_miss(tmp_path: Path) -> None:
    original, other = draft(PROMPT, 0, B), draft(tokens(B, seed=5), 0, B)
    path, taken = published(tmp_path, original).path, published(tmp_path, other).path
    os.replace(path, taken)
    assert miss(tmp_path, other).reason == "name"
    published(tmp_path, original)
    assert miss(tmp_path, original, secret=BOB.secret(original.fingerprint)).reason == "seal"


def test_a_sound_file_cut_elsewhere_is_a_miss_but_stays(tmp_path: Path) -> None:
    original = draft(PROMPT, B, 3 * B)
    path = published(tmp_path, original).path
    assert miss(tmp_path, original, start=0).reason == "range"
    assert miss(tmp_path, original, end=2 * B).reason == "range"  # its checkpoint is valid at its end only
    assert miss(tmp_path, original, chain=original.chain[:2], with_checkpoint=False).reason == "range"
    assert path.exists()
    assert contents(read(tmp_path, original, start=2 * B)) == written(original)


@pytest.mark.parametrize("put", [lambda path: path.mkdir(), os.mkfifo, lambda path: path.symlink_to("/etc/passwd")])
def test_what_is_no_file_is_a_miss_at_once(tmp_path: Path, put: Callable[[Path], None]) -> None:
    original = draft(PROMPT, 0, B)
    path = published(tmp_path, original).path
    path.unlink()
    put(path)
    assert miss(tmp_path, original).reason == "unreadable"


# -- what cannot be published -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": {}},
        {"start": 1},
        {"end": 8 * B},
        {"start": B},
        {"layout": DENSE_LAYOUT},
        {"tensors": {"0.keys": (TensorSpec("BF16", (2, B, 4)), b"short")}},
    ],
)
def test_tensors_that_make_no_segment_are_rejected(tmp_path: Path, changes: dict[str, Any]) -> None:
    result = publish.publish(tmp_path, dataclasses.replace(draft(PROMPT, 0, B), **changes))
    assert isinstance(result, Rejected)
    assert result.reason == "contents"
    assert files(tmp_path) == []


def test_buffers_that_are_too_long_or_have_holes_are_rejected(tmp_path: Path) -> None:
    original = draft(PROMPT, 0, B)
    spec, data = original.tensors["0.keys"]
    for wrong in (data + b"\0", memoryview(data * 2)[::2]):  # slack behind the true length would be other people's tokens
        result = publish.publish(tmp_path, draft(PROMPT, 0, B, tensors={**original.tensors, "0.keys": (spec, wrong)}))
        assert isinstance(result, Rejected)
        assert result.reason == "contents"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Field("a", "F12", (2,)),
        lambda: Field("a", "F32", (0,)),
        lambda: Field("a", "F32", (TOKENS, TOKENS)),
        lambda: Dense((Field("a", "F32", (2,)),)),
        lambda: Sliding((KEYS,), 0),
        lambda: Recurrent((KEYS,)),
        lambda: Layout((Dense((KEYS, KEYS)),)),
        lambda: Layout((Dense(()),)),
    ],
)
def test_a_layout_that_makes_no_sense_cannot_be_made(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"field|layer"):
        make()


def test_the_shared_scope_works_like_any_other(tmp_path: Path) -> None:
    original = draft(PROMPT, 0, B, scope=shared_scope())
    assert isinstance(publish.publish(tmp_path, original), Published)
    assert contents(read(tmp_path, original)) == written(original)
    assert miss(tmp_path, draft(PROMPT, 0, B, scope=ALICE)).reason == "absent"


@pytest.mark.parametrize("layout", [DENSE_LAYOUT, MIXED_LAYOUT, STATE_LAYOUT])
def test_a_header_takes_hardly_less_than_was_foretold_and_never_more(layout: Layout, tmp_path: Path) -> None:
    head_bytes, block_head_bytes = segment.most_head_bytes(layout)
    prompt = tokens(70 * B)
    for start, end in [(0, B), (0, 2 * B), (B, 2 * B), (0, 64 * B), (3 * B, 70 * B)]:
        made = published(tmp_path, draft(prompt, start, end, layout=layout))
        foretold = head_bytes + (end - start) // B * block_head_bytes
        assert 0 <= foretold - len(head_of(made.path.read_bytes())) <= 512
