"""Installs locked packages through uv, in a fraction of pip's time, or through pip where uv cannot be had.

Only the standard library: nothing is installed yet when it runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from console import SetupError, run, say

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
# pip's settings that uv has as well, under other names, and reads from nowhere else.
_UV_NAMES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "cert": "SSL_CERT_FILE"}


def get_uv(python: str, log: Path, folder: Path | None = None) -> Path | None:
    """Installs the locked uv through pip.

    Args:
        python: an environment's Python, with pip.
        log: where pip's output goes.
        folder: where to put it; into the environment itself when None.

    Returns:
        uv's path; None where this machine or its package index has no such uv, which a line then says.
    """
    command = [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--require-hashes"]
    command += ["--requirement", str(REQUIREMENTS / "uv.txt")]
    if folder is not None:
        command += ["--target", str(folder)]
    try:
        run("installing uv", command, log)
    except SetupError as error:
        say(f"uv cannot be had ({_last_line(error)}); pip installs the packages, which takes longer")
        return None
    return folder / "bin" / "uv" if folder else Path(python).with_name("uv")


def install(title: str, python: str, uv: Path | None, arguments: list[str], log: Path) -> None:
    """Installs packages into the environment of `python`, and once more through pip where uv fails.

    Args:
        title: what is installed, for the progress lines.
        python: the environment's Python, with pip.
        uv: as from `get_uv`.
        arguments: of `pip install`, and of `uv pip install` alike.
        log: where the output goes.

    Raises:
        SetupError: pip cannot install them either.
    """
    if uv is not None:
        environment = dict(os.environ, **uv_settings(_pip_settings(python)))
        if "--require-hashes" in arguments:
            # Any index may serve them, as pip has it: hashes say which file it must be.
            environment.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
        try:
            run(title, [str(uv), "pip", "install", "--python", python, *arguments], log, env=environment)
        except SetupError as error:
            say(f"uv could not install the packages ({_last_line(error)}); trying pip")
        else:
            return
    pip_arguments = [argument for argument in arguments if argument != "--compile-bytecode"]
    alone = lock_alone() if "--require-hashes" in arguments else None
    run(title, [python, "-m", "pip", "install", "--progress-bar", "off", *pip_arguments], log, env=alone)


def lock_alone() -> dict[str, str]:
    """Return an environment in which pip takes a lock's versions, also where this machine's settings cap some."""
    return dict(os.environ, PIP_CONSTRAINT=os.devnull)


def only(names: tuple[str, ...], lock: Path) -> str:
    """Return the requirements of some packages from a lock, with their hashes."""
    entries = re.split(r"\n(?=[a-z0-9])", lock.read_text())
    return "\n".join(entry for entry in entries if entry.partition("==")[0].split("[")[0] in names) + "\n"


def uv_settings(pip_settings: str) -> dict[str, str]:
    """What uv's environment needs so that it asks the index that pip has been told to ask.

    Args:
        pip_settings: what `pip config list` prints.
    """
    settings: dict[str, str] = {}
    for key, value in re.findall(r"^[^=\n]+\.([\w-]+)='(.*)'$", pip_settings, re.MULTILINE):
        name = _UV_NAMES.get(key)
        if name and name not in os.environ:
            settings[name] = value
    return settings


def _last_line(error: SetupError) -> str:
    return str(error).strip().splitlines()[-1].strip()


def _pip_settings(python: str) -> str:
    return subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False).stdout


def temporary_log(name: str) -> Path:
    """A log's path outside the environment, for what runs before there is one."""
    return Path(tempfile.mkdtemp(prefix="trainer-")) / name
