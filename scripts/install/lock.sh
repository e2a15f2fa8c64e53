#!/bin/sh
# Resolves the versions in requirements/ anew, for every supported Python at once.
# Usage: make lock
set -eu
cd "$(dirname "$0")/../.."
compile() {
    output=$1
    shift
    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
        --no-emit-package horovod --output-file "requirements/$output" "$@"
}

shared=$(mktemp)
trap 'rm -f "$shared"' EXIT

compile run.txt --extra horovod --extra examples --extra parameter-server --extra plots --extra tensorboard pyproject.toml
compile build.txt --constraint requirements/run.txt --group build
compile uv.txt --group uv
compile sbom.txt --group sbom
compile audit.txt --group audit
# trackio wants an older Pillow than the rest has, and botocore an older python-dateutil.
awk '/^[^ #]/ { skip = /^(pillow|python-dateutil)==/ } !skip' requirements/run.txt > "$shared"
compile peers.txt --constraint "$shared" --group peers
compile dev.txt --constraint requirements/run.txt --constraint requirements/build.txt --group dev
