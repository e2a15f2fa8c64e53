"""Secrets in a command, which must not get into a job file: by their names, and by what they look like."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainer.ops.submit.job import Job

# `--pad-token`, `sort_key=` and `--secret-file` hold no secrets, and more options end like them than can be listed
# here. So a key or a token is a secret if a word before it says whose it is, or if its value looks like a secret.
_OWNERS = (
    "access|account|anthropic|api|auth|aws|azure|bearer|clearml|comet|databricks|db|docker|encryption|gcp|gemini|git|"
    "github|gitlab|google|hf|hub|hugging-?face|kaggle|license|login|minio|mlflow|modal|mysql|neptune|ngc|nvidia|oauth|"
    "openai|pg|postgres|private|proxy|redis|refresh|registry|replicate|s3|secret|session|signing|slack|smtp|ssh|"
    "storage|telegram|wandb|webhook"
)
_SECRET = re.compile(
    rf"(?:secret|passw(?:or)?d|passphrase)$|(?:^|-)(?:authorization|(?:{_OWNERS})-?(?:key|token|pass|pwd|pw|pat))$"
)
_KEY, _TOKEN = re.compile(r"(?:^|-)(?:key|token)$"), re.compile(r"-*token")
_VARIABLE = re.compile(r"[A-Z0-9_]*(?:KEY|TOKEN|_PASS|_PWD|_PW|_PAT)")
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+/]{20,}=*")
# As in NAME=value, also among others (--export=ALL,NAME=value), "name": "value" and Name: value; not NAME=$OTHER.
_NAMED = re.compile(r"([\w.+-]+)(?:=|[\"']\s*+:\s*+|:\s++)(?![\"']?(?:\$|\s|$))(?=[\"']?([^\s\"',;&]*))")
_VALUES = {
    "a password in a URL": re.compile(r"://[^/\s:@]*:[^/\s@]+@"),
    "an access token": re.compile(r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abpr]-|AKIA)[\w-]{16,}"),
    "a private key": re.compile(r"PRIVATE KEY-----"),
}


def secrets_in(job: Job) -> list[str]:
    """Return the options and variables that hold secrets in a command or a directive, without their values."""
    texts = (*job.command, *job.directives, job.image)
    names = [name for name, value in _named(job) if _is_secret(name, value)]
    return names + [what for what, pattern in _VALUES.items() if any(map(pattern.search, texts))]


def _named(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the options and variables of a command and the directives, each with its value."""
    for word, following in zip(job.command, (*job.command[1:], ""), strict=True):
        if word.startswith("-") and "=" not in word:
            yield word, following
        yield from _NAMED.findall(word)
    for text in job.directives:
        yield from _NAMED.findall(text)


def _is_secret(name: str, value: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[._+-]+", "-", name).lower()
    if _SECRET.search(words) or _TOKEN.fullmatch(words) or _VARIABLE.fullmatch(name):
        return True
    return bool(_KEY.search(words) and _RANDOM.fullmatch(value))
