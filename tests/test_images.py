"""deploy/Dockerfile and deploy/compose.yaml: their text, held to the project. tests/e2e/test_images.py runs them."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import EngineSettings, load
from engine.protocol import HEALTH_PATH
from gateway.cli import _parser
from gateway.config import Settings, replica_of_flag
from tests.fakes.certificates import Authority
from tests.fakes.gateway import running
from tests.test_helm import CHART

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
HEALTH_CHECK = DEPLOY / "healthcheck.py"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("gateway", "gateway-gpu", "engine")


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions and their arguments of each stage of the Dockerfile; those before the first are of stage `""`."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, arguments = line.partition(" ")
        if instruction == "FROM":
            _, name = arguments.split(" AS ")
            found[name] = []
        found[name].append((instruction, arguments.strip()))
    return found


STAGES = stages()


def image_of(stage: str) -> list[tuple[str, str]]:
    """Of a stage and those that it begins from."""
    (_, first), *own = STAGES[stage]
    parent = first.split(" AS ")[0]
    return [*(image_of(parent) if parent in STAGES else []), *own]


def last(stage: str, instruction: str) -> str:
    return [arguments for name, arguments in image_of(stage) if name == instruction][-1]


def environment(stage: str) -> dict[str, str]:
    return dict(one.split("=", 1) for name, text in image_of(stage) if name == "ENV" for one in shlex.split(text))


@pytest.mark.parametrize("target", ["gateway", "full"])
def test_an_image_runs_as_the_user_of_the_chart_and_keeps_its_data_in_one_volume(target: str) -> None:
    helpers = (CHART / "templates/_helpers.tpl").read_text()
    ids = [re.search(rf"^runAs{kind}: (\d+)$", helpers, re.MULTILINE) for kind in ("User", "Group")]
    owner = ":".join(found[1] for found in ids if found)
    assert last(target, "USER") == owner
    assert ("COPY", f"--from=source --chown={owner} /data /data") in image_of(target)
    environ = environment(target)
    settings = load(Settings, file=None, environ=environ, flags={})
    assert last(target, "VOLUME") == last(target, "WORKDIR") == str(settings.server.data_dir) == environ["HOME"]
    assert environ["PYTHONDONTWRITEBYTECODE"] == "1", "its root can be read-only"


@pytest.mark.parametrize("target", ["gateway", "full"])
def test_an_image_listens_on_the_port_that_it_exposes_and_ends_at_the_signal_that_drains(target: str) -> None:
    settings = load(Settings, file=None, environ=environment(target), flags={})
    assert (settings.server.host, str(settings.server.port)) == ("0.0.0.0", last(target, "EXPOSE"))
    assert last(target, "STOPSIGNAL") == "SIGTERM"
    command = json.loads(last(target, "ENTRYPOINT")) + json.loads(last(target, "CMD"))
    assert command == ["kvasir", {"gateway": "gateway", "full": "serve"}[target]]
    assert _parser().parse_args(command[1:]).command == command[1]
    assert environment(target)["PATH"].startswith("/opt/kvasir/bin:"), "the chart's command is found too"


def test_nothing_in_the_dockerfile_is_for_one_architecture() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    own = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    assert not re.findall(r"x86|amd64|aarch64|arm64|--platform", own)
    assert dict(one.split("=", 1) for _, one in STAGES[""]) == {"BUILDER": "python:3.13-slim", "BASE": "${BUILDER}"}


def test_what_is_installed_is_pinned_and_what_the_extras_are_called() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for stage, torch in (("gateway-build", False), ("full-build", True)):
        (install,) = [text for name, text in STAGES[stage] if name == "RUN" and "pip install" in text]
        (asked,) = re.findall(r"'\.\[(.*)\]'", install)
        assert set(asked.split(",")) <= set(extras) - {"test"}
        assert ("engine" in asked) is torch
        assert "--constraint deploy/constraints.txt" in install
        assert "required" not in install, "a pip.conf of one's own is optional"


def is_ignored(name: str) -> bool:
    """As .dockerignore says of a path: the last pattern that matches it, or a folder that it is in, decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().split():
        pattern, inverse = line.removeprefix("!"), line.startswith("!")
        parents = [name, *map(str, Path(name).parents)]
        if any(fnmatch.fnmatchcase(one, pattern.removeprefix("**/")) for one in parents) or (
            pattern.startswith("**/") and pattern[3:] in Path(name).parts
        ):
            ignored = not inverse
    return ignored


