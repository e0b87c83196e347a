#!/usr/bin/env bash
# Sets up a vLLM for the CPU in ~/.cache/kvasir/vllm, for tests with real replicas: pinned, once, and bounded in time.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
[ ! -f "$HOME/.cache/kvasir/vllm/kvasir-complete" ] || exit 0
. "$root/deploy/environment"
prepare engine,fleet,otel,semantic,test
mkdir -p "$HOME/.cache/kvasir"
cd "$root"
timeout 900 .venv/bin/python -m tests.bench.vllm_setup >&2 ||
    echo "vLLM could not be set up: tests with real replicas are skipped" >&2
