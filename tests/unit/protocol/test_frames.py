from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.protocol import frames as wire
from runtime.protocol.commands import Grant, Inspect, Load, Prefill, PrefillRow, Prepare, TextPrompt, TokenPrompt
from runtime.protocol.events import Failed, Hello, Prepared, StepDone, StepRow
from runtime.protocol.frames import FrameError, decode_command, decode_event, encode
from runtime.protocol.ids import RequestId, SequenceId
from runtime.protocol.tokens import TokenIds
from tests.unit.protocol.strategies import COMMAND_TYPES, EVENT_TYPES, values_of

Decode = Callable[[Sequence[bytes]], object]
LONG = TokenIds(range(1000))


def prefill_of(*runs: TokenIds) -> Prefill:
    return Prefill(tuple(PrefillRow(SequenceId(i), run, 1, 2, 3) for i, run in enumerate(runs)))


def kind_of(decode: Decode, frames: Sequence[bytes]) -> str:
    with pytest.raises(FrameError) as caught:
        decode(frames)
    return caught.value.kind


@pytest.mark.parametrize("kind", [*COMMAND_TYPES, *EVENT_TYPES], ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: type) -> None:
    decode: Decode = decode_command if kind in COMMAND_TYPES else decode_event

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(values_of(kind))
    def round_trip(message: object) -> None:
        frames = encode(message)  # type: ignore[arg-type]
        assert decode(frames) == message
        assert all(len(frame) > 4 * wire.MAX_INLINE_IDS for frame in frames[1:])

    round_trip()


def test_short_runs_of_ids_stand_in_the_message_and_long_ones_beside_it() -> None:
    short, long = TokenIds(range(wire.MAX_INLINE_IDS)), TokenIds(range(wire.MAX_INLINE_IDS + 1))
    frames = encode(prefill_of(long, short, LONG))
    assert frames[1:] == [long.to_bytes(), LONG.to_bytes()]
    assert decode_command(frames) == prefill_of(long, short, LONG)


def test_the_largest_id_survives_in_both_forms() -> None:
    largest = 2**32 - 1
    message = prefill_of(TokenIds([largest]), TokenIds([largest] * 300))
    assert decode_command(encode(message)) == message


def test_buffers_may_come_in_any_order_as_long_as_each_is_named_once() -> None:
    one, two = TokenIds(range(300)), TokenIds(range(500))
    frames = encode(prefill_of(one, two))
    before, between, after = re.split(rb"\xd6T[\1\2]\0\0\0", frames[0])
    swapped = [before + b"\xd6T\2\0\0\0" + between + b"\xd6T\1\0\0\0" + after, frames[2], frames[1]]
    assert decode_command(swapped) == prefill_of(one, two)


@pytest.mark.parametrize("decode", [decode_command, decode_event])
@pytest.mark.parametrize("frames", [[], [b""], [b"", b"abcd"]])
def test_nothing_at_all_is_empty(decode: Decode, frames: list[bytes]) -> None:
    assert kind_of(decode, frames) == "empty"


def test_a_tag_of_the_other_direction_or_of_a_later_version_is_unknown() -> None:
    assert kind_of(decode_command, encode(Hello(1, 2, 3))) == "unknown"
    assert kind_of(decode_event, encode(Inspect(1))) == "unknown"
    assert kind_of(decode_command, [msgspec.msgpack.encode(["teleport", 1, 2, 3])]) == "unknown"
    assert kind_of(decode_command, [msgspec.msgpack.encode(["teleport", *range(40)])]) == "unknown"


_HEAD = b"\x93\xa7prepare\x01\x92\xa6tokens"  # followed by the ids of a TokenPrompt