def test_what_the_dockerfile_copies_is_there_and_is_sent_and_nothing_else_is() -> None:
    copied = [
        name
        for stage in STAGES.values()
        for instruction, text in stage
        if instruction == "COPY" and "--from" not in text
        for name in text.split()[:-1]
    ]
    assert "pyproject.toml" in copied
    assert not [name for name in copied if not (ROOT / name).exists() or is_ignored(name)]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    sent = {name for name in listed if not is_ignored(name)}
    assert {name for name in sent if not name.startswith(("gateway/", "engine/"))} == {
        name for name in copied if (ROOT / name).is_file()
    }
    for name in (".git/config", ".venv/bin/python", ".env", "gateway/__pycache__/cli.pyc", "tests/conftest.py"):
        assert is_ignored(name), name


# -- the health check --------------------------------------------------------------------------------------------------


def check(port: int, *arguments: str) -> int:
    """The exit status of the health check with the standard library alone, as in the images."""
    command = [sys.executable, "-I", "-S", str(HEALTH_CHECK), *arguments]
    return subprocess.run(command, env={"KVASIR_SERVER_PORT": str(port)}, timeout=30).returncode


class _Handler(BaseHTTPRequestHandler):
    status = 200
    paths: list[str]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(status: int, tls: Path | None = None) -> Iterator[tuple[int, list[str]]]:
    """A server's port, and the paths that it was asked for."""
    paths: list[str] = []
    handler = type("Handler", (_Handler,), {"status": status, "paths": paths})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls / "tls.crt", tls / "tls.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1], paths
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("with_tls", [False, True])
@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check_asks_in_plain_text_and_over_tls(status: int, with_tls: bool, tmp_path: Path) -> None:
    tls = Authority().issue(tmp_path / "tls") if with_tls else None
    with answering(status, tls) as (port, paths):
        assert check(port) == (0 if status == 200 else 1)
        assert check(1, str(port), HEALTH_PATH) == (0 if status == 200 else 1), "of an engine"
    assert paths == ["/health/liveness", HEALTH_PATH]
    assert check(port) == 1, "there is no server any more"


async def test_a_gateway_without_an_engine_is_alive() -> None:
    async with running() as gateway:
        gateway.state |= {"engines": []}
        assert (await gateway.get("/health/readiness"))[0] == 503
        arguments = ("-I", str(HEALTH_CHECK), str(gateway.port), "/health/liveness")
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
        assert await process.wait() == 0


@pytest.mark.parametrize("target", ["gateway", "full"])
def test_docker_waits_longer_than_the_health_check_does(target: str) -> None:
    options, _, command = last(target, "HEALTHCHECK").partition(" CMD ")
    assert json.loads(command) == ["python3", "-I", f"/opt/kvasir/{HEALTH_CHECK.name}"]
    assert ("COPY", f"deploy/{HEALTH_CHECK.name} /opt/kvasir/") in STAGES["source"]
    (limit_s,) = re.findall(r"^TIMEOUT_S = ([\d.]+)", HEALTH_CHECK.read_text(), re.MULTILINE)
    timeout = re.search(r"--timeout=(\d+)s", options)
    assert timeout is not None
    assert int(timeout[1]) > 2 * float(limit_s)


# -- compose -----------------------------------------------------------------------------------------------------------


def filled(value: str) -> str:
    """With the default of each variable, `x` where there is none."""
    return re.sub(r"\$\{\w+(?::([-?])([^}]*))?\}", lambda found: found[2] if found[1] == "-" else "x", value)


