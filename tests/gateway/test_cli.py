"""The command line: help, version, and that what is wrong is said in one line with status 2."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import engine.serving
from engine.config import flag_name
from gateway import cli
from gateway.config import Settings


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_is_one_page_and_help_all_has_every_setting_with_its_unit(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, flag])
        assert ended.value.code == 0
        pages.append(capsys.readouterr().out)
    short, every = pages
    common = {"--config", "--help-all", "--until-eof", "--replica"}
    flags = set(re.findall(r"^  (--[a-z-]+)", short, re.MULTILINE)) - common
    assert flags == {flag_name(path) for path in cli.MAIN[command]}
    assert len(flags) <= 10
    assert {flag_name(path) for path in cli._paths()} <= set(re.findall(r"^  (--[a-z-]+) ", every, re.MULTILINE))
    assert command == "engine" or "--port PORT" in short
    assert "--server-request-timeout-s SECONDS" in every
    assert "VALUE " not in every.partition("\n")[2]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_bad_setting_stops_the_start_with_status_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--port", "many"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"kvasir {command}: server.port (flag --port)")
    assert "'many'" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_variables_of_clients_are_no_settings_and_all_others_are(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ports: list[int] = []

    async def keep(settings: Settings, _: object, read: Callable[[], Settings]) -> None:
        ports.extend((settings.server.port, read().server.port))

    monkeypatch.setitem(cli._COMMANDS, command, keep)
    for name, value in (("API_KEY", "admin-key-1234"), ("URL", "http://127.0.0.1:1"), ("SERVER_PORT", "81")):
        monkeypatch.setenv(f"KVASIR_{name}", value)
    assert cli.main([command]) == 0
    assert ports == [81, 81], "at the start, and when it is reloaded"
    monkeypatch.setenv("KVASIR_API_KEYS", "admin-key-1234")
    assert cli.main([command]) == 2
    assert "KVASIR_API_KEYS: there is no such setting" in capsys.readouterr().err


def test_an_engine_without_torch_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lacking(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(engine.serving, "serve", lacking)
    monkeypatch.setattr("os.environ", {**os.environ})  # what the command sets there is not for other tests
    assert cli.main(["engine"]) == 2
    shown = capsys.readouterr().err
    assert "pip install 'kvasir[engine]'" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_what_a_server_and_its_processes_make_is_for_this_user_alone(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def make(*_: object) -> None:
        (tmp_path / "data" / "deep").mkdir(parents=True)
        (tmp_path / "data" / "file").write_text("x")
        child = await asyncio.create_subprocess_exec("/bin/sh", "-c", "echo x > child", cwd=tmp_path / "data")
        assert await child.wait() == 0

    monkeypatch.setitem(cli._COMMANDS, command, make)
    before = os.umask(0o022)
    try:
        assert cli.main([command]) == 0
        assert os.umask(0o022) == 0o022, "it is as it was"
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "data").rglob("*")}
    assert modes == {"deep": 0o700, "file": 0o600, "child": 0o600}
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


def test_replicas_come_from_flags_and_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[Settings] = []

    async def keep(settings: Settings, *_: object) -> None:
        found.append(settings)

    monkeypatch.setitem(cli._COMMANDS, "gateway", keep)
    file = tmp_path / "kvasir.toml"
    file.write_text("[[replicas]]\nname = 'a'\nkind = 'sglang'\nurl = 'http://a.test'\n", encoding="utf-8")
    flags = ["--replica", "vllm=http://[::1]:8001/v1/", "--replica", "tensorrt-llm:b.2=https://b.test/path"]
    assert cli.main(["gateway", "--config", str(file), *flags]) == 0
    assert [(one.name, one.kind, one.url) for one in found[0].replicas] == [
        ("a", "sglang", "http://a.test"),
        ("1-8001", "vllm", "http://[::1]:8001"),
        ("b.2", "tensorrt-llm", "https://b.test/path"),
    ]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (
            "http://a.test",
            "--replica: write KIND=URL or KIND:NAME=URL, where KIND is one of vllm, sglang, tensorrt-llm",
        ),
        ("tgi=http://a.test", "--replica: write KIND=URL"),
        (
            "vllm=a.test:8000",
            "replicas.0.url (command line): a replica's URL begins with http:// or https:// and a host",
        ),
        ("vllm:a b=http://a.test", "replicas.0.name (command line): string should match"),
    ],
)
def test_a_replica_flag_that_cannot_be_read_is_one_line(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["gateway", "--replica", flag]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"kvasir gateway: {said}")
    assert shown.count("\n") == 1


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--prot", "1"])
    assert ended.value.code == 2


def test_the_command_line_needs_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, gateway.cli, gateway.serving, engine.serving; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
