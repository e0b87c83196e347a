"""`kvasir serve --engine vllm`: a small script in the place of vLLM on the PATH, and in a slow test the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.fakes import vllm_command, vllm_server
from tests.fakes.replica_server import DEMO
from tests.fakes.server import Server
from tests.fakes.vllm_command import is_running

FLAGS = ("--engine", "vllm", "--model", str(DEMO), "--served-name", "demo")
ASK: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hello there."}], "max_tokens": 3}


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script is the `vllm` on the PATH; what it writes down."""
    monkeypatch.setenv("PATH", vllm_command.put_on_path(tmp_path / "bin"))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


def pids(notes: Path) -> list[int]:
    return [orjson.loads(line)["pid"] for line in notes.read_bytes().splitlines()]


def chat(server: Server) -> tuple[str | None, str | None]:
    """The engine that answered, and why it ended."""
    answer = server.client().chat.completions.with_raw_response.create(**ASK)
    return answer.headers.get("x-kvasir-engine"), answer.parse().choices[0].finish_reason


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_vllm_from_the_path_is_the_engine_and_is_kept_running(workers: int, tmp_path: Path, notes: Path) -> None:
    with Server(tmp_path / "data", *FLAGS, "--workers", str(workers)) as server:
        server.wait_for_line(r"^  vllm +http://127.0.0.1:\d+, started here")
        server.wait_for_line(r"vllm: INFO: Application startup complete")
        assert chat(server) == ("vllm", "length")

        def answers() -> bool:
            return server.get("/admin/stats")["engines"][0]["state"] == "ready"

        server.wait_until(answers, "the workers' parent knows that it has joined")
        (first,) = pids(notes)
        os.kill(first, signal.SIGKILL)
        server.wait_for_line("vllm ended with status 137; starting it again in")
        server.wait_until(lambda: len(pids(notes)) == 2, "it is started again")

        server.wait_for_line("engine vllm joined", after=server.lines.index(server.wait_for_line("starting it again")))
        server.wait_until(answers, "it has joined again")
        assert chat(server) == ("vllm", "length")
    assert not any(map(is_running, pids(notes)))


def test_a_vllm_that_dies_at_start_is_one_line_and_not_tried_again(tmp_path: Path, notes: Path) -> None:
    dying = ("--engines-vllm-arguments", "--die 'ValueError: no such model'")
    command = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    ended = subprocess.run([*command, *FLAGS, *dying], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == "kvasir serve: vllm did not start (status 1): ValueError: no such model"
    assert "Traceback" not in ended.stderr
    assert len(pids(notes)) == 1


def test_no_vllm_on_the_path_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    environ = {**os.environ, "PATH": str(tmp_path)}
    ended = subprocess.run([*command, *FLAGS], capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("kvasir serve: engines.kind: there is no `vllm` on the PATH; install it (`pip install vllm`")


def test_a_vllm_ends_when_the_gateway_is_killed(tmp_path: Path, notes: Path, redis_url: str) -> None:
    with Server(tmp_path / "data", *FLAGS, "--redis-url", redis_url) as server:
        (pid,) = pids(notes)
        server.process.kill()
        server.process.wait()
        server.wait_until(lambda: not is_running(pid), "the vLLM has ended")


@pytest.mark.slow
@pytest.mark.skipif(not vllm_server.installed(), reason=vllm_server.HOW)
def test_a_real_vllm_is_started_answers_and_reuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{vllm_server.FOLDER / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setattr("tests.fakes.server.START_LIMIT_S", vllm_server.START_LIMIT_S)
    more = (
        "--engines-vllm-arguments",
        "--max-num-seqs 8 --enforce-eager",
        "--max-context-tokens",
        "2048",
        "--dtype",
        "float32",
    )
    starting = Server(tmp_path, "--engine", "vllm", "--model", "demo", *more)
    starting.ready_line = r"^Kvasir \S+ on (http://\S+)"  # vLLM prints a URL of its own before
    with starting as server:
        long = {**ASK, "messages": [{"role": "user", "content": "Which of the two houses was the older one? " * 60}]}
        create = server.client().chat.completions.create
        first, second = (create(**long, temperature=0) for _ in range(2))
        assert first.choices[0].message.content == second.choices[0].message.content != ""
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        assert second.usage.prompt_tokens_details.cached_tokens >= 128
        assert server.get("/admin/stats")["engines"][0]["state"] == "ready"
        children = server.children("gateway.guard")
        assert len(children) == 1
    assert not is_running(children[0])