@pytest.mark.parametrize("name", OURS)
def test_a_service_of_ours_is_a_target_with_settings_that_it_takes(name: str) -> None:
    service = SERVICES[name]
    build = service["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    target = build["target"]
    environ = {key: filled(value) for key, value in service["environment"].items() if value is not None}
    file = environ.pop("KVASIR_CONFIG", None)
    mounts = dict(one.split(":")[:2][::-1] for one in service["volumes"])
    arguments = _parser().parse_args(service["command"])
    replicas = [replica_of_flag(text) for text in getattr(arguments, "replica", ())]
    settings = load(
        Settings,
        file=DEPLOY / mounts[file] if file else None,
        environ=environment(target) | environ,
        flags={},
        tables={"replicas": replicas},
    )
    assert settings.redis.url == "redis://redis:6379/0"
    assert "redis" in service["depends_on"]
    assert [one.url for one in settings.replicas] == (["http://vllm:8000"] if name == "gateway-gpu" else [])
    assert mounts[last(target, "VOLUME")] in COMPOSE["volumes"]
    drain_s = EngineSettings().drain_s if name == "engine" else settings.server.shutdown_s
    assert float(service["stop_grace_period"].removesuffix("s")) > drain_s + 10
    if name == "engine":
        port = settings.engine.listen.rpartition(":")[2]
        assert settings.engine.advertise == f"http://{name}:{port}"
        assert service["healthcheck"]["test"][1:] == ["python3", "-I", "/opt/kvasir/healthcheck.py", port, HEALTH_PATH]
    else:
        assert service["ports"] == [f"${{KVASIR_ADDRESS:-127.0.0.1}}:{settings.server.port}:{settings.server.port}"]
        assert "healthcheck" not in service, "the image has one"


def test_every_service_of_ours_is_confined_and_every_service_is_checked_and_local() -> None:
    for name, service in SERVICES.items():
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service.get("privileged", False) is False
        assert "healthcheck" in service or name in OURS, name
        assert all(filled(port).startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert not re.search(r":latest$|^[^:]*$", service["image"]) or name in OURS, "others are pinned"
    for name in OURS:
        assert (SERVICES[name]["read_only"], SERVICES[name]["cap_drop"]) == (True, ["ALL"])


def test_each_profile_has_one_gateway_that_is_called_gateway() -> None:
    profiles = {"cpu": {"gateway", "engine"}, "gpu": {"gateway-gpu", "vllm"}, "gateway": {"gateway"}}
    for profile, own in profiles.items():
        assert {name for name, one in SERVICES.items() if profile in one.get("profiles", ())} == own
    assert {name for name, one in SERVICES.items() if not one.get("profiles")} == {"redis", "prometheus", "grafana"}
    assert SERVICES["gateway-gpu"]["networks"] == {"default": {"aliases": ["gateway"]}}


def test_every_path_that_is_mounted_is_there_and_every_volume_is_declared() -> None:
    sources = [one.split(":")[0] for service in SERVICES.values() for one in service.get("volumes", ())]
    assert not [one for one in sources if one.startswith(".") and not (DEPLOY / one).is_file()]
    assert {one for one in sources if not one.startswith(".")} == set(COMPOSE["volumes"])
    mounted = {(DEPLOY / one).resolve() for one in sources if one.startswith(".")}
    assert set((DEPLOY / "compose").iterdir()) <= mounted, "a file that no service has"
    assert {DEPLOY / "grafana/kvasir.json", DEPLOY / "prometheus/alerts.yml"} <= mounted, "ours, not copies"


def test_the_vllm_of_compose_is_started_as_that_of_the_chart() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["vllm"]
    vllm, chart = SERVICES["vllm"], (CHART / "templates/vllm.yaml").read_text()
    assert vllm["image"] == ":".join(values["image"][part] for part in ("repository", "tag"))
    assert filled(vllm["command"][0]) == values["model"]
    written = " ".join(chart.split())
    assert not [one for one in vllm["command"][1:] if one not in written]


def test_redis_keeps_what_has_no_end_as_the_embedded_one_does() -> None:
    program, *arguments = SERVICES["redis"]["command"]
    options = dict(pair for pair in pairwise(arguments) if pair[0].startswith("--"))
    assert (program, options["--appendonly"], options["--maxmemory-policy"]) == ("valkey-server", "yes", "volatile-lru")
    assert (options["--protected-mode"], SERVICES["redis"].get("ports")) == ("no", None), "or only a loopback is let in"


def target_of(mounts: dict[str, str], source: str) -> str:
    (found,) = [inside for inside, outside in mounts.items() if outside.endswith(source)]
    return found


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    mounts = dict(one.split(":")[:2][::-1] for one in SERVICES["grafana"]["volumes"])
    dashboards = yaml.safe_load((DEPLOY / "compose/grafana-dashboards.yaml").read_text())
    (provider,) = dashboards["providers"]
    assert Path(target_of(mounts, "grafana/kvasir.json")).parent == Path(provider["options"]["path"])
    (source,) = yaml.safe_load((DEPLOY / "compose/grafana-datasources.yaml").read_text())["datasources"]
    (port,) = [one.rpartition(":")[2] for one in SERVICES["prometheus"]["ports"]]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", f"http://prometheus:{port}", True)
    (variable,) = json.loads((DEPLOY / "grafana/kvasir.json").read_text())["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", source["type"])


def test_prometheus_scrapes_the_gateway_as_the_example_does() -> None:
    ours, example = (
        yaml.safe_load((DEPLOY / name / "prometheus.yml").read_text()) for name in ("compose", "prometheus")
    )
    (job,), (other,) = ours["scrape_configs"], example["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"gateway:{environment('gateway')['KVASIR_SERVER_PORT']}"]}]
    assert ours | {"scrape_configs": 0} == example | {"scrape_configs": 0}
    assert job | {"static_configs": 0} == other | {"static_configs": 0}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
def test_prometheus_takes_what_it_gets(tmp_path: Path) -> None:
    for one in SERVICES["prometheus"]["volumes"]:
        source, target, *_ = one.split(":")
        if source.startswith("."):
            shutil.copy(DEPLOY / source, tmp_path / Path(target).name)
    done = subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
