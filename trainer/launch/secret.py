"""The job's secret: what its processes know, and whoever else reaches its ports does not."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping

from trainer.launch.environment import SECRET
from trainer.launch.rendezvous import Rendezvous
from trainer.launch.world import World

# horovodrun's own comes last, because the supervisor's and the user's hold under every launcher.
_VARIABLES = (SECRET, "HOROVOD_RENDEZVOUS_SECRET")


def job_secret(environ: Mapping[str, str] = os.environ) -> str:
    """Return the secret that the launcher or the user has put into every rank's environment; "" without one."""
    return next((environ[name] for name in _VARIABLES if environ.get(name)), "")


def job_token(rendezvous: Rendezvous, world: World) -> str:
    """Return 64 hexadecimal digits that all ranks of this job know, other ones at each call. Collective.

    Where ranks have a secret, the rendezvous carries nothing from which another could learn them. Without one it
    carries the digits themselves.
    """
    salt = rendezvous.all_gather(secrets.token_hex(32) if world.is_root else "")[0]
    secret = job_secret()
    return hmac.new(secret.encode(), salt.encode(), hashlib.sha256).hexdigest() if secret else salt
