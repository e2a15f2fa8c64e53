"""The proof of a request, whatever its header says, and the same arithmetic in the ranks' C++ code."""

from __future__ import annotations

import hashlib
import hmac
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from horovod.runner.http import proof
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.harness import ROOT

KEY = b"k" * 32
PORT = 4711
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
ANYTHING = st.one_of(
    st.text(st.characters(max_codepoint=255), max_size=300),
    st.builds(lambda *parts: " ".join(parts), st.text("0123456789abcdefg", max_size=40), st.text(), HEX, HEX),
)
CPP = """
#include <cstdlib>
#include <iostream>
#include "sha256.h"
using namespace horovod::common;
int main(int, char** arguments) {
  std::string command = arguments[1], first, second;
  while (std::cin >> first >> second) {
    // A dash before the digits, because `>>` reads no empty word.
    first = first.substr(1), second = second.substr(1);
    if (command == "hmac") std::cout << ToHex(HmacSha256(FromHex(first), FromHex(second))) << "\\n";
    if (command == "hex") std::cout << ToHex(FromHex(first)) << "\\n";
    if (command == "equal") std::cout << EqualInConstantTime(first, second) << "\\n";
  }
}
"""
# RFC 4231, section 4: key, data, HMAC-SHA-256; case 5 has its first 128 bits only.
RFC_4231 = [
    (b"\x0b" * 20, b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
    (b"Jefe", b"what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
    (b"\xaa" * 20, b"\xdd" * 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
    (bytes(range(1, 26)), b"\xcd" * 50, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"),
    (b"\x0c" * 20, b"Test With Truncation", "a3b6167473100ee06e0c796c2955552b"),
    (
        b"\xaa" * 131,
        b"Test Using Larger Than Block-Size Key - Hash Key First",
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
    ),
    (
        b"\xaa" * 131,
        b"This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
        b"hashed before being used by the HMAC algorithm.",
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2",
    ),
]


@settings(deadline=None)
@given(
    header=st.one_of(ANYTHING, st.from_regex(proof._FORMAT, fullmatch=True)),  # the latter with a MAC that is guessed
    length=st.one_of(st.none(), st.text(max_size=30), st.just("0")), path=st.text(max_size=30),
)  # fmt: skip
def test_no_header_of_a_stranger_is_a_proof(header: str, length: str | None, path: str) -> None:
    try:
        found = proof.Verifier(KEY).admit(PORT, "GET", path, length, header)
    except UnicodeEncodeError:  # http.server hands over nothing but Latin-1
        assert not path.isascii()
    else:
        assert found is None


@settings(deadline=None)
@given(body=st.binary(max_size=100), method=st.sampled_from(["GET", "PUT", "DELETE"]), position=st.integers(0, 400))
def test_a_changed_digit_makes_a_proof_invalid(body: bytes, method: str, position: int) -> None:
    header, _ = proof.sign(KEY, PORT, method, "/scope/key", body)
    assert proof.Verifier(KEY).admit(PORT, method, "/scope/key", str(len(body)), header) is not None
    at = position % len(header)
    changed = header[:at] + ("1" if header[at] == "0" else "0") + header[at + 1 :]
    assert proof.Verifier(KEY).admit(PORT, method, "/scope/key", str(len(body)), changed) is None


@settings(deadline=None)
@given(status=st.integers(0, 999), body=st.binary(max_size=50), header=ANYTHING)
def test_no_header_of_a_stranger_proves_an_answer(status: int, body: bytes, header: str) -> None:
    header_sent, mac = proof.sign(KEY, PORT, "GET", "/scope/key", b"")
    assert not proof.is_answer(KEY, mac, status, body, header)
    verifier = proof.Verifier(KEY)
    proven = verifier.admit(PORT, "GET", "/scope/key", None, header_sent)
    right = verifier.answer(proven, status, body)
    assert proof.is_answer(KEY, mac, status, body, right)
    assert not proof.is_answer(KEY, mac, status + 1, body, right)
    assert not proof.is_answer(KEY, mac, status, body + b"!", right)
    # The answer to another request, were it the same.
    assert not proof.is_answer(KEY, proof.sign(KEY, PORT, "GET", "/scope/key", b"")[1], status, body, right)


@pytest.fixture(scope="module")
def in_cpp(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """The header that our patch adds to Horovod, compiled by itself."""
    folder = tmp_path_factory.mktemp("sha256")
    patch = (ROOT / "third_party/horovod/patches/launcher/0023-requests-prove-the-secret.patch").read_text()
    lines = patch.split("+++ new/horovod/common/gloo/sha256.h\n")[1].split("\n--- ")[0].splitlines()[1:]
    (folder / "sha256.h").write_text("".join(f"{line[1:]}\n" for line in lines))
    (folder / "main.cc").write_text(CPP)
    program = folder / "main"
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run(["c++", *flags, "-o", program, str(folder / "main.cc")], check=True, timeout=120)

    def call(command: str, *pairs: tuple[str, str]) -> list[str]:
        text = "".join(f"-{first} -{second}\n" for first, second in pairs)
        done = subprocess.run([program, command], input=text, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.splitlines()

    return call


@pytest.mark.needs("compiler")
def test_the_ranks_code_has_the_hmac_of_rfc_4231(in_cpp: Callable[..., list[str]]) -> None:
    found = in_cpp("hmac", *((key.hex(), data.hex()) for key, data, _ in RFC_4231))
    assert [mac[: len(expected)] for mac, (_, _, expected) in zip(found, RFC_4231, strict=True)] == [
        expected for _, _, expected in RFC_4231
    ]


@pytest.mark.needs("compiler")
def test_the_ranks_code_agrees_with_python_at_every_length(in_cpp: Callable[..., list[str]]) -> None:
    pairs = [(bytes(range(length % 100)), bytes(n * 7 % 256 for n in range(length))) for length in range(300)]
    found = in_cpp("hmac", *((key.hex(), data.hex()) for key, data in pairs))
    assert found == [hmac.new(key, data, hashlib.sha256).hexdigest() for key, data in pairs]


@pytest.mark.needs("compiler")
def test_the_ranks_code_reads_and_compares_digits(in_cpp: Callable[..., list[str]]) -> None:
    everything = bytes(range(256)).hex()
    assert in_cpp("hex", (everything, ""), ("", ""), ("abc", ""), ("zz", "")) == [everything, "", "ab", "00"]
    assert in_cpp("equal", ("ab", "ab"), ("ab", "aa"), ("ab", "abc"), ("", ""), ("", "a")) == ["1", "0", "0", "1", "0"]


def test_the_patch_is_the_one_that_is_built() -> None:
    assert Path(proof.__file__).read_text() in "".join(
        f"{line[1:]}\n"
        for line in (ROOT / "third_party/horovod/patches/launcher/0023-requests-prove-the-secret.patch")
        .read_text()
        .splitlines()
    )