@pytest.mark.parametrize(
    "frame",
    [
        b"\xc1",
        b"\xc0",
        b"\x90",
        b"\x91\x01",
        b"\xdc",
        b"\x91\xa8insp",
        encode(Inspect(1))[0][:-1],
        encode(Inspect(1))[0] + b"\0",
        msgspec.msgpack.encode(["inspect"]),
        msgspec.msgpack.encode(["inspect", 1, 2]),
        msgspec.msgpack.encode(["inspect", "one"]),
        msgspec.msgpack.encode({"inspect": 1}),
        msgspec.msgpack.encode(["prepare", 1, ["image", "x"]]),
        b"\x93\xa7prepare\x01\x92\xa4text\xa2\xff\xfe",  # no UTF-8
        b"\x92\xa7prefill\xdd\xff\xff\xff\xff",  # an array said to have 2**32 - 1 elements
        _HEAD + b"\xdd\x7f\xff\xff\xff" + bytes(50),
        _HEAD + b"\xdf\x7f\xff\xff\xff" + bytes(50),
        _HEAD + b"\xc9\xff\xff\xff\xff\x54abcd",  # an extension said to have 4 GiB
        _HEAD + b"\x91" * 100_000,  # nested deeper than any stack
        _HEAD + b"\x91\xff",  # id -1
        _HEAD + b"\x91\xcf\x00\x00\x00\x01\x00\x00\x00\x00",  # id 2**32
        _HEAD + b"\x91\xc3",  # id True
        _HEAD + b"\x91\xcb" + bytes(8),  # id 0.0
        _HEAD + b"\xa4abcd",
        _HEAD + b"\xc4\x04abcd",  # bytes must not be read as ids
        _HEAD + b"\xd6\xffabcd",  # MessagePack's timestamp
        _HEAD + b"\xd6\x07\x01\0\0\0",  # another extension code
        _HEAD + b"\xd5T\x01\0",  # a reference of two bytes
        _HEAD + msgspec.msgpack.encode([1] * 257),
    ],
)
def test_what_has_another_shape_is_malformed(frame: bytes) -> None:
    assert kind_of(decode_command, [frame]) == "malformed"


def test_buffers_and_their_references_must_match() -> None:
    good = encode(prefill_of(LONG, LONG))
    assert decode_command(good) == prefill_of(LONG, LONG)
    named_twice = [good[0].replace(b"\xd6T\x02", b"\xd6T\x01"), *good[1:]]
    for bad in (
        good[:2],  # one is missing
        [*good, LONG.to_bytes()],  # one too many
        [*encode(Inspect(1)), b"abcd"],
        named_twice,
        named_twice[:2],
        [good[0].replace(b"\xd6T\x02", b"\xd6T\x00"), *good[1:]],  # frame 0 is no buffer
        [good[0].replace(b"\xd6T\x02\0\0\0", b"\xd6T\xff\xff\xff\xff"), *good[1:]],
        [good[0], good[1], good[2][:-1]],  # no whole number of u32
    ):
        assert kind_of(decode_command, bad) == "buffers"


def test_a_buffer_of_an_earlier_message_is_out_of_reach() -> None:
    frames = encode(prefill_of(LONG))
    decode_command(frames)
    assert kind_of(decode_command, frames[:1]) == "buffers"


