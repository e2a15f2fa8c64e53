"""Chunks to bytes and back, as exchange.proto has them, with one copy of the tensor instead of three.

protoc's classes copy a chunk into a message, the message into bytes, and back. The wire format of a message with two
fields is simple enough to write down: https://protobuf.dev/programming-guides/encoding/ (tags, varints, lengths).
"""

from __future__ import annotations

METHOD = "/trainer.ParameterServer/Exchange"
CHUNK_BYTES = 1024 * 1024
"""Of a tensor, in one message: large beside the cost of a message, small beside a tensor, so that pieces overlap."""
# Tensors and pickled optimizers have no natural limit, and gRPC's is 4 MB.
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
    # A proxy of the site is for the web, and would see the gradients.
    ("grpc.enable_http_proxy", 0),
)
_TYPE, _DATA = b"\x0a", b"\x12"  # fields 1 and 2, each a length and that many bytes


def encode(kind: str, data: bytes | memoryview) -> bytes:
    """A chunk as bytes.

    Args:
        kind: NumPy's name of a type, or empty.
        data: the elements' bytes.
    """
    head = _TYPE + _varint(len(kind)) + kind.encode() if kind else b""
    return b"".join((head, _DATA, _varint(len(data)), data) if len(data) else (head,))


def decode(message: bytes) -> tuple[str, memoryview]:
    """The type and the data of a chunk; the data is a view into `message`.

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
    """The number that begins there, and where the next byte is."""
    value, shift = 0, 0
    while at < len(message):
        group = message[at]
        at, value, shift = at + 1, value | (group & 0x7F) << shift, shift + 7
        if group < 0x80:
            return value, at
    raise ValueError("not a chunk: it ends within a number")
