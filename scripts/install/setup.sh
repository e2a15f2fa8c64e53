#!/bin/sh
# Finds (or, as root on Debian and Ubuntu, installs) a Python that can run the set-up, and runs it.
# Usage: make run | make test; PYTHON=python3.12 chooses one.
set -eu
here=$(dirname "$0")

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" && echo "$PYTHON"
        return
    fi
    # The system's own first: its packages are the ones that apt-get can complete.
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if usable "$candidate"; then echo "$candidate"; return; fi
    done
}

python=$(find_python || true)
if [ -z "$python" ] && [ -z "${PYTHON:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo 'trainer: there is no Python 3.11 to 3.14; installing python3 with apt-get' >&2
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3 python3-venv >/dev/null
    python=$(find_python)
fi
if [ -z "$python" ]; then
    echo "trainer: Python ${PYTHON:+$PYTHON }is not 3.11 to 3.14; install one of them, for instance:" \
        'sudo apt-get install python3.11 python3.11-venv python3.11-dev' >&2
    exit 1
fi
exec "$python" "$here/environment.py" "$@"
