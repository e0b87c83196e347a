#!/usr/bin/env bash
# Puts Python 3.14 of Debian's unstable release, with the C library that it needs, into ~/.cache/kvasir/python3.14, for
# tests/e2e/test_package.py: once, and bounded in time.
set -euo pipefail
there=$HOME/.cache/kvasir/python3.14
[ ! -x "$there/usr/bin/python3.14" ] || exit 0
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/deploy/environment"
missing="there is no Python 3.14: a test with it is skipped"
if [ "$(uname -sm)" != "Linux x86_64" ] || ! command -v apt-get >/dev/null || ! debian_install patchelf; then
    say "$missing"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
mkdir -p "$work/lists/partial" "$work/debs" "$work/root"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main" >"$work/sid.list"
apt="-qq -o APT::Sandbox::User=root -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o Dir::Etc::sourcelist=$work/sid.list -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists=$work/lists"
packages="python3.14-minimal libpython3.14-minimal libpython3.14-stdlib libc6 libexpat1 zlib1g libssl3t64 libffi8 libbz2-1.0"
packages+=" liblzma5 libsqlite3-0 libuuid1 libzstd1 libcrypt1"
unpack() {
    for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/root" || return; done
    local loader
    loader=$(cd "$work/root" && find . -name ld-linux-x86-64.so.2 -type f)
    patchelf --set-interpreter "$there/${loader#./}" --force-rpath --set-rpath "$there/usr/lib/x86_64-linux-gnu" \
        "$work/root/usr/bin/python3.14" &&
        mkdir -p "$(dirname "$there")" && rm -rf "$there" && mv "$work/root" "$there" &&
        "$there/usr/bin/python3.14" -c "import ssl, sqlite3, zlib"
}
# shellcheck disable=SC2086  # one word for each option and package
if ! timeout 120 apt-get $apt update >&2 || ! (cd "$work/debs" && timeout 120 apt-get $apt download $packages >&2) ||
    ! unpack; then
    rm -rf "$there"
    say "$missing"
fi
