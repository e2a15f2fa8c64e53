"""Asks PyPI which of the locked packages have published vulnerabilities: `make audit`.

    python scripts/audit.py requirements/run.txt

pip-audit asks. Where its data does not answer, it skips a package and still ends with "no known vulnerabilities": here
that is a failure of its own. Exit codes: 0 nothing is known of any package, 1 something is, 3 not all could be asked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NOT_ASKED = 3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("locks", nargs="+", type=Path, metavar="FILE", help="locked requirements, with hashes")
    codes = [judge(lock, audit(lock)) for lock in parser.parse_args().locks]
    return 1 if 1 in codes else max(codes)


def audit(lock: Path) -> list[dict[str, Any]]:
    """Return pip-audit's answer for each package of a lock.

    Raises:
        SystemExit: it has none, as where nothing answers at all.
    """
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--require-hashes", "--disable-pip"]
    asked = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    try:
        packages: list[dict[str, Any]] = json.loads(asked.stdout)["dependencies"]
    except (json.JSONDecodeError, KeyError, TypeError):
        reason = (asked.stderr.strip() or f"exit code {asked.returncode}").splitlines()[-1]
        print(f"audit: {lock}: NOTHING WAS CHECKED: {reason}", file=sys.stderr)
        raise SystemExit(NOT_ASKED) from None
    return packages


def judge(lock: Path, packages: list[dict[str, Any]]) -> int:
    """Say what is known of a lock's packages, and return the exit code for it."""
    skipped = [package for package in packages if "skip_reason" in package]
    vulnerable = [package for package in packages if package.get("vulns")]
    for package in vulnerable:
        for advisory in package["vulns"]:
            mended = ", ".join(advisory["fix_versions"]) or "no version yet"
            print(f"{package['name']} {package['version']}: {advisory['id']}, mended in {mended}")
    asked = len(packages) - len(skipped)
    print(f"audit: {lock}: {asked} of {len(packages)} packages checked, {len(vulnerable)} with a known vulnerability")
    if skipped:
        what = "NOTHING WAS CHECKED" if not asked else f"{len(skipped)} NOT CHECKED"
        print(f"audit: {lock}: {what}: {skipped[0]['skip_reason']}", file=sys.stderr)
    return 1 if vulnerable else NOT_ASKED if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
