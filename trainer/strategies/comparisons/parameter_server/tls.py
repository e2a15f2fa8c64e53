"""TLS between ranks and parameter servers, from certificates that the user gives every host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

FOLDER = "TRAINER_TLS"
# Ranks connect to addresses, which certificates made in advance do not name. All carry this name instead.
NAME = "parameter-server.trainer"


@dataclass(frozen=True)
class Certificates:
    """PEM texts of one host. Servers and ranks both show a certificate, and take those of this authority only."""

    authority: str
    certificate: str
    key: str

    def channel(self, grpc: Any, endpoint: str, options: tuple[tuple[str, Any], ...]) -> Any:
        """Return a channel over which nobody else reads."""
        credentials = grpc.ssl_channel_credentials(
            self.authority.encode(), self.key.encode(), self.certificate.encode()
        )
        return grpc.secure_channel(endpoint, credentials, options=(*options, ("grpc.ssl_target_name_override", NAME)))


def read_certificates(environ: Mapping[str, str] = os.environ) -> Certificates | None:
    """Return what is in the folder that TRAINER_TLS names; None without it.

    Raises:
        ConfigError: a file is missing, or is no PEM file.
    """
    if not environ.get(FOLDER):
        return None
    texts = []
    for name in ("authority.pem", "certificate.pem", "key.pem"):
        file = Path(environ[FOLDER], name)
        try:
            texts.append(file.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{FOLDER}: cannot read {file}: {getattr(error, 'strerror', 'no PEM file')}") from None
        if not texts[-1].startswith("-----BEGIN "):
            raise ConfigError(f"{FOLDER}: {file} is no PEM file")
    return Certificates(*texts)
