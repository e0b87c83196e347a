"""The engines that `kvasir serve` starts on this machine: started, watched, started again, ended.

Knows processes and sockets, nothing of the stream: gateway/engines/bundled.py connects to what runs here. Each engine
is `kvasir engine` in a process of its own, with its settings in the environment (a secret has no business on a command
line), and ends by itself when this process is gone.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.config import ENVIRONMENT_PREFIX, EngineSettings, Section, variable_name
from gateway.config import LogSettings
from gateway.processes import Child, Children, ChildStartError

ENGINE_COMMAND = (sys.executable, "-m", "gateway.cli", "engine", "--until-eof")

HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Lets the memory of weights begin in large pages; moving it there afterwards takes two seconds for each GB."""

_LONGEST_SOCKET_PATH = 100  # bytes; sun_path holds 108 on Linux and 104 on macOS
_MORE_S = 5.0  # that an engine gets to end, besides its own limit


@dataclass(slots=True)
class Engine:
    """One engine: where it listens, with which settings."""

    name: str
    url: str
    settings: EngineSettings


class EngineProcesses(Children):
    """All engines. `urls` is known before anything runs."""

    def __init__(
        self,
        settings: EngineSettings,
        logs: LogSettings,
        *,
        count: int,
        folder: Path,
        redis_url: str | None,
        environ: Mapping[str, str],
        worked: Callable[[str], bool],
        on_fatal: Callable[[ChildStartError], None],
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        """
        logs       of their processes
        folder     for the socket files; a temporary folder is used when its path is too long for a socket
        environ    what the engines inherit, as this process got it
        worked     whether the engine at this URL has ever been connected to
        on_fatal   called once per engine that never worked and cannot be started with these settings
        command    what runs an engine; it reads its settings from the environment and ends when its input is closed
        """
        self._logs = logs
        self._redis_url = redis_url
        self._environ = environ
        self._command = command
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        folder = self._socket_folder(folder)
        self.engines = [
            Engine(f"engine-{number}", url, settings.model_copy(update={"listen": url} | device))
            for number in range(count)
            for url in [f"unix:{folder / f'engine-{number}.sock'}"]
            for device in [{"device": f"cuda:{number}"} if settings.device == "cuda" else {}]
        ]

        super().__init__([self._child(engine, worked) for engine in self.engines], on_fatal)

    @property
    def urls(self) -> dict[str, str]:
        """Name -> URL of every engine."""
        return {engine.name: engine.url for engine in self.engines}

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        if self._temporary is not None:
            self._temporary.cleanup()

    def _child(self, engine: Engine, worked: Callable[[str], bool]) -> Child:
        start, drain_s = partial(self._start, engine), engine.settings.drain_s + _MORE_S
        return Child(engine.name, start, partial(worked, engine.url), drain_s)

    async def _start(self, engine: Engine) -> asyncio.subprocess.Process:
        environ = {name: value for name, value in self._environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        environ.setdefault("GLIBC_TUNABLES", HUGE_PAGES)
        environ |= _as_environment("engine", engine.settings) | _as_environment("logs", self._logs)
        if self._redis_url is not None:
            environ[variable_name("redis.url")] = self._redis_url
        # Standard input is a pipe that closes when this process ends, however it ends.
        return await asyncio.create_subprocess_exec(*self._command, env=environ, stdin=asyncio.subprocess.PIPE)

    def _socket_folder(self, folder: Path) -> Path:
        folder = folder.absolute()
        if len(os.fsencode(folder / "engine-00.sock")) > _LONGEST_SOCKET_PATH:
            self._temporary = tempfile.TemporaryDirectory(prefix="kvasir-")
            return Path(self._temporary.name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder


def _as_environment(section: str, settings: Section) -> dict[str, str]:
    """Every setting that has a value, as the loader reads it; this process's own variables are left out."""
    return {
        variable_name(f"{section}.{name}"): str(value)
        for name, value in settings.model_dump(mode="json").items()
        if value is not None
    }
