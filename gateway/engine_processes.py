"""The engines that `kvasir serve` starts on this machine: started, watched, started again, ended.

Knows processes and sockets, nothing of the stream: gateway/engines/bundled.py connects to what runs here. Each engine
is `kvasir engine` in a process of its own, with its settings in the environment (a secret has no business on a command
line), and ends by itself when this process is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config import ENVIRONMENT_PREFIX, EngineSettings, Section, variable_name
from gateway import tasks
from gateway.config import LogSettings

log = logging.getLogger(__name__)

BAD_SETTING_EXIT = 2
"""Exit status of `kvasir engine` for a setting or model it cannot work with: starting again would not help."""

FIRST_TRIES = 4
"""An engine that never worked and ends so often is given up; one that worked once never is."""

ENGINE_COMMAND = (sys.executable, "-m", "gateway.cli", "engine", "--until-eof")

_LONGEST_SOCKET_PATH = 100  # bytes; sun_path holds 108 on Linux and 104 on macOS
_FIRST_RESTART_S, _LAST_RESTART_S, _STEADY_S = 0.5, 15.0, 60.0


class EngineStartError(RuntimeError):
    """An engine ended for a reason that a restart would not change, which is on its stderr."""


@dataclass(slots=True)
class EngineProcess:
    """One engine: where it listens, and its process while there is one."""

    name: str
    url: str
    settings: EngineSettings
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    watcher: asyncio.Task[None] | None = None


class EngineProcesses:
    """Async context manager over all of them. `urls` is known before anything runs."""

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
        on_fatal: Callable[[EngineStartError], None],
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
        self._worked = worked
        self._on_fatal = on_fatal
        self._command = command
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        folder = self._socket_folder(folder)
        self.engines = [
            EngineProcess(f"engine-{number}", url, settings.model_copy(update={"listen": url} | device))
            for number in range(count)
            for url in [f"unix:{folder / f'engine-{number}.sock'}"]
            for device in [{"device": f"cuda:{number}"} if settings.device == "cuda" else {}]
        ]

    @property
    def urls(self) -> dict[str, str]:
        """Name -> URL of every engine."""
        return {engine.name: engine.url for engine in self.engines}

    async def __aenter__(self) -> EngineProcesses:
        for engine in self.engines:
            engine.watcher = tasks.spawn(self._watch(engine), name=f"watch {engine.name}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Asks every engine to drain, and waits as long as the engine's own limit allows."""
        watchers = [engine.watcher for engine in self.engines if engine.watcher is not None]
        await asyncio.gather(*map(tasks.cancel, watchers))
        if self._temporary is not None:
            self._temporary.cleanup()

    async def _watch(self, engine: EngineProcess) -> None:
        """Keeps one engine running, however often it ends once it worked: what it needs may come back, and others
        serve meanwhile. Waits longer from try to try while it fails soon. Its engine ends with it."""
        wait_s = _FIRST_RESTART_S
        while True:
            started_s = time.monotonic()
            engine.process = await self._start(engine)
            try:
                status = await engine.process.wait()
            finally:
                if not await tasks.end(engine.process, engine.settings.drain_s + 5.0):
                    log.warning("%s did not end in time and was killed", engine.name)
            if not self._worked(engine.url) and (why := _hopeless(status, engine.restarts + 1)):
                self._on_fatal(EngineStartError(f"{engine.name} {why}"))
                return
            steady = time.monotonic() - started_s > _STEADY_S
            wait_s = _FIRST_RESTART_S if steady else min(wait_s * 2, _LAST_RESTART_S)
            log.warning("%s ended with status %s; starting it again in %.1f s", engine.name, status, wait_s)
            engine.restarts += 1
            await asyncio.sleep(wait_s)

    async def _start(self, engine: EngineProcess) -> asyncio.subprocess.Process:
        environ = {name: value for name, value in self._environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
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


def _hopeless(status: int, ends: int) -> str | None:
    """Why an engine that never worked will not work the next time either, or None."""
    if status == BAD_SETTING_EXIT:
        return "cannot be started with these settings"
    return f"ended {ends} times in a row (status {status})" if ends >= FIRST_TRIES else None


def _as_environment(section: str, settings: Section) -> dict[str, str]:
    """Every setting that has a value, as the loader reads it; this process's own variables are left out."""
    return {
        variable_name(f"{section}.{name}"): str(value)
        for name, value in settings.model_dump(mode="json").items()
        if value is not None
    }
