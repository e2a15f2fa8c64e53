"""Connect standard input and output to a TCP port, in small segments; a ProxyCommand for ssh.

Where large packets get lost, ssh hangs in its key exchange. Through this program it does not. It imports the standard
library only, and is run by its path: `relay.py HOST PORT`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

SEGMENT = 524
"""Bytes of a TCP segment in the smallest packet that every host has to take."""
_TIMEOUT_S = 5.0


def main() -> None:
    """Pass bytes on in both directions until one side has ended."""
    with _connect(sys.argv[1], int(sys.argv[2])) as connection:
        threading.Thread(target=_pass_input, args=(connection,), daemon=True).start()
        while part := connection.recv(65536):
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
    os._exit(0)  # waits for no thread


def _connect(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
    connection.settimeout(_TIMEOUT_S)
    connection.connect(address)
    connection.settimeout(None)
    return connection


def _pass_input(connection: socket.socket) -> None:
    while part := os.read(0, 65536):
        connection.sendall(part)
    connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
