"""Messages between ranks and parameter servers: chunks of tensors, over gRPC's streams of plain bytes.

There is one stream per rank and channel ("gradients", "values"), open for as long as the job trains. The n-th chunk of
a stream belongs to the n-th chunk of every other rank's; once all have come, each rank gets the n-th answer. The call's
metadata has the rank, the channel, the host (for messages to people) and the proof of these three and of the server's
address and port.
"""

from __future__ import annotations

import struct

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
_HEAD = struct.Struct("16s")
_KINDS = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
}
"""Types of tensors' elements. NumPy would take other texts for types too, up to gigabytes wide."""


def encode(kind: str, data: bytes | memoryview) -> bytes:
    """Return a chunk as a message.

    Args:
        kind: name of the elements' type.
        data: the elements' bytes.
    """
    return b"".join((_HEAD.pack(kind.encode()), data))


def decode(message: bytes) -> tuple[str, memoryview]:
    """Return a chunk's kind and its data, which is a view into `message`.

    Raises:
        ValueError: it is not a chunk.
    """
    kind = message[: _HEAD.size].rstrip(b"\0").decode("ascii", "replace")
    if len(message) < _HEAD.size or kind not in _KINDS:
        raise ValueError(f"not a chunk: a message of {len(message)} bytes")
    return kind, memoryview(message)[_HEAD.size :]
