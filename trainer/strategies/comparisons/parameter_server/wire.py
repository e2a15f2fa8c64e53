"""Encoding of exchange.proto's chunks, with one copy of the tensor instead of three.

protoc's classes copy a chunk into a message, the message into bytes, and back. The encoding of a message with two
fields is simple enough to write by hand: https://protobuf.dev/programming-guides/encoding/ (tags, varints, lengths).
"""

from __future__ import annotations

import hashlib
import hmac

METHOD = "/trainer.ParameterServer/Exchange"
CHUNK_BYTES = 1024 * 1024
"""Bytes of a tensor in one message: large beside a message's cost, small beside a tensor, so that chunks overlap."""
# Pickled optimizers have no natural limit, and gRPC's is 4 MB.
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A host that loses its power closes no connection.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
    # A site's HTTP proxy would see the gradients.
    ("grpc.enable_http_proxy", 0),
)
_TYPE, _DATA = b"\x0a", b"\x12"  # fields 1 and 2, each a length and that many bytes


def prove(token: str, *facts: object) -> str:
    """Return an HMAC-SHA256 in hexadecimal digits over facts, none of which has a newline."""
    return hmac.new(token.encode(), "\n".join(map(str, facts)).encode(), hashlib.sha256).hexdigest()


def seal(token: str, number: int, root: int, data: bytes) -> bytes:
    """Return data behind an HMAC-SHA256 (32 bytes) over it, its number and the rank that sends it."""
    return hmac.digest(token.encode(), b"object\n%d\n%d\n" % (number, root) + data, "sha256") + data


def unseal(token: str, number: int, root: int, sealed: bytes | memoryview) -> bytes:
    """Return the data that `seal` was given.

    Raises:
        ValueError: it was sealed with another token, as another number or by another rank, or it was changed.
    """
    data = bytes(sealed[32:])
    if not hmac.compare_digest(seal(token, number, root, data), sealed):
        raise ValueError(f"object {number} does not come from rank {root} of this job")
    return data


def encode(kind: str, data: bytes | memoryview) -> bytes:
    """Encode a chunk.

    Args:
        kind: NumPy's name of a type, or empty.
        data: the elements' bytes.
    """
    head = _TYPE + _varint(len(kind)) + kind.encode() if kind else b""
    return b"".join((head, _DATA, _varint(len(data)), data) if len(data) else (head,))


def decode(message: bytes) -> tuple[str, memoryview]:
    """Decode a chunk into its type and its data, which is a view into `message`.

    Raises:
        ValueError: it is not a chunk.
    """
    kind, data, at = "", memoryview(b""), 0
    while at < len(message):
        tag, (length, begin) = message[at : at + 1], _read_varint(message, at + 1)
        at = begin + length
        if tag not in (_TYPE, _DATA) or at > len(message):
            raise ValueError(f"not a chunk: field {tag!r} of {length} bytes in a message of {len(message)}")
        if tag == _TYPE:
            kind = message[begin:at].decode()
        else:
            data = memoryview(message)[begin:at]
    return kind, data


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at `at`, and the index behind it."""
    value, shift = 0, 0
    while at < len(message):
        group = message[at]
        at, value, shift = at + 1, value | (group & 0x7F) << shift, shift + 7
        if group < 0x80:
            return value, at
    raise ValueError("not a chunk: it ends within a number")
