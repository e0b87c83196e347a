#!/usr/bin/env bash
# Installs what tests/e2e/test_images.py builds and runs containers with, and makes the images that they begin with, of
# Debian 12's packages in ~/.cache/kvasir/images, so that no registry is needed: once, and bounded in time.
#   builder.tar   Python with venv, apt
#   base.tar      what Python needs to run, a shell and coreutils
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/deploy/environment"
there=$HOME/.cache/kvasir/images

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "containers are run by root on Debian alone: tests of images are skipped"
    exit 0
fi
packages="podman runc netavark aardvark-dns catatonit iptables debootstrap"
# shellcheck disable=SC2086  # one word for each package
if [ "$(dpkg-query -W -f '${db:Status-Status}\n' $packages 2>&1 | sort -u)" != installed ]; then # it may know others
    export -f debian_install say
    if ! timeout 600 bash -c 'debian_install "$@"' bash $packages; then
        say "podman is not there: tests of images are skipped"
        exit 0
    fi
fi
compose=podman-compose==1.6.0
if [ "$(cat "$there/compose/installed" 2>/dev/null)" != "$compose" ]; then
    rm -rf "$there/compose"
    if python3 -m venv "$there/compose" && timeout 300 "$there/compose/bin/pip" install --quiet \
        --disable-pip-version-check --only-binary :all: "$compose" >&2; then
        echo "$compose" >"$there/compose/installed"
    else
        rm -rf "$there/compose"
        say "podman-compose could not be installed: its tests are skipped"
    fi
fi

wanted="bookworm 1"
[ "$(cat "$there/made" 2>/dev/null)" != "$wanted" ] || exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$there"
say "making the images that containers begin with; this takes a few minutes"
if ! timeout 900 debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work/root" \
    http://deb.debian.org/debian >"$work/log" 2>&1; then
    tail -3 "$work/log" >&2
    say "debootstrap failed: tests of images are skipped"
    exit 0
fi
rm -rf "$work"/root/var/cache/apt/* "$work"/root/var/lib/apt/lists/* "$work"/root/debootstrap
cd "$work/root"
tar -cf "$there/builder.tar.part" --exclude='./proc/*' --exclude='./sys/*' --exclude='./dev/*' .
# Files of these packages and of all that they depend on; dpkg and tar are not needed when nothing is installed.
python3 - >"$work/names" <<'NAMES'
import os, re
from pathlib import Path

IS_LEFT_OUT = re.compile(r"/usr/share/(doc|man|info|locale|lintian|bug|menu)/|/gconv/|/dist-packages/")
left_out, wanted = {"dpkg", "tar"}, ["python3", "dash", "coreutils", "base-files", "libstdc++6"]
needs = {}
for paragraph in Path("var/lib/dpkg/status").read_text().split("\n\n"):
    fields = dict(re.findall(r"^([\w-]+): (.*)$", paragraph, re.MULTILINE))
    depends = f"{fields.get('Depends', '')},{fields.get('Pre-Depends', '')}"
    needs[fields.get("Package")] = re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9.+-]+)", depends)
kept = set()
while wanted:
    package = wanted.pop()
    if package in needs and package not in kept | left_out:
        kept.add(package)
        wanted += needs[package]
names = {"bin", "lib", "lib64", "sbin", "tmp", "etc/passwd", "etc/group", "etc/ld.so.cache"}
names.add("etc/ssl/certs/ca-certificates.crt")
for package in kept:
    for listed in Path("var/lib/dpkg/info").glob(f"{package}[.:]*list"):
        for line in listed.read_text().splitlines():
            name = Path(line.lstrip("/"))
            if not IS_LEFT_OUT.search(line) and (name.is_symlink() or name.is_file()):
                names.add(os.path.relpath(name.parent.resolve() / name.name))  # /lib is a link
names |= {str(path) for path in Path("usr/lib").glob("python3.*/**/*.pyc")}
print("\n".join(sorted(name for name in names if os.path.lexists(name))))
NAMES
tar -cf "$there/base.tar.part" --no-recursion --files-from "$work/names"
mv "$there/builder.tar.part" "$there/builder.tar"
mv "$there/base.tar.part" "$there/base.tar"
echo "$wanted" >"$there/made"
