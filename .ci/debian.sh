#!/usr/bin/env bash
# Installs a browser, a font, promtool, compilers and an emulator for ARM, and nftables from Debian, and playwright into
# the virtual environment, for tests of the dashboard, of /metrics, of the attention kernel and of faults: once, and
# bounded in time. Debian keeps only its newest Chromium.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/deploy/environment"

packages="chromium fonts-dejavu-core prometheus clang gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user iproute2 nftables e2fsprogs"
# shellcheck disable=SC2086  # one word for each package
if ! dpkg-query -W $packages >/dev/null 2>&1; then
    # At this run level Debian does not start the Prometheus that comes with promtool.
    export -f debian_install say
    RUNLEVEL=1 timeout 900 bash -c 'debian_install "$@"' bash $packages ||
        say "Chromium, promtool, a compiler or an emulator is not there: tests that need them are skipped"
fi

wanted="playwright==1.65.2 greenlet==3.5.6 pyee==13.0.1"
stamp=$root/.venv/.installed-playwright
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    prepare engine,fleet,otel,semantic,test
    # shellcheck disable=SC2086  # one word for each package
    if timeout 300 "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --only-binary :all: $wanted >&2; then
        echo "$wanted" >"$stamp"
    else
        say "playwright could not be installed: tests in a browser are skipped"
    fi
fi
