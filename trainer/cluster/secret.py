"""The job's secret: what its processes know, and whoever else reaches its ports does not."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Mapping

from trainer.cluster.environment import SECRET
from trainer.cluster.rendezvous import Rendezvous
from trainer.cluster.world import World
from trainer.errors import ConfigError, TrainerError

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


def job_token(rendezvous: Rendezvous, world: World) -> str:
    """Return 64 hexadecimal digits that all ranks of this job know, other ones at each call. Collective.

    Where ranks have a secret, the rendezvous carries nothing from which another could learn them. Without one it
    carries all that they are made from. Every rank adds to it, so that nobody can bring an earlier token back.

    Raises:
        ConfigError: the secret can be guessed.
        TrainerError: what this rank has added was changed.
    """
    own = secrets.token_hex(32)
    parts = rendezvous.all_gather(own)
    if parts[world.rank] != own:
        raise TrainerError("somebody else writes into the ranks' rendezvous: what this rank has put there was changed")
    return token_of(parts)


def token_of(parts: Iterable[str]) -> str:
    """Return 64 hexadecimal digits that follow from the job's secret and from what all ranks have added.

    Raises:
        ConfigError: the secret can be guessed.
    """
    return hmac.new(job_secret().encode(), "\n".join(parts).encode(), hashlib.sha256).hexdigest()
