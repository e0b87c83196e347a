#!/usr/bin/env bash
# Installs the clients that tests/e2e/test_clients.py runs, and axe-core for test_dashboard.py, into .clients: pinned,
# once, and bounded in time. Python's are in .ci/clients.txt, all that they need included.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
there=$root/.clients
mkdir -p "$there"

npm="@anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0 @google/gemini-cli@0.61.0"
npm+=" ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/anthropic@3.0.140 @ai-sdk/google@3.0.141 zod@4.6.7 axe-core@4.14.1"
if [ "$(cat "$there/installed" 2>/dev/null)" != "$npm" ]; then
    # shellcheck disable=SC2086  # one word for each package
    if ! command -v npm >/dev/null; then
        echo "npm is not there: tests of its clients are skipped" >&2
    elif timeout 600 npm install --prefix "$there" --no-audit --no-fund --no-save --loglevel error $npm >&2; then
        echo "$npm" >"$there/installed"
    else
        echo "clients from npm could not be installed: their tests are skipped" >&2
    fi
fi

python=$there/python
if ! cmp -s "$root/.ci/clients.txt" "$python/installed"; then
    rm -rf "$python"
    if timeout 60 python3 -m venv "$python" && timeout 600 "$python/bin/python" -m pip install --quiet \
        --disable-pip-version-check --no-compile --no-deps --only-binary :all: -r "$root/.ci/clients.txt" >&2; then
        cp "$root/.ci/clients.txt" "$python/installed"
    else
        rm -rf "$python"
        echo "clients from PyPI could not be installed: their tests are skipped" >&2
    fi
fi
