"""Every process of the night, each of which a fault may end and bring back: two gateways with two workers each, two
engines, an upstream, a primary and a replica of Redis under three sentinels. All on loopback; all end with it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import redis

from tests.fakes.ports import free_port
from tests.fakes.redis_fleet import HOST, MASTER, RedisNode, SentinelFleet, fields
from tests.fakes.waiting import until

ROOT: Final = Path(__file__).parent.parent.parent.parent
ADMIN: Final = "night-admin-key"
TENANTS: Final = {"north": "night-key-of-north", "south": "night-key-of-south", "east": "night-key-of-east"}
LIMITED: Final = "east"
"""The tenant that may ask so often only, and sometimes asks more often."""

FLUSH_S: Final = 1.0
MAX_IN_FLIGHT: Final = 8
"""Lines of batches that a gateway works on."""
MEMO_BYTES: Final = 1 << 20
"""Of each memo of a gateway, and of the answers that it keeps while Redis is down: they are full within minutes, and
what grows then is a leak."""
START_LIMIT_S: Final = 240.0
WORKERS: Final = 2

CONFIG: Final = """
[server]
port = {port}
workers = {workers}
data_dir = "{own}"
request_timeout_s = 45.0
shutdown_s = 5.0
[redis]
url = "{redis}"
[auth]
admin_keys = ["{admin}"]
[files]
folder = "{disk}/files"
[batches]
folder = "{disk}/batches"
lease_s = 3.0
max_attempts = 50
max_in_flight = {max_in_flight}
keep_s = 300.0
[ledger]
flush_s = {flush_s}
[queue]
max_wait_s = 20.0
[response_cache]
ttl_s = 30.0
upstreams = "on"
truncated = true
max_memory_bytes = {memo_bytes}
max_rendered_bytes = {memo_bytes}
[prompt]
memo_bytes = {memo_bytes}
"""
UPSTREAM: Final = """
[[upstreams]]
name = "{dialect}"
dialect = "{dialect}"
url = "http://127.0.0.1:{port}{path}"
key = "night-upstream-key"
models = ["{model}"]
first_byte_timeout_s = 8.0
idle_timeout_s = 8.0
breaker_open_s = 3.0
"""


class Process:
    """One that is started, killed, and started again in its place."""

    def __init__(self, name: str, command: list[str], log: Path, environ: dict[str, str], port: int) -> None:
        self.name, self.port, self.log = name, port, log
        self._command, self._environ = command, environ
        self._process: subprocess.Popen[bytes] | None = None
        self.ready = False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *self._command], cwd=ROOT, env=self._environ, stdout=output, stderr=output
            )

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL. Returns when it is gone."""
        self.ready = False
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        """As an operator would: asked first."""
        if self.is_running():
            assert self._process is not None
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()

    def children(self) -> list[int]:
        with suppress(OSError):
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        return []

    def workers(self) -> list[int]:
        """Of a gateway."""
        return [pid for pid in self.children() if "gateway.worker" in command_of(pid)]


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


