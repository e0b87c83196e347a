#!/usr/bin/env bash
# Installs the command line agents that tests/e2e/test_cli_agents.py runs into .clients: pinned, once, and bounded in time.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
wanted="@anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0 @google/gemini-cli@0.61.0"
stamp=$root/.clients/installed
[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || exit 0
command -v npm >/dev/null || {
    echo "npm is not there: tests of command line agents are skipped" >&2
    exit 0
}
mkdir -p "$root/.clients"
# shellcheck disable=SC2086  # one word for each package
if timeout 600 npm install --prefix "$root/.clients" --no-audit --no-fund --no-save --loglevel error $wanted >&2; then
    echo "$wanted" >"$stamp"
else
    echo "the command line agents could not be installed: their tests are skipped" >&2
fi
