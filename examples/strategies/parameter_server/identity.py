"""Identity: what the processes of a job know, and how they prove it to those that they connect to.

The launcher or the user may give all ranks a secret. From it, and from what each rank adds, they make tokens. A proof
is an HMAC-SHA256 under a token over what it is for and what it is about.

It imports neither PyTorch nor anything else that takes long: servers are small processes.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from collections.abc import Callable, Mapping

from trainer.cluster.environment import SECRET
from trainer.errors import ConfigError

# horovodrun's own comes last, because the supervisor's and the user's hold under every launcher.
_VARIABLES = (SECRET, "HOROVOD_JOB_SECRET")
_DIGITS = re.compile("[0-9a-f]{64,}")


def job_secret(environ: Mapping[str, str] = os.environ) -> str:
    """Return the secret that the launcher or the user has put into every rank's environment; "" without one.

    Raises:
        ConfigError: it can be guessed.
    """
    secret = next((environ[name] for name in _VARIABLES if environ.get(name)), "")
    if secret and not _DIGITS.fullmatch(secret):
        raise ConfigError(f"{SECRET} has {len(secret)} characters; valid are 64 random hexadecimal digits")
    return secret


def job_token(all_gather: Callable[[str], list[str]]) -> str:
    """Return a new token of 64 hexadecimal digits, the same on all ranks of this job. Collective.

    Where ranks have a secret, nothing is sent from which another could learn the token.

    Args:
        all_gather: returns all ranks' strings.

    Raises:
        ConfigError: the secret can be guessed.
    """
    return prove(job_secret(), "token", *all_gather(secrets.token_hex(32))).hex()


def prove(token: str, purpose: str, *facts: object) -> bytes:
    """Return an HMAC of the facts, which nobody can make without the token.

    Args:
        purpose: of the proof, so that it is of no use anywhere else.
        facts: what is proven: bytes, or what has a text of its own.
    """
    parts = [fact if isinstance(fact, bytes) else str(fact).encode() for fact in (purpose, *facts)]
    # Behind its length each, so that no other facts have the same bytes.
    message = b"".join(piece for part in parts for piece in (b"%d:" % len(part), part))
    return hmac.digest(token.encode(), message, "sha256")


def is_proof(proof: bytes, token: str, purpose: str, *facts: object) -> bool:
    """Return whether a proof is the one that `prove` returns; compares in constant time."""
    return hmac.compare_digest(proof, prove(token, purpose, *facts))
