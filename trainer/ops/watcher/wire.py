"""Messages between the watchers of a job. Each is proven by the job's token, and nobody else is heard.

The hub begins a connection with a random number, and the other watcher answers with one of its own and a proof of
both. A message is its length, and JSON that is sealed as the next one in its direction.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from trainer.cluster.identity import PROOF_BYTES, is_proof, prove, seal, unseal
from trainer.untrusted import parse_json

TIMEOUT_S = 10.0
"""Time for the other side to prove itself, and to acknowledge what it was sent."""
_NONCE = 32
_HELLO = _NONCE + PROOF_BYTES
_HEAD = struct.Struct("!I")
_MOST_BYTES = 16 * 1024 * 1024
_MOST_WAITING = 64 * 1024 * 1024


class RefusedError(Exception):
    """The other side is no watcher of this job, or its connection is broken."""


BROKEN = (RefusedError, OSError, ValueError, TypeError, LookupError, OverflowError)
"""What a connection, or a message with other fields than a watcher's, may raise."""


class Link:
    """One side of a connection. Nothing here blocks.

    Args:
        is_hub: which side this is.
    """

    def __init__(self, connection: socket.socket, token: str, *, is_hub: bool) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TIMEOUT_S * 1000))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._token, self._is_hub = connection, token, is_hub
        self._key, self._nonce = b"", secrets.token_bytes(_NONCE)
        self._in, self._out = bytearray(), bytearray()
        self._sent = self._received = 0
        self._broken: Exception | None = None
        self.opened_at = self.heard_at = time.monotonic()
        self.host = -1
        """Which host the other side is, once it has said so."""
        if is_hub:
            self._out += self._nonce

    @property
    def is_proven(self) -> bool:
        return bool(self._key)

    @property
    def wants_to_write(self) -> bool:
        return bool(self._out)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message, and send what can be sent now; before the other side has proven itself, do nothing."""
        if not self.is_proven:
            return
        sealed = seal(self._key, json.dumps(message).encode(), "message", self._is_hub, self._sent)
        self._out += _HEAD.pack(len(sealed)) + sealed
        self._sent += 1
        self.flush()
        if len(self._out) > _MOST_WAITING:
            self._broken = RefusedError("it takes no more messages")

    def flush(self) -> None:
        """Send what can be sent now. What keeps it from being sent, `receive` raises."""
        try:
            while self._out:
                del self._out[: self.socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._broken = self._broken or error

    def flush_for(self, seconds: float) -> None:
        """Wait up to this long until everything is sent."""
        deadline = time.monotonic() + seconds
        while self._out and not self._broken and (left := deadline - time.monotonic()) > 0:
            wait([self], left)
            self.flush()

    def receive(self) -> Iterator[dict[str, Any]]:
        """Send what can be sent now, and yield the messages that have come.

        Raises:
            RefusedError: the other side has ended the connection, proves nothing, or takes no more messages.
            OSError: the connection is broken; ETIMEDOUT where the other side does not answer.
            ValueError: a message is no JSON.
        """
        self.flush()
        try:
            while len(self._in) < (_MOST_BYTES if self.is_proven else _HELLO):
                chunk = self.socket.recv(65536 if self.is_proven else _HELLO - len(self._in))
                if not chunk:
                    raise RefusedError("it has ended the connection")
                self._in += chunk
        except BlockingIOError:
            pass
        except (OSError, RefusedError) as error:
            self._broken = self._broken or error
        if not self.is_proven:
            self._read_hello()
        yield from self._messages()
        if self._broken is not None:  # after what has come before it
            raise self._broken

    def _read_hello(self) -> None:
        size = _HELLO if self._is_hub else _NONCE
        if len(self._in) < size:
            return
        other, proof = bytes(self._in[:_NONCE]), bytes(self._in[_NONCE:size])
        del self._in[:size]
        hub, spoke = (self._nonce, other) if self._is_hub else (other, self._nonce)
        if not self._is_hub:
            self._out += self._nonce + prove(self._token, "watcher", hub, spoke)
        elif not is_proof(proof, self._token, "watcher", hub, spoke):
            raise RefusedError("it does not know the job's token")
        self._key = prove(self._token, "messages", hub, spoke)
        self.flush()

    def _messages(self) -> Iterator[dict[str, Any]]:
        while self.is_proven and len(self._in) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._in)
            if length > _MOST_BYTES - _HEAD.size:
                raise RefusedError(f"a message of {length} bytes")
            end = _HEAD.size + length
            if len(self._in) < end:
                return
            sealed = bytes(self._in[_HEAD.size : end])
            del self._in[:end]
            data = unseal(self._key, sealed, "message", not self._is_hub, self._received)
            if data is None:
                raise RefusedError("a message that no watcher of this job has sent")
            self._received += 1
            self.heard_at = time.monotonic()
            message = parse_json(data)
            if isinstance(message, dict):
                yield message


def connect(endpoint: str, token: str) -> Link:
    """Return a link that connects to the hub, without waiting. What keeps it from connecting, `receive` raises.

    Raises:
        OSError: there is no way to it.
    """
    host, _, port = endpoint.rpartition(":")
    link = Link(socket.socket(), token, is_hub=False)
    number = link.socket.connect_ex((host, int(port)))
    if number not in (0, errno.EINPROGRESS):
        link.close()
        raise OSError(number, os.strerror(number))
    return link


def wait(sources: Iterable[Any], seconds: float) -> None:
    """Wait until something can be read from a link, a socket or a descriptor, or a link can send what it holds."""
    poll = select.poll()  # `select.select` takes no descriptor above 1,023
    for source in sources:
        writes = isinstance(source, Link) and source.wants_to_write
        poll.register(source, select.POLLIN | (select.POLLOUT if writes else 0))
    poll.poll(seconds * 1000)


def is_timeout(error: Exception) -> bool:
    """Return whether the other side does not answer any more, in contrast to one that has ended."""
    return isinstance(error, OSError) and error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
