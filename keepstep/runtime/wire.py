"""Bytes for the protocol's messages: JSON for the store (people read it there), MessagePack between ranks.

msgspec validates while it decodes, so a message is either what its dataclass says or a `RemoteProtocolError`; the lengths that it
claims for its parts are compared with its own before anything is allocated for them. A frame is the pair (class name, fields):
what may arrive is the closed set of `Downward` and `Upward`, nothing is looked up by name elsewhere. Thread-safe: encoders and
decoders keep no state between calls.
"""

from typing import TypeVar, get_args

import msgspec

from keepstep.protocol.errors import RemoteProtocolError
from keepstep.protocol.messages import Downward, Upward

T = TypeVar("T")

MALFORMED = (msgspec.DecodeError, ValueError, RecursionError)
"""What msgspec raises for bytes that make no sense: wrong, not text, or nested a thousand levels deep."""

_FRAMES: dict[str, type] = {kind.__name__: kind for kind in (*get_args(Downward), *get_args(Upward))}
_frame_head = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])


def encode(value: object) -> bytes:
    """JSON of a protocol dataclass."""
    return msgspec.json.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """The dataclass `kind` from JSON. Raises RemoteProtocolError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        raise RemoteProtocolError(f"this is not a {kind.__name__}: {error}") from None


def unpack(data: bytes, kind: type[T], what: str) -> T:
    """`kind` from MessagePack; `what` it is a part of, for the error. Raises RemoteProtocolError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except MALFORMED as error:
        raise RemoteProtocolError(f"malformed {what}: {error}") from None


def encode_frame(message: Downward | Upward) -> bytes:
    """One control-tree message."""
    return msgspec.msgpack.encode((type(message).__name__, message))


def decode_frame(data: bytes) -> Downward | Upward:
    """The message in a control-tree payload. Raises RemoteProtocolError."""
    try:
        name, body = _frame_head.decode(data)
        kind = _FRAMES[name]
        message: Downward | Upward = msgspec.msgpack.decode(body, type=kind)
    except KeyError as error:
        raise RemoteProtocolError(f"unknown control message {error}: do all ranks run the same keepstep?") from None
    except MALFORMED as error:
        raise RemoteProtocolError(f"malformed control message: {error}") from None
    return message
