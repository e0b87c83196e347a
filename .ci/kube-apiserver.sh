#!/usr/bin/env bash
# Builds a kube-apiserver from Debian's sources into ~/.cache/kvasir/kubernetes, with Debian's etcd beside it, for
# tests/gateway/replicas/test_real_kubernetes.py: no package brings one. Once; seven minutes of two cores and 3 GB meanwhile,
# which is why .ci/run does not call it. Debian 12 has Kubernetes 1.20.2 with all it needs.
set -euo pipefail
there=$HOME/.cache/kvasir/kubernetes
[ ! -x "$there/kube-apiserver" ] || exit 0
. /etc/os-release
if [ "${VERSION_CODENAME:-}" != bookworm ] || [ "$(id -u)" != 0 ]; then
    echo "kube-apiserver is built by root on Debian 12 alone: its test is skipped" >&2
    exit 0
fi
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/deploy/environment"
debian_install rsync jq make gcc libc6-dev
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/sources.d" "$work/debs" "$there"
for file in /etc/apt/sources.list.d/debian.sources; do
    sed 's/^Types: deb$/Types: deb-src/' "$file" >"$work/sources.d/$(basename "$file")"
done
apt="-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$work/sources.d -o Dir::State::lists=$work/lists"
cd "$work"
# shellcheck disable=SC2086  # one word for each option
apt-get -qq $apt update && apt-get -qq $apt source --download-only kubernetes
(cd debs && apt-get -qq download golang-1.19-go golang-1.19-src etcd-server)
for deb in debs/*.deb; do dpkg -x "$deb" "$work/root"; done
tar xzf kubernetes_*.orig.tar.gz
source=$(echo "$work"/kubernetes-1.*)
mkdir -p "$source/.go/src/k8s.io"
ln -s ../../.. "$source/.go/src/k8s.io/kubernetes"
export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$source/.go GO111MODULE=off GOPROXY=off GOCACHE=$work/cache CGO_ENABLED=0
export PATH=$GOROOT/bin:$PATH
(cd "$source/.go/src/k8s.io/kubernetes" && HOME=$work make --silent WHAT=cmd/kube-apiserver) >&2
cp "$work/root/usr/bin/etcd" "$source/_output/local/go/bin/kube-apiserver" "$there/"
