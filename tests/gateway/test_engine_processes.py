"""The processes that `kvasir serve` keeps running, with small Python programs in an engine's place."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineSettings
from gateway import processes as supervisor
from gateway import serving
from gateway.config import LogSettings, Settings
from gateway.engine_processes import EngineProcesses
from gateway.processes import BAD_SETTING_EXIT, FIRST_TRIES, Child, Children, ChildStartError
from tests.fakes.waiting import until

LIMIT_S = 30.0

APPEND = "import os, sys; open(os.environ['NOTES'], 'a').write({what} + '\\n')\n"
UNTIL_EOF = "sys.stdin.read()\n"


def processes(
    tmp_path: Path, program: str, *, count: int = 1, folder: Path | None = None, worked: bool = False
) -> tuple[EngineProcesses, list[ChildStartError]]:
    fatal: list[ChildStartError] = []
    environ = {**os.environ, "NOTES": str(tmp_path / "notes"), "KVASIR_ENGINE_BLOCK_SIZE": "64"}
    made = EngineProcesses(
        EngineSettings(secret="between-us", drain_s=5.0),
        LogSettings(format="json"),
        count=count,
        folder=folder or tmp_path / "engines",
        redis_url="unix:///nowhere",
        environ=environ,
        worked=lambda url: worked and url == made.urls["engine-0"],
        on_fatal=fatal.append,
        command=(sys.executable, "-c", program),
    )
    return made, fatal


class Notes:
    """What the programs write into a named pipe, line by line, without looking twice."""

    def __init__(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "notes")
        self._pipe = os.fdopen(os.open(tmp_path / "notes", os.O_RDWR), "rb", buffering=0)
        self._reader = asyncio.StreamReader()

    async def __aenter__(self) -> Notes:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), self._pipe
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._transport.close()
        await asyncio.sleep(0)

    async def lines(self, count: int) -> list[str]:
        async with asyncio.timeout(LIMIT_S):
            return [(await self._reader.readline()).decode().rstrip() for _ in range(count)]


async def test_an_engine_is_told_its_settings_through_the_environment(tmp_path: Path) -> None:
    names = ("ENGINE_LISTEN", "ENGINE_SECRET", "ENGINE_BLOCK_SIZE", "REDIS_URL", "LOGS_FORMAT")
    names = (*(f"KVASIR_{name}" for name in names), "GLIBC_TUNABLES")
    what = "' '.join(os.environ[name] for name in " + repr(names) + ")"
    made, _ = processes(tmp_path, APPEND.format(what=what) + UNTIL_EOF)
    async with Notes(tmp_path) as notes, made:
        (line,) = await notes.lines(1)
    assert line == f"{made.urls['engine-0']} between-us 16 unix:///nowhere json glibc.malloc.hugetlb=1"
    assert made.urls["engine-0"].startswith("unix:/")


@pytest.mark.parametrize(
    ("device", "devices"), [("cuda", ["cuda:0", "cuda:1"]), ("cuda:0", ["cuda:0"] * 2), ("auto", ["auto"] * 2)]
)
def test_engines_that_are_to_use_cuda_have_a_gpu_each(device: str, devices: list[str], tmp_path: Path) -> None:
    made = EngineProcesses(
        EngineSettings(device=device),
        LogSettings(),
        count=2,
        folder=tmp_path / "engines",
        redis_url=None,
        environ={},
        worked=lambda url: False,
        on_fatal=lambda error: None,
    )
    assert [engine.settings.device for engine in made.engines] == devices


@pytest.mark.parametrize(
    ("engine", "count", "share"),
    [({}, 1, 0), ({}, 3, 300), ({"memory_bytes": 7}, 3, 7), ({"device": "cuda"}, 3, 0)],
)
def test_engines_of_one_machine_share_what_memory_is_free(
    engine: dict[str, Any], count: int, share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "available_bytes", lambda: 900)
    sections = {"server": {"data_dir": tmp_path}, "engine": engine, "engines": {"count": count, "kind": "bundled"}}
    made = serving.own_engines_of(Settings.model_validate(sections), None, {}, lambda url: False, lambda error: None)
    assert isinstance(made, EngineProcesses)
    assert [one.settings.memory_bytes for one in made.engines] == [share] * count


async def test_an_engine_that_dies_is_started_again(tmp_path: Path) -> None:
    made, fatal = processes(tmp_path, APPEND.format(what="str(os.getpid())"))
    async with Notes(tmp_path) as notes, made:
        first, second = await notes.lines(2)
    assert first != second
    assert made.children[0].restarts >= 1
    assert not fatal


async def test_a_setting_that_an_engine_refuses_is_fatal_and_not_tried_again(tmp_path: Path) -> None:
    made, fatal = processes(tmp_path, APPEND.format(what="'x'") + f"sys.exit({BAD_SETTING_EXIT})")
    async with Notes(tmp_path) as notes, made:
        watcher = made.children[0].watcher
        assert watcher is not None
        await asyncio.wait_for(asyncio.shield(watcher), LIMIT_S)
        assert await notes.lines(1) == ["x"]
    assert len(fatal) == 1
    assert made.children[0].restarts == 0


async def test_an_engine_that_never_comes_up_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_RESTART_S", 0.01)
    made, fatal = processes(tmp_path, APPEND.format(what="'x'") + "sys.exit(1)")
    async with Notes(tmp_path) as notes, made:
        watcher = made.children[0].watcher
        assert watcher is not None
        await asyncio.wait_for(asyncio.shield(watcher), LIMIT_S)
        assert await notes.lines(FIRST_TRIES) == ["x"] * FIRST_TRIES
    assert len(fatal) == 1


@pytest.mark.parametrize("status", [1, BAD_SETTING_EXIT])
async def test_an_engine_that_worked_once_is_never_given_up(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_RESTART_S", 0.01)
    monkeypatch.setattr(supervisor, "LAST_RESTART_S", 0.02)
    made, fatal = processes(tmp_path, APPEND.format(what="'x'") + f"sys.exit({status})", worked=True)
    async with Notes(tmp_path) as notes, made:
        assert await notes.lines(FIRST_TRIES + 2) == ["x"] * (FIRST_TRIES + 2)
    assert not fatal


async def test_another_engine_that_works_does_not_save_one_that_never_did(tmp_path: Path) -> None:
    program = (
        APPEND.format(what="os.environ['KVASIR_ENGINE_LISTEN'][-6]")
        + f"'engine-1' in os.environ['KVASIR_ENGINE_LISTEN'] and sys.exit({BAD_SETTING_EXIT})\n"
        + UNTIL_EOF
    )
    made, fatal = processes(tmp_path, program, count=2, worked=True)
    async with Notes(tmp_path) as notes, made:
        assert sorted(await notes.lines(2)) == ["0", "1"]
        watcher = made.children[1].watcher
        assert watcher is not None
        await asyncio.wait_for(asyncio.shield(watcher), LIMIT_S)
    assert [str(error).split()[0] for error in fatal] == ["engine-1"]


async def test_leaving_ends_every_engine(tmp_path: Path) -> None:
    made, _ = processes(tmp_path, APPEND.format(what="'x'") + UNTIL_EOF, count=3)
    async with Notes(tmp_path) as notes, made:
        await notes.lines(3)
        running = [child.process for child in made.children]
    assert all(process is not None and process.returncode is not None for process in running)


async def test_leaving_does_not_wait_for_the_next_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_RESTART_S", 1000.0)
    monkeypatch.setattr(supervisor, "LAST_RESTART_S", 1000.0)
    made, _ = processes(tmp_path, "raise SystemExit(1)")
    await made.__aenter__()
    await until(lambda: made.children[0].restarts == 1)
    await asyncio.wait_for(made.__aexit__(None, None, None), LIMIT_S)


async def test_a_folder_too_deep_for_a_socket_is_replaced_by_a_temporary_one(tmp_path: Path) -> None:
    made, _ = processes(tmp_path, "", count=2, folder=tmp_path / ("deep" * 40))
    assert all(len(url) < 100 for url in made.urls.values())
    assert len(set(made.urls.values())) == 2
    async with made:
        pass
    assert not Path(made.urls["engine-0"].removeprefix("unix:")).parent.exists()


async def test_a_child_that_the_system_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start() -> asyncio.subprocess.Process:
        raise OSError("no memory")

    monkeypatch.setattr(supervisor, "FIRST_RESTART_S", 0.01)
    fatal: list[ChildStartError] = []
    async with Children([Child("one", start, lambda: False, 1.0)], fatal.append):
        await until(lambda: bool(fatal))
    assert str(fatal[0]) == f"one ended {FIRST_TRIES} times in a row (status 1)"
