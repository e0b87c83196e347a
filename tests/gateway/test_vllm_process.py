"""When `kvasir serve` starts a vLLM, and with which arguments."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError
from gateway.config import Settings
from gateway.vllm_process import choose_engine, command_of
from tests.fakes import vllm_command
from tests.fakes.vllm_command import is_running
from tests.fakes.waiting import until


def settings(kind: str = "auto", **sections: Any) -> Settings:
    engines = {"kind": kind, **sections.pop("engines", {})}
    return Settings.model_validate({"engine": {"model": "some/model"}, "engines": engines, **sections})


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """With a `vllm` on the PATH."""
    return {"PATH": vllm_command.put_on_path(tmp_path / "bin")}


def test_auto_is_a_vllm_where_there_are_one_and_a_device(
    environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    chosen = choose_engine(settings(), environ, lambda: True)
    assert chosen.engines.kind == "vllm"
    assert [(one.name, one.kind, one.key is not None) for one in chosen.replicas] == [("vllm", "vllm", True)]
    assert [line for line in caplog.messages if "--engine bundled" in line and str(tmp_path / "bin/vllm") in line]
    for bundled in (
        choose_engine(settings(), environ, lambda: False),
        choose_engine(settings(), {"PATH": str(tmp_path)}, lambda: True),
        choose_engine(settings("bundled"), environ, lambda: True),
        choose_engine(settings(engine={}), environ, lambda: True),  # the demo
        choose_engine(settings(engine={"model": "a/b", "device": "cpu"}), environ, lambda: True),
        choose_engine(settings(engines={"count": 2}), environ, lambda: True),
    ):
        assert (bundled.engines.kind, bundled.replicas) == ("bundled", ())


def test_what_cannot_be_started_is_one_line(environ: dict[str, str], tmp_path: Path) -> None:
    own = [{"name": "vllm", "kind": "vllm", "url": "http://host:8001"}]
    for wanted, path, words in (
        (settings("vllm"), str(tmp_path), "no `vllm` on the PATH; install it .`pip install vllm`"),
        (settings("vllm", engines={"count": 2}), environ["PATH"], "engines.count: of vLLM one server is started"),
        (settings("vllm", replicas=own), environ["PATH"], "'vllm' is the name of the vLLM that is started"),
    ):
        with pytest.raises(ConfigError, match=words) as error:
            choose_engine(wanted, {"PATH": path})
        assert "\n" not in str(error.value)


def test_no_engine_needs_no_vllm(tmp_path: Path) -> None:
    assert choose_engine(settings("vllm", engines={"count": 0}), {"PATH": str(tmp_path)}).replicas == ()


def test_a_vllm_is_started_on_the_loopback_with_events_and_what_was_set(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = {"model": "some/model", "max_context_tokens": 4096, "dtype": "float32", "disk_bytes": 5}
    chosen = choose_engine(settings("vllm", engine=engine, engines={"vllm_arguments": "--seed 7 --x 'a b'"}), environ)
    assert "that a vLLM has not: disk_bytes" in caplog.text
    replica = chosen.replicas[0]
    command = command_of(chosen, replica)
    assert command[:5] == ["vllm", "serve", "some/model", "--served-model-name", "some/model"]
    assert command[-8:] == ["--dtype", "float32", "--max-model-len", "4096", "--seed", "7", "--x", "a b"]
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"} < {*command}
    said = dict(pairwise(command))
    assert f"http://{said['--host']}:{said['--port']}" == replica.url
    events = json.loads(said["--kv-events-config"])
    assert events["replay_endpoint"] == replica.kv_replay
    assert events["endpoint"].replace("[::ffff:127.0.0.1]", "127.0.0.1") == replica.kv_events
    assert replica.key is not None
    assert replica.key.get_secret_value() not in " ".join(command)


@pytest.mark.parametrize("how", ["eof", "sigterm"])
def test_a_guarded_command_ends_with_all_that_it_started(how: str) -> None:
    """Also one that does not end when it is asked."""
    deaf = "trap '' TERM; sleep 600 & echo $!; wait; sleep 600"
    guard = [sys.executable, "-m", "gateway.guard", "0.2", "/bin/sh", "-c", deaf]
    with subprocess.Popen(guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        sleeper = int(process.stdout.readline())
        if how == "eof":
            process.stdin.close()
        else:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGKILL
    asyncio.run(until(lambda: not is_running(sleeper)))


def test_the_status_of_a_guarded_command_is_its_own() -> None:
    guard = [sys.executable, "-m", "gateway.guard", "5", "/bin/sh", "-c", "exit 3"]
    with subprocess.Popen(guard, stdin=subprocess.PIPE, env={**os.environ}) as process:
        assert process.wait(30) == 3
