"""Sends inputs to one target, in a process of its own: Atheris, with libFuzzer's mutations guided by Python's branches.

    python -m tests.security.fuzz.driver TARGET INPUTS REPORT [SEED]

It collects findings instead of ending at the first. What ends the process all the same (a crash, a hang of `HANGS_S`)
is seen by who has started it.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import atheris

from tests.security.fuzz.target import INSTRUMENTED, LARGEST, Target

SLOW_S, HANGS_S, MOST_MB = 1.0, 20, 64.0
"""Seconds of a processor for an input; seconds after which the process is ended; memory beside that at the start."""
_ADDRESS_MB = 1024
"""More than this cannot even be asked for, so an allocation that nobody touches is a finding as well."""
MOST_KINDS = 20


class Driver:
    """Counts inputs and collects what they have found, one of each kind.

    Args:
        report: the file of JSON that gets the result.
    """

    def __init__(self, target: Target, inputs: int, report: Path) -> None:
        self._target, self._inputs, self._report = target, inputs, report
        self._count = 0
        self._findings: dict[str, str] = {}
        for data in target.valid():
            target.run(data)
        self._start_mb, self._began = 0.0, 0.0

    def _begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of what came before, as of the imports, does not count
        self._start_mb, self._began = peak_mb(), time.monotonic()
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (_ADDRESS_MB << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def take(self, data: bytes) -> None:
        """Send one input; end the process after the last."""
        if not self._count:
            self._begin()
        self._count += 1
        began = time.process_time()
        try:
            self._target.run(data)
        except BaseException as error:
            self._note(f"{type(error).__name__} in {_place(error)}", data)
        if (took := time.process_time() - began) > SLOW_S:
            self._note(f"takes longer than {SLOW_S:g} s", data, f"{took:.1f} s")
        if (used := peak_mb() - self._start_mb) > MOST_MB:
            self._note(f"takes more than {MOST_MB:g} MB", data, f"{used:.0f} MB")
        if self._count == self._inputs or len(self._findings) >= MOST_KINDS:
            self._end()

    def _note(self, kind: str, data: bytes, more: str = "") -> None:
        if kind not in self._findings:
            path = self._report.with_name(f"{self._report.stem}-{hashlib.sha256(data).hexdigest()[:12]}")
            path.write_bytes(data)
            self._findings[kind] = f"{kind}{f': {more}' if more else ''} ({path})"

    def _end(self) -> None:
        seconds = time.monotonic() - self._began
        result = {"inputs": self._count, "seconds": seconds, "peak_mb": max(0.0, peak_mb() - self._start_mb)}
        self._report.write_text(json.dumps({**result, "findings": list(self._findings.values())}))
        os._exit(0)


def peak_mb() -> float:
    """Return the largest memory that this process has had since `clear_refs`. Called after every input."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"


def _targets() -> Sequence[Target]:
    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from tests.security.fuzz.targets import TARGETS
    return TARGETS


def main(name: str, inputs: str, report: str, seed: str = "1") -> None:
    """Fuzz a target."""
    target = next(target for target in _targets() if target.name == name)
    driver = Driver(target, int(inputs), Path(report).resolve())
    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(target.valid()):
            Path(corpus, str(number)).write_bytes(data)
        # Seeds that were never valid find the first branches; the length is not raised step by step.
        options = [f"-seed={seed}", f"-max_len={LARGEST}", "-len_control=0", f"-timeout={HANGS_S}", "-rss_limit_mb=0"]
        prefix = f"-artifact_prefix={driver._report.with_suffix('')}-"
        atheris.Setup([sys.argv[0], *options, prefix, "-print_final_stats=0", "-verbosity=0", corpus], driver.take)
        atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
