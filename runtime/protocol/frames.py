"""How does a message become frames on the wire, and frames a message again?

Frame 0 is the message in MessagePack. A `TokenIds` of at most 256 ids stands in it as a plain list; a longer one
is a MessagePack extension that names a further frame, which holds the ids as little-endian u32. Everything that
arrives is checked here, so whoever gets a message may trust its shape; meaning and ranges are checked by whoever
acts on it. Moving frames between processes is `channel.py`'s duty. docs/protocol.md is the authority.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec.msgpack import Ext

from runtime.protocol.commands import AnyCommand
from runtime.protocol.events import AnyEvent
from runtime.protocol.tokens import TokenIds

MAX_INLINE_IDS: Final = 256
MAX_MESSAGE_BYTES: Final = 16 << 20
MAX_BUFFER_BYTES: Final = 64 << 20
MAX_TOTAL_BYTES: Final = 256 << 20
MAX_FRAMES: Final = 1025
"""One message and at most 1024 buffers: above the rows of any batch."""

TOKEN_BUFFER_CODE: Final = 84  # "T"
_INDEX = struct.Struct("<I")

FrameErrorKind = Literal["empty", "malformed", "unknown", "oversized", "buffers"]


class FrameError(Exception):
    """These frames are no message of ours, or (raised by `encode`) this message fits in no frames of ours.

    kind: "empty" nothing there; "malformed" no MessagePack, or of another shape than the message's; "unknown" a message
    tag this side does not know; "oversized" a count or size above its limit; "buffers" the buffer frames and the
    references to them do not match, or a buffer is no run of u32.
    """

    def __init__(self, kind: FrameErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: FrameErrorKind = kind


class _Incoming(threading.local):
    """The frames of the message that this thread is decoding: msgspec's hook has no argument to pass them in."""

    frames: Sequence[bytes] = ()
    referenced: set[int] = set()  # noqa: RUF012 (replaced for each message, never changed in place here)


_incoming = _Incoming()


def _decode_hook(wanted: type, value: Any) -> TokenIds:
    if type(value) is list:
        if len(value) > MAX_INLINE_IDS:
            raise FrameError("malformed", f"{len(value)} token ids inline; more than {MAX_INLINE_IDS} belong in a buffer frame")
        if any(type(each) is not int for each in value):  # bool would pass for an id otherwise
            raise FrameError("malformed", "a token id is no integer")
        return TokenIds(value)
    if type(value) is Ext:
        return _take_buffer(value)
    raise FrameError("malformed", f"token ids are a list or a buffer reference, not {type(value).__name__}")


def _take_buffer(reference: Ext) -> TokenIds:
    data = bytes(reference.data)
    if reference.code != TOKEN_BUFFER_CODE or len(data) != _INDEX.size:
        raise FrameError("malformed", f"extension {reference.code} of {len(data)} bytes is no buffer reference")
    (index,) = _INDEX.unpack(data)
    if not 1 <= index < len(_incoming.frames):
        raise FrameError("buffers", f"buffer frame {index} is named, but there are frames 1 to {len(_incoming.frames) - 1} only")
    if index in _incoming.referenced:
        raise FrameError("buffers", f"buffer frame {index} is named twice")
    _incoming.referenced.add(index)
    buffer = _incoming.frames[index]
    if len(buffer) % 4:
        raise FrameError("buffers", f"buffer frame {index} has {len(buffer)} bytes, which is no whole number of u32")
    return TokenIds.from_bytes(buffer)


_command_decoder: Final = msgspec.msgpack.Decoder(AnyCommand, dec_hook=_decode_hook)
_event_decoder: Final = msgspec.msgpack.Decoder(AnyEvent, dec_hook=_decode_hook)
_EVENTS: Final = frozenset(get_args(AnyEvent))
_COMMAND_TAGS: Final = frozenset(each.__struct_config__.tag for each in get_args(AnyCommand))
_EVENT_TAGS: Final = frozenset(each.__struct_config__.tag for each in get_args(AnyEvent))