def test_sizes_and_counts_have_limits_when_decoding() -> None:
    inspect = encode(Inspect(1))[0]
    assert kind_of(decode_command, [bytes(wire.MAX_MESSAGE_BYTES + 1)]) == "oversized"
    assert kind_of(decode_command, [inspect, bytes(wire.MAX_BUFFER_BYTES + 4)]) == "oversized"
    assert kind_of(decode_command, [inspect] * (wire.MAX_FRAMES + 1)) == "oversized"
    many = [bytes(wire.MAX_BUFFER_BYTES)] * (wire.MAX_TOTAL_BYTES // wire.MAX_BUFFER_BYTES)  # one object, many times
    assert kind_of(decode_command, [inspect, *many]) == "oversized"


def test_what_would_be_refused_is_not_even_encoded() -> None:
    with pytest.raises(FrameError) as caught:
        encode(Prepare(RequestId(1), TextPrompt("x" * wire.MAX_MESSAGE_BYTES)))
    assert caught.value.kind == "oversized"
    with pytest.raises(FrameError) as caught:
        encode(prefill_of(*[TokenIds(range(257))] * wire.MAX_FRAMES))
    assert caught.value.kind == "oversized"
    for hopeless in (Prepare(RequestId(1), TextPrompt("half a pair \ud800")), Inspect(2**64)):
        with pytest.raises(FrameError) as caught:
            encode(hopeless)
        assert caught.value.kind == "malformed"


def test_half_a_surrogate_pair_costs_an_event_only_that_character() -> None:
    for odd, plain in (
        (Failed("not_found", "no /models/\udcff", "é\ud800"), Failed("not_found", "no /models/\\udcff", "é\\ud800")),
        (Prepared(RequestId(1), LONG, ("\udfff",)), Prepared(RequestId(1), LONG, ("\\udfff",))),
        (StepDone(1, (StepRow(SequenceId(1), 5, (3,), "\udc80"),)), StepDone(1, (StepRow(SequenceId(1), 5, (3,), "\\udc80"),))),
    ):
        assert decode_event(encode(odd)) == plain


def test_the_largest_allowed_message_passes() -> None:
    text = "x" * (wire.MAX_MESSAGE_BYTES - 64)
    message = Prepare(RequestId(1), TextPrompt(text))
    assert decode_command(encode(message)) == message


def test_several_threads_code_at_once_without_mixing_their_buffers() -> None:
    failures: list[object] = []

    def work(number: int) -> None:
        for turn in range(200):
            message = prefill_of(TokenIds([number] * (300 + turn)), TokenIds([number, turn]))
            back = decode_command(encode(message))
            if back != message:
                failures.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def _mutated(frames: list[bytes], chance: random.Random) -> list[bytes]:
    """`frames` with one to three injuries of the kinds a bug or a foreign sender makes."""
    frames = list(frames)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(frames))
        body = bytearray(frames[at])
        match chance.randrange(8):
            case 0 if body:
                body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
            case 1 if body:
                body[chance.randrange(len(body))] = chance.choice(b"\x00\x90\x9f\xc0\xc1\xc4\xc7\xcb\xcf\xd6\xdd\xdf\xff")
            case 2:
                del body[chance.randint(0, len(body)) :]
            case 3:
                cut = chance.randint(0, len(body))
                body[cut:cut] = chance.randbytes(chance.randint(1, 6))
            case 4 if body:
                cut = chance.randrange(len(body))
                del body[cut : cut + chance.randint(1, 4)]
            case 5:
                frames.append(chance.randbytes(chance.randint(0, 9)))
            case 6 if len(frames) > 1:
                frames.pop(chance.randrange(len(frames)))
                continue
            case _:
                chance.shuffle(frames)
                continue
        frames[at] = bytes(body)
    return frames


def test_a_hundred_thousand_random_and_mutated_frames_give_a_message_or_a_frame_error() -> None:
    chance = random.Random(20240131)
    ids = TokenIds(range(257))
    good: list[list[bytes]] = [
        encode(message)
        for message in (
            Load("chat", "/models/chat", compute_threads=2),
            Prepare(RequestId(7), TextPrompt("Grüße, 世界")),
            Prepare(RequestId(8), TokenPrompt(ids)),
            prefill_of(ids, TokenIds([1, 2, 3])),
            Grant(((SequenceId(1), 40), (SequenceId(2), 50))),
            Hello(1, 4711, 1),
            Prepared(RequestId(7), ids, ("cut",)),
            StepDone(9, (StepRow(SequenceId(1), 5, (6, 7), "ab", "stop", "b"),)),
        )
    ]
    refused = dict.fromkeys(("empty", "malformed", "unknown", "oversized", "buffers", "message"), 0)
    for turn in range(100_000):
        if turn % 4:
            frames = _mutated(chance.choice(good), chance)
        else:
            frames = [chance.randbytes(chance.randint(0, 24)) for _ in range(chance.randint(0, 2))]
        for decode in (decode_command, decode_event):
            try:
                decode(frames)
            except FrameError as error:
                refused[error.kind] += 1
            else:
                refused["message"] += 1
    for kind in ("empty", "malformed", "unknown", "buffers", "message"):  # each way out was really taken
        assert refused[kind] > 100, refused
    for frames in good[:5]:
        decode_command(frames)


@settings(max_examples=300, deadline=None, database=None)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_no_list_of_byte_strings_gives_another_error(frames: list[bytes]) -> None:
    for decode in (decode_command, decode_event):
        try:
            decode(frames)
        except FrameError:
            pass