class Place:
    """Async context manager around all of them. `folder` is the night's own; `disk` what fault of disks are about."""

    def __init__(self, folder: Path, disk: Path) -> None:
        self.folder, self.disk = folder, disk
        self.fleet = SentinelFleet(folder / "redis")
        self.clock = folder / "clock"
        self.clock.write_bytes(struct.pack("<d", 0.0))
        base = {name: value for name, value in os.environ.items() if not name.startswith("KVASIR_")}
        base["PYTHONPATH"] = str(ROOT)
        self.upstream = Process(
            "upstream", ["-m", "tests.chaos.night.hosted"], folder / "upstream.log", base, free_port()
        )
        self.upstream._command.append(str(self.upstream.port))
        self.engines = [self._engine(number, base) for number in range(2)]
        self.gateways = [self._gateway(number, base) for number in range(2)]

    def _engine(self, number: int, base: dict[str, str]) -> Process:
        port, name = free_port(), f"engine-{number}"
        flags = {
            "listen": f"127.0.0.1:{port}",
            "advertise": f"http://127.0.0.1:{port}",
            "disk-dir": str(self.disk / f"blocks-{number}"),
            "disk-bytes": str(64 << 20),
            "kv-cache-bytes": str(32 << 20),
            "dtype": "float32",
            "threads": "1",
        }
        command = ["-m", "gateway.cli", "engine", "--redis-url", self.fleet.url]
        environ = base | {f"KVASIR_ENGINE_{flag.replace('-', '_').upper()}": value for flag, value in flags.items()}
        return Process(name, command, self.folder / f"{name}.log", environ, port)

    def _gateway(self, number: int, base: dict[str, str]) -> Process:
        port, name = free_port(), f"gateway-{number}"
        own = self.folder / name
        own.mkdir()
        text = CONFIG.format(
            port=port,
            own=own,
            disk=self.disk,
            redis=self.fleet.url,
            admin=ADMIN,
            flush_s=FLUSH_S,
            max_in_flight=MAX_IN_FLIGHT,
            workers=WORKERS,
            memo_bytes=MEMO_BYTES,
        )
        for tenant, key in TENANTS.items():
            text += f'[[tenants]]\nname = "{tenant}"\nkeys = ["{key}"]\n'
            text += "requests_per_minute = 150\n" if tenant == LIMITED else ""
        for dialect, model, path in (("openai", "up-1", "/v1"), ("anthropic", "up-2", ""), ("gemini", "up-3", "")):
            text += UPSTREAM.format(dialect=dialect, port=self.upstream.port, path=path, model=model)
        config = own / "kvasir.toml"
        config.write_text(text)
        environ = dict(base)
        if number == 0:  # its wall clock can be stepped
            environ["PYTHONPATH"] = f"{Path(__file__).parent / 'clock'}:{ROOT}"
            environ["NIGHT_CLOCK"] = str(self.clock)
        command = ["-m", "gateway.cli", "gateway", "--config", str(config)]
        return Process(name, command, self.folder / f"{name}.log", environ, port)

    @property
    def processes(self) -> list[Process]:
        return [*self.gateways, *self.engines, self.upstream]

    async def __aenter__(self) -> Place:
        await asyncio.to_thread(self.fleet.__enter__)
        try:
            for process in self.processes:
                process.start()
            await asyncio.gather(*(self.wait_ready(gateway) for gateway in self.gateways), self._engines_joined())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        ends = (asyncio.to_thread(process.end) for process in self.processes)
        await asyncio.gather(*ends)
        await asyncio.to_thread(self.fleet.__exit__)

    async def wait_ready(self, gateway: Process) -> None:
        async with aiohttp.ClientSession() as session:

            async def ready() -> bool:
                if not gateway.is_running():
                    raise RuntimeError(f"{gateway.name} ended: {gateway.log.read_text()[-2000:]}")
                with suppress(aiohttp.ClientError, TimeoutError):
                    url = f"http://127.0.0.1:{gateway.port}/health/readiness"
                    async with session.get(url, timeout=aiohttp.ClientTimeout(5)) as answer:
                        return answer.status == 200
                await asyncio.sleep(0.1)
                return False

            await until(ready, START_LIMIT_S)
        gateway.ready = True

    async def _engines_joined(self) -> None:
        for gateway in self.gateways:

            def joined(log: Path = gateway.log) -> bool:
                return log.exists() and len(set(re.findall(r"engine (\S+) joined", log.read_text()))) >= 2

            await until(joined, START_LIMIT_S)

    # -- Redis --------------------------------------------------------------------------------------------------------

    def primary(self) -> RedisNode | None:
        """The node that takes writes and has a replica that follows: only then one of the two may be lost."""
        for node in self.fleet.nodes:
            with suppress(redis.RedisError, OSError):
                role = _ask(node, "ROLE")
                if role[0] == b"master":
                    following = [one for one in role[2] if int(one[1]) in {n.port for n in self.fleet.nodes}]
                    return node if following else None
        return None

    def is_named(self, node: RedisNode) -> bool:
        """Whether all sentinels name it as the primary and find nothing wrong with it."""
        with suppress(redis.RedisError, OSError, TypeError, ValueError):
            told = [fields(_ask(one, "SENTINEL", "MASTER", MASTER)) for one in self.fleet.sentinels]
            return all((one["port"], one["flags"]) == (str(node.port), "master") for one in told)
        return False

    def is_whole(self) -> bool:
        """Whether there is a primary and the other node follows it: one that was replaced takes writes for seconds."""
        node = self.primary()
        with suppress(redis.RedisError, OSError):
            others = [_ask(one, "ROLE")[0] for one in self.fleet.nodes if one is not node]
            return node is not None and self.is_named(node) and others == [b"slave"]
        return False

    # -- what is looked at --------------------------------------------------------------------------------------------

    def roles(self) -> Iterator[tuple[str, int]]:
        """Role and process id of what runs of Kvasir."""
        for gateway in self.gateways:
            if gateway.is_running():
                yield "gateway", gateway.pid
                for pid in gateway.workers():
                    yield "worker", pid
        for engine in self.engines:
            if engine.is_running():
                yield "engine", engine.pid

    def step_clock(self, seconds: float) -> None:
        with self.clock.open("r+b") as file:
            file.write(struct.pack("<d", seconds))


def _ask(node: RedisNode, *command: str) -> Any:
    with redis.Redis(host=HOST, port=node.port, socket_timeout=1.0, socket_connect_timeout=1.0) as client:
        return client.execute_command(*command)