def encode(message: AnyCommand | AnyEvent) -> list[bytes]:
    """The frames of `message`. Any thread may call this.

    Half a surrogate pair, which is no UTF-8, is written as its escape in an event: it comes out of checkpoints and file names, and
    whoever waits for the event needs its words more than that character. In a command it is an error.

    :raises FrameError: "oversized", a size or count above the limits of this module; "malformed", a value that
        MessagePack cannot hold (a string with lone surrogates, an integer beyond 64 bits).
    """
    try:
        return _encode(message)
    except UnicodeError as error:
        if type(message) in _EVENTS:
            return _encode(_escaped(message))
        raise FrameError("malformed", f"{type(message).__name__} cannot be encoded: {error}") from error


def _escaped(value: Any) -> Any:
    """The value with every half surrogate in its texts written out."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, tuple):
        return tuple(map(_escaped, value))
    if isinstance(value, msgspec.Struct):
        return type(value)(*(_escaped(getattr(value, name)) for name in value.__struct_fields__))
    return value


def _encode(message: AnyCommand | AnyEvent) -> list[bytes]:
    frames: list[bytes] = [b""]

    def encode_hook(value: object) -> object:
        if not isinstance(value, TokenIds):
            raise TypeError(f"{type(value).__name__} is not part of the protocol")
        if len(value) <= MAX_INLINE_IDS:
            return value.tolist()
        frames.append(value.to_bytes())
        return Ext(TOKEN_BUFFER_CODE, _INDEX.pack(len(frames) - 1))

    try:
        frames[0] = msgspec.msgpack.encode(message, enc_hook=encode_hook)
    except OverflowError as error:
        raise FrameError("malformed", f"{type(message).__name__} cannot be encoded: {error}") from error
    _check_sizes(frames)
    return frames


def decode_command(frames: Sequence[bytes]) -> AnyCommand:
    """:raises FrameError: and nothing else, whatever the frames hold."""
    command: AnyCommand = _decode(_command_decoder, _COMMAND_TAGS, frames)
    return command


def decode_event(frames: Sequence[bytes]) -> AnyEvent:
    """:raises FrameError: and nothing else, whatever the frames hold."""
    event: AnyEvent = _decode(_event_decoder, _EVENT_TAGS, frames)
    return event


def _decode(decoder: msgspec.msgpack.Decoder[Any], tags: frozenset[object], frames: Sequence[bytes]) -> Any:
    _check_sizes(frames)
    _incoming.frames = frames
    referenced: set[int] = set()
    _incoming.referenced = referenced
    try:
        message = decoder.decode(frames[0])
    except FrameError:
        raise
    except Exception as error:  # the boundary to another process: RecursionError, OverflowError and the like are its input's fault
        tag = _peek_tag(frames[0])
        if tag is not None and tag not in tags:
            raise FrameError("unknown", f"no message is called {tag!r}") from error
        raise FrameError("malformed", f"{type(error).__name__}: {error}") from error
    finally:
        _incoming.frames = ()
    if len(referenced) != len(frames) - 1:
        raise FrameError("buffers", f"{len(frames) - 1} buffer frames came, {len(referenced)} of them named by the message")
    return message


def _check_sizes(frames: Sequence[bytes]) -> None:
    if not frames or not frames[0]:
        raise FrameError("empty", "there is no message frame")
    if len(frames) > MAX_FRAMES:
        raise FrameError("oversized", f"{len(frames)} frames; at most {MAX_FRAMES} are allowed")
    if len(frames[0]) > MAX_MESSAGE_BYTES:
        raise FrameError("oversized", f"the message frame has {len(frames[0])} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    if len(frames) == 1:
        return
    longest = max(map(len, frames[1:]))
    if longest > MAX_BUFFER_BYTES:
        raise FrameError("oversized", f"a buffer frame has {longest} bytes; at most {MAX_BUFFER_BYTES} are allowed")
    total = sum(map(len, frames))
    if total > MAX_TOTAL_BYTES:
        raise FrameError("oversized", f"the frames have {total} bytes together; at most {MAX_TOTAL_BYTES} are allowed")


def _peek_tag(frame: bytes) -> str | None:
    """The tag of a message whose rest could not be decoded; None when it does not begin as an array with a short string."""
    first = frame[0]
    start = 1 if first & 0xF0 == 0x90 else {0xDC: 3, 0xDD: 5}.get(first, len(frame))
    if start >= len(frame) or frame[start] & 0xE0 != 0xA0:  # fixarray, array 16, array 32; then fixstr
        return None
    length = frame[start] & 0x1F
    text = frame[start + 1 : start + 1 + length]
    return text.decode(errors="replace") if len(text) == length else None
