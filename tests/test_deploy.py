"""Every file of deploy/ is run by a test, or says in its first lines what could not be run."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
RUN_BY = {
    "Dockerfile": "e2e/test_images.py",
    "compose.yaml": "e2e/test_images.py",
    "compose/kvasir.toml": "e2e/test_images.py",
    "compose/prometheus.yml": "e2e/test_images.py",
    "constraints.txt": "test_deploy.py",
    "environment": "test_deploy.py",
    "examples/anthropic_caching.py": "e2e/test_anthropic_caching.py",
    "examples/claude-code-on-a-local-model.toml": "e2e/test_clients.py",
    "examples/*.toml": "gateway/test_config.py",
    "grafana/kvasir.json": "e2e/test_grafana.py",
    "healthcheck.py": "test_images.py",
    "helm/kvasir/*": "test_helm.py",
    "prometheus/*": "test_alerts.py",
    "sbom.py": "test_dependencies.py",
    "serve": "test_deploy.py",
    "systemd/*.service": "test_systemd.py",
}
"""By a pattern below deploy/, the first that matches: a test, which names the file or a folder that it is in."""

NOT_RUN = {"compose/grafana-*.yaml"}
"""Their first lines say why."""


def test_every_file_of_deploy_is_run_by_a_test_or_says_what_could_not_be_run() -> None:
    listed = subprocess.run(["git", "ls-files", "deploy"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = [name.removeprefix("deploy/") for name in listed.stdout.split()]
    used = set()
    for name in names:
        pattern = next((one for one in (*RUN_BY, *NOT_RUN) if fnmatch.fnmatchcase(name, one)), None)
        assert pattern is not None, f"deploy/{name}: who runs it?"
        used.add(pattern)
        if pattern in NOT_RUN:
            assert "Not run:" in (ROOT / "deploy" / name).read_text().partition("\n")[0], name
        else:
            text = (ROOT / "tests" / RUN_BY[pattern]).read_text()
            parts = Path(name).parts
            assert parts[-1] in text or any(f"deploy/{folder}" in text for folder in parts[:1]), (name, RUN_BY[pattern])
    assert used == {*RUN_BY, *NOT_RUN}, "a pattern without a file"


def test_serve_installs_what_is_pinned_once_and_hands_its_flags_over(tmp_path: Path) -> None:
    """In a folder whose virtual environment only writes down what it is asked."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy", ignore=shutil.ignore_patterns("helm"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    programs, asked = tmp_path / ".venv/bin", tmp_path / "asked"
    programs.mkdir(parents=True)
    for name in ("python", "kvasir"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >>"{asked}"\n')
        (programs / name).chmod(0o755)

    def serve() -> list[str]:
        asked.unlink(missing_ok=True)
        command = [str(tmp_path / "deploy/serve"), "--model", "a b"]
        subprocess.run(command, check=True, capture_output=True, timeout=60, env={"PATH": os.environ["PATH"]})
        return [line for line in asked.read_text().splitlines() if not line.startswith("python -c")]

    install, start = serve()
    assert start == "kvasir serve --model a b"
    assert install.startswith("python -m pip install")
    assert (
        f"--constraint {tmp_path}/deploy/constraints.txt --editable {tmp_path}[engine,fleet,otel,semantic]" in install
    )
    assert serve() == [start], "nothing has changed"
    with (tmp_path / "deploy/constraints.txt").open("a") as file:
        file.write("another==1.0\n")
    assert serve() == [install, start]


def test_every_dependency_is_pinned_to_a_version_in_its_range() -> None:
    lines = (ROOT / "deploy/constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(one.name): one for one in map(Requirement, (x for x in lines if not x.startswith("#")))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    for wanted in map(Requirement, [*project["dependencies"], *(text for extra in extras for text in extra)]):
        ((operator, version),) = [(one.operator, one.version) for one in pins[canonicalize_name(wanted.name)].specifier]
        assert operator == "=="
        assert wanted.specifier.contains(version), wanted
