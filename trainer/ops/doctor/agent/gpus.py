"""The GPUs of a host, as nvidia-smi lists them."""

from __future__ import annotations

import subprocess

_FIELDS = (
    "index,name,driver_version,ecc.errors.uncorrected.volatile.total,"
    "clocks_{0}_reasons.hw_thermal_slowdown,clocks_{0}_reasons.hw_power_brake_slowdown"
)


def look() -> str:
    """Return a line for each GPU; empty where there is none."""
    return _query("event") or _query("throttle")  # as drivers before 535 call it


def _query(reasons: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={_FIELDS.format(reasons)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
