"""Podman with a storage of its own: builds images of deploy/Dockerfile, runs containers, and leaves nothing behind.

What a small virtual machine needs, and no other is harmed by: runc, because crun 1.8 refuses cgroups of both versions;
small limits, because without CAP_SYS_RESOURCE none can be raised; builds in the host's network.
Without systemd health checks have no timer: tests run them.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = Path.home() / ".cache/kvasir/images"
BUILD_S, COMMAND_S, START_S = 900.0, 180.0, 120.0
LOOK_S = 0.1
MOST_FILES, MOST_PROCESSES = 20_000, 4096  # of a container
INDEX_OPTIONS = (
    "index-url",
    "extra-index-url",
    "find-links",
    "cert",
    "trusted-host",
    "proxy",
    "default-timeout",
    "timeout",
)

CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile={nofile}:{nofile}", "nproc={nproc}:{nproc}"]
[engine]
runtime = "runc"
[network]
network_backend = "netavark"
"""
STORAGE_CONF = """
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "{folder}/run"
"""


class Podman:
    """`folder` is this object's own, and may be removed after `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        nofile = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], MOST_FILES)
        (folder / "containers.conf").write_text(CONTAINERS_CONF.format(nofile=nofile, nproc=MOST_PROCESSES))
        (folder / "storage.conf").write_text(STORAGE_CONF.format(folder=folder))
        self.environ = {name: text for name, text in os.environ.items() if not name.startswith("KVASIR_")} | {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }

    def __call__(self, *arguments: str, fails: bool = False, timeout_s: float = COMMAND_S) -> str:
        """What a command printed. Raises AssertionError with its errors where it fails, or, with `fails`, does not."""
        done = subprocess.run(
            ["podman", *arguments], env=self.environ, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT
        )
        assert (done.returncode != 0) is fails, f"{arguments}: {done.stdout[-3000:]} {done.stderr[-3000:]}"
        return done.stdout.strip()

    def build(self, target: str, tag: str, base: str, *options: str) -> dict[str, Any]:
        """An image of deploy/Dockerfile on the bases of .ci/images.sh; returns what it is."""
        for name in {"builder", base}:
            if not self("images", "--quiet", f"localhost/kvasir-{name}"):
                self("import", str(CACHE / f"{name}.tar"), f"localhost/kvasir-{name}:latest")
        secret, mounts = self._pip_conf()
        self(
            *("build", "--layers", "--format", "docker", "--network", "host", "--file", "deploy/Dockerfile"),
            *("--target", target, "--tag", tag, "--secret", f"id=pip.conf,src={secret}"),
            *("--build-arg", "BUILDER=localhost/kvasir-builder", "--build-arg", f"BASE=localhost/kvasir-{base}"),
            *(word for path in mounts for word in ("--volume", f"{path}:{path}:ro")),
            *(*options, "."),
            timeout_s=BUILD_S,
        )
        (found,) = json.loads(self("image", "inspect", tag))
        return dict(found)

    def _pip_conf(self) -> tuple[Path, list[str]]:
        """Where this machine's pip finds packages, as a pip.conf, and the files that it names. Indexes that are folders
        are left out: what their pages link to may lie anywhere."""
        command = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        options: dict[str, list[str]] = {}
        for line in sorted(listed.stdout.splitlines(), reverse=True):  # those of the environment, `:env:`, win
            name, _, value = line.partition("=")
            if (name := name.rpartition(".")[2]) in INDEX_OPTIONS:
                options[name] = [word for word in ast.literal_eval(value).split() if not word.startswith("file:")]
        words = [word for values in options.values() for word in values if word.startswith("/") and Path(word).exists()]
        file = self._folder / "pip.conf"
        lines = [
            f"{name.removeprefix('default-')} = {' '.join(values)}\n" for name, values in options.items() if values
        ]
        file.write_text("[global]\n" + "".join(lines))
        return file, words

    def address(self, container: str) -> str:
        """Of a container in its network."""
        return self("inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", container)

    def logs(self, container: str) -> str:
        command = ["podman", "logs", container]
        merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(command, env=self.environ, text=True, timeout=COMMAND_S, **merged).stdout

    def wait_exit(self, container: str) -> int:
        return int(self("wait", container))

    def close(self) -> None:
        """Ends and removes all containers, and unmounts everything."""
        self("rm", "--all", "--force", "--volumes", "--time", "0")
        self("rmi", "--all", "--force")


def wait(holds: Any, what: str, limit_s: float = START_S) -> None:
    """Until `holds()` is true; an OSError is not yet. Raises TimeoutError."""
    give_up_s = time.monotonic() + limit_s
    while True:
        try:
            if holds():
                return
        except OSError:
            pass
        if time.monotonic() > give_up_s:
            raise TimeoutError(what)
        time.sleep(LOOK_S)
