#!/usr/bin/env bash
# Needs a network: asks PyPI's vulnerability service about every package of deploy/constraints.txt, and writes what an
# installation consists of to dist/kvasir.cdx.json (CycloneDX). Run it before a release, and every night: exit status 0
# says that the service knows of nothing. Not part of .ci/run, which runs without a network. A package that the service
# cannot be asked about fails it too (--strict).
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/deploy/environment"
prepare engine,fleet,otel,semantic,test
mkdir -p "$root/dist"
"$root/.venv/bin/python" "$root/deploy/sbom.py" >"$root/dist/kvasir.cdx.json"

tools=$HOME/.cache/kvasir/audit wanted="pip-audit==2.10.1"
if [ "$(cat "$tools/.installed" 2>/dev/null)" != "$wanted" ]; then
    "$root/.venv/bin/python" -m venv --clear "$tools"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check "$wanted" >&2
    echo "$wanted" >"$tools/.installed"
fi
exec "$tools/bin/pip-audit" --strict --no-deps --disable-pip --requirement "$root/deploy/constraints.txt" "$@"
