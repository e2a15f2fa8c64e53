"""Who does not belong to the cluster stays outside, and no key can be found in an image."""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.cluster import IMAGE, Cluster, run, succeed

# What a private key begins with in any of OpenSSH's, OpenSSL's and PuTTY's formats.
_PRIVATE_KEY = re.compile(rb"^(-----BEGIN [A-Z ]*PRIVATE KEY-----|PuTTY-User-Key-File)", re.MULTILINE)
_SECRET_NAME = re.compile(r"(^|/)(id_(rsa|dsa|ecdsa|ed25519)|ssh_host_\w+_key|authorized_keys|\.netrc|\.npmrc|\.env)$")
# Packages bring keys of their own for their tests; these are public, and open nothing.
_PUBLIC_TEST_KEY = re.compile(r"(^|/)site-packages/.*(test|example)", re.IGNORECASE)
# With BatchMode, ssh asks for nothing; -F none leaves the image's own settings out, as an intruder would.
SSH = ["ssh", "-F", "none", "-o", "BatchMode=yes"]
SSH += ["-o", "StrictHostKeyChecking=no", "-o", "ConnectTimeout=5", "-p", "2222"]


@pytest.mark.parametrize("node", ["a", "b"])
@pytest.mark.parametrize(
    ("way", "options", "user"),
    [
        ("its own cluster's key", ["-i", "/home/trainer/.ssh/id_ed25519"], "trainer"),
        ("no key", ["-o", "PubkeyAuthentication=no"], "trainer"),
        ("a password", ["-o", "BatchMode=no", "-o", "PreferredAuthentications=password"], "trainer"),
        ("root", ["-i", "/home/trainer/.ssh/id_ed25519"], "root"),
    ],
)
def test_a_stranger_cannot_log_in(stranger: str, node: str, way: str, options: list[str], user: str) -> None:
    attempt = ["docker", "exec", stranger, *SSH[:3], *options, *SSH[3:], f"{user}@{node}", "echo inside"]
    outcome = run(attempt, timeout_s=30)
    assert outcome.code == 255, f"by {way}: {outcome.output}"
    assert "not accessible" not in outcome.output, "the key that is to be refused was never shown"
    assert "inside" not in outcome.output.splitlines()
    # The server offers keys and nothing else.
    assert "Permission denied (publickey)" in outcome.output, f"by {way}: {outcome.output}"


def test_root_cannot_log_in_even_with_the_clusters_key(cluster: Cluster) -> None:
    assert cluster.run("a", "ssh", "b", "id -un").output.strip() == "trainer"
    outcome = cluster.run("a", "ssh", "root@b", "id -un")
    assert outcome.code == 255
    assert "Permission denied (publickey)" in outcome.output


def test_the_clusters_key_opens_no_tunnels(cluster: Cluster) -> None:
    outcome = cluster.run("a", "ssh", "-F", "none", "-i", "/home/trainer/.ssh/id_ed25519", "-p", "2222",
                          "-o", "UserKnownHostsFile=/cluster/known_hosts", "-W", "b:2222", "b")  # fmt: skip
    assert outcome.code != 0
    assert "open failed" in outcome.output or "prohibited" in outcome.output, outcome.output


def test_a_node_with_another_host_key_is_refused(own_cluster: Cluster) -> None:
    own_cluster.up()
    own_cluster.compose("stop", "--timeout", "1", "b")
    impostor = f"{own_cluster.project}-impostor"
    succeed(["docker", "run", "--detach", "--name", impostor, "--network", own_cluster.network, "--network-alias", "b",
             "--hostname", "b", "trainer:cpu"])  # fmt: skip
    try:
        outcome = own_cluster.run("a", "horovodrun", "-np", "2", "-H", "a:1,b:1", "hostname")
        assert outcome.code == 1
        why, _ = outcome.output.strip().splitlines()
        assert why == "horovodrun: host b shows another host key than the pinned one, and is refused"
        outcome = own_cluster.run("a", "mpirun", "-np", "2", "-H", "a:1,b:1", "hostname")
        assert outcome.code != 0
        assert "Host key verification failed" in outcome.output
    finally:
        succeed(["docker", "rm", "--force", "--volumes", impostor])


def test_sshd_is_modern(cluster: Cluster) -> None:
    inspect = json.loads(succeed(["docker", "inspect", cluster.container("b")]))[0]
    address = inspect["NetworkSettings"]["Networks"][cluster.network]["IPAddress"]
    outcome = run([sys.executable, "-m", "ssh_audit.ssh_audit", "--json", "--port", "2222", address])
    report = json.loads(outcome.output.splitlines()[-1])
    failures = [
        f"{kind} {entry['algorithm']}: {entry['notes']['fail']}"
        for kind in ("kex", "key", "enc", "mac")
        for entry in report[kind]
        if entry.get("notes", {}).get("fail")
    ]
    assert not failures
    assert report["kex"], "ssh-audit saw no key exchange at all"


def test_keys_are_private_to_their_owner(cluster: Cluster) -> None:
    listing = cluster.shell("a", "find /cluster ~/.ssh -type f -printf '%m %u %p\\n'")
    keys = [line.split() for line in listing.splitlines() if re.search(r"(id_ed25519|host_key|_key)$", line)]
    assert len(keys) >= 5, listing
    assert {(mode, owner) for mode, owner, _ in keys} == {("600", "trainer")}


def test_no_secret_of_the_environment_is_on_a_command_line(cluster: Cluster) -> None:
    secret = "not-for-other-eyes"  # noqa: S105 (what must not be seen)
    script = (
        f"for c in --mpi --gloo; do TOKEN={secret} horovodrun $c -np 4 -H a:2,b:2 python -c "
        # One write, so that no other rank's comes in between.
        '\'import os,time; time.sleep(4); os.write(1, b"arrived %d\\n" % len(os.environ["TOKEN"]))\' & '
        "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do ps axww -o args; ssh b ps axww -o args; sleep 0.5; done; wait; done"
    )
    seen = cluster.shell("a", script)
    assert seen.count(f"arrived {len(secret)}") == 8, seen[-3000:]
    assert "orted" in seen
    assert "remote_exec" in seen
    # The script that sets it is the only one to name it.
    lines = [line for line in seen.splitlines() if secret in line and "for c in --mpi --gloo" not in line]
    assert not lines


def layers(image: str, folder: Path) -> Iterator[tuple[str, tarfile.TarFile]]:
    """Every layer of an image, those included whose files a later one removes; as any version of Docker saves it."""
    saved = folder / "image.tar"
    succeed(["docker", "save", "--output", str(saved), image], timeout_s=280)
    with tarfile.open(saved) as archive:
        manifest = archive.extractfile("manifest.json")
        assert manifest is not None
        names = json.load(manifest)[0]["Layers"]
        assert names, "an image without layers"
        for name in names:
            # Not as a stream, so that large files are passed over and not read.
            with tarfile.open(fileobj=archive.extractfile(name), mode="r:*") as layer:
                yield name, layer
    saved.unlink()


def keys_in(image: str, folder: Path) -> list[str]:
    """Files in any layer of an image that are, or are named like, a private key or a secret."""
    found = []
    for name, layer in layers(image, folder):
        for member in layer:
            if _PUBLIC_TEST_KEY.search(member.name) or not member.isfile():
                continue
            content = layer.extractfile(member)
            text = content.read() if content and member.size < 256 * 1024 else b""
            if _SECRET_NAME.search(member.name) or _PRIVATE_KEY.search(text):
                found.append(f"{member.name} in {name}")
    return found


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize(
    "tag", [IMAGE, pytest.param("trainer:gpu", marks=[pytest.mark.slow, pytest.mark.needs("gpu-image")])]
)
def test_no_layer_of_the_image_holds_a_key(tag: str, tmp_path: Path) -> None:
    assert keys_in(tag, tmp_path) == []
    history = succeed(["docker", "history", "--no-trunc", "--format", "{{.CreatedBy}}", tag])
    assert not re.search(r"password|secret|token|PRIVATE", history, re.IGNORECASE)
