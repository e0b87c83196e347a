"""What goes wrong in the night: one fault every few seconds, each kind as often as the others, in a random order. A
fault waits for what it hurt to be back, so that a night never ends with something broken; two do not hurt one thing at
once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import redis

from tests.chaos.night.hosted import WAYS
from tests.chaos.night.site import Place, Process
from tests.fakes.redis_fleet import RedisNode
from tests.fakes.waiting import until

SOON_S: Final = (1.0, 3.0)
"""Until what was killed is started again."""
STOP_S: Final = (1.0, 6.0)
CUT_S: Final = (2.0, 7.0)
SPARED_AFTER_S: Final = 600.0
"""After which the second gateway and engine are killed no more: whether something grows is seen in a long life. All
else goes on happening to them."""
BACK_S: Final = 60.0
TABLE: Final = "kvasir_night"


@dataclass
class Fault:
    """`ended_s`: it is over and what it hurt is back. `gateway` is the one that lost what it had not written; `redis`
    whether writes that Redis had accepted may be lost. Times are of the monotonic clock."""

    kind: str
    target: str
    begun_s: float
    ended_s: float = float("inf")
    gateway: int | None = None
    redis: bool = False
    failed: str = ""


class Faults:
    """`nft` and `mounted` say whether the night has a network and a disk of its own to spoil."""

    def __init__(self, place: Place, dice: random.Random, *, nft: bool, mounted: bool) -> None:
        self._place, self._dice = place, dice
        self._begun_s = time.monotonic()
        self.log: list[Fault] = []
        self._hurt: set[str] = set()
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "kill gateway": self._kill_gateway,
            "kill worker": self._kill_worker,
            "kill engine": self._kill_engine,
            "kill upstream": self._kill_upstream,
            "kill redis primary": self._kill_primary,
            "redis fail-over": self._fail_over,
            "stop worker": self._stop_worker,
            "stop engine": self._stop_engine,
            "stop redis primary": self._stop_primary,
            "step clock": self._step_clock,
            "wrong bytes": self._wrong_bytes,
        }
        if nft:
            kinds |= {
                "cut off engine": self._cut_engine,
                "cut off redis primary": self._cut_primary,
                "cut off upstream": self._cut_upstream,
            }
        if mounted:
            kinds |= {"full disk": self._full_disk, "slow disk": self._slow_disk}
        self.kinds = kinds
        self._deck: list[str] = []

    async def run(self, seconds: float, every_s: float) -> None:
        """Returns when all are over, and what they hurt is back."""
        over_s = time.monotonic() + seconds
        running: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < over_s:
                running.add(group.create_task(self._one(self._next())))
                await asyncio.sleep(min(every_s, max(0.1, over_s - time.monotonic())))

    def _next(self) -> str:
        if not self._deck:
            self._deck = list(self.kinds)
            self._dice.shuffle(self._deck)
        return self._deck.pop()

    async def _one(self, kind: str) -> None:
        before = len(self.log)
        try:
            await self.kinds[kind]()
        except (TimeoutError, RuntimeError, OSError, aiohttp.ClientError, redis.RedisError) as error:
            fault = self.log[-1] if len(self.log) > before else Fault(kind, "", time.monotonic())
            fault.failed = f"{type(error).__name__}: {error}"[:500]
            if fault not in self.log:
                self.log.append(fault)

    @contextlib.asynccontextmanager
    async def _hurting(self, kind: str, target: str, **more: object) -> AsyncIterator[Fault | None]:
        """None where something hurts it already."""
        if target in self._hurt:
            yield None
            return
        self._hurt.add(target)
        fault = Fault(kind, target, time.monotonic(), **more)  # type: ignore[arg-type]
        self.log.append(fault)
        try:
            yield fault
            fault.ended_s = time.monotonic()
        finally:
            self._hurt.discard(target)

    # -- processes ----------------------------------------------------------------------------------------------------

    def _victim(self) -> int:
        """Of two."""
        number = self._dice.randrange(2)
        return number if time.monotonic() < self._begun_s + SPARED_AFTER_S else 0

    async def _kill_gateway(self) -> None:
        number = self._victim()
        gateway = self._place.gateways[number]
        async with self._hurting("kill gateway", gateway.name, gateway=number) as fault:
            if fault is None:
                return
            workers = gateway.workers()
            await asyncio.to_thread(gateway.kill)
            await until(lambda: not [pid for pid in workers if os.path.exists(f"/proc/{pid}/exe")], BACK_S)
            await self._restart(gateway)
            await self._place.wait_ready(gateway)

    async def _kill_worker(self) -> None:
        number = self._victim()
        gateway = self._place.gateways[number]
        async with self._hurting("kill worker", gateway.name, gateway=number) as fault:
            if fault is None or not (workers := gateway.workers()):
                return
            os.kill(self._dice.choice(workers), signal.SIGKILL)
            await until(lambda: len(set(gateway.workers()) - set(workers)) == 1, BACK_S)
            await self._place.wait_ready(gateway)

    async def _kill_engine(self) -> None:
        engine = self._place.engines[self._victim()]
        async with self._hurting("kill engine", engine.name) as fault:
            if fault is not None:
                await asyncio.to_thread(engine.kill)
                await self._restart(engine)

    async def _kill_upstream(self) -> None:
        async with self._hurting("kill upstream", "upstream") as fault:
            if fault is not None:
                await asyncio.to_thread(self._place.upstream.kill)
                await self._restart(self._place.upstream)

    async def _restart(self, process: Process) -> None:
        await asyncio.sleep(self._dice.uniform(*SOON_S))
        process.start()

    async def _stop_worker(self) -> None:
        number = self._dice.randrange(2)
        gateway = self._place.gateways[number]
        async with self._hurting("stop worker", gateway.name) as fault:
            if fault is not None and (workers := gateway.workers()):
                await self._stopped(self._dice.choice(workers))

    async def _stop_engine(self) -> None:
        engine = self._dice.choice(self._place.engines)
        async with self._hurting("stop engine", engine.name) as fault:
            if fault is not None and engine.is_running():
                await self._stopped(engine.pid)

    async def _stopped(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._dice.uniform(*STOP_S))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # -- Redis --------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _primary(self, kind: str) -> AsyncIterator[RedisNode | None]:
        async with self._hurting(kind, "redis", redis=True) as fault:
            node = None
            if fault is not None:
                found = await asyncio.to_thread(self._place.primary)
                node = found if found is not None and await asyncio.to_thread(self._place.is_named, found) else None
                if node is None:
                    self.log.remove(fault)
            yield node
            if node is not None:
                await until(self._is_whole, BACK_S)

    async def _is_whole(self) -> bool:
        whole = await asyncio.to_thread(self._place.is_whole)
        if not whole:
            await asyncio.sleep(0.2)
        return whole

    async def _until_another(self, old: RedisNode) -> RedisNode:
        other = next(node for node in self._place.fleet.nodes if node is not old)

        async def named() -> bool:
            await asyncio.sleep(0.1)
            return await asyncio.to_thread(self._place.is_named, other)

        await until(named, BACK_S)
        return other

    async def _kill_primary(self) -> None:
        async with self._primary("kill redis primary") as node:
            if node is not None:
                await asyncio.to_thread(node.kill)
                other = await self._until_another(node)
                await asyncio.sleep(self._dice.uniform(*SOON_S))
                node._options = ("--repl-diskless-sync-delay", "0", "--replicaof", "127.0.0.1", str(other.port))
                await asyncio.to_thread(node.start)

    async def _fail_over(self) -> None:
        async with self._primary("redis fail-over") as node:
            if node is not None:
                await asyncio.to_thread(self._place.fleet.sentinels[0].ask, "SENTINEL", "FAILOVER", "mymaster")
                await self._until_another(node)

    async def _stop_primary(self) -> None:
        async with self._primary("stop redis primary") as node:
            if node is not None:
                await self._stopped(node.process.pid)

    # -- network ------------------------------------------------------------------------------------------------------

    async def _cut_engine(self) -> None:
        engine = self._dice.choice(self._place.engines)
        async with self._hurting("cut off engine", engine.name) as fault:
            if fault is not None:
                await self._cut(engine.port)

    async def _cut_upstream(self) -> None:
        async with self._hurting("cut off upstream", "upstream") as fault:
            if fault is not None:
                await self._cut(self._place.upstream.port)

    async def _cut_primary(self) -> None:
        async with self._primary("cut off redis primary") as node:
            if node is not None:
                await self._cut(node.port)

    async def _cut(self, port: int) -> None:
        """Packets to it are dropped, or those from it, or both: nobody is told."""
        ways = self._dice.choice((("dport",), ("sport",), ("dport", "sport")))
        chain = f"port{port}"
        rules = "".join(f"add rule ip {TABLE} {chain} tcp {way} {port} drop\n" for way in ways)
        hook = "{ type filter hook input priority 0; }"
        await asyncio.to_thread(_nft, f"add table ip {TABLE}\nadd chain ip {TABLE} {chain} {hook}\n{rules}")
        try:
            await asyncio.sleep(self._dice.uniform(*CUT_S))
        finally:
            _nft(f"delete chain ip {TABLE} {chain}\n")

    # -- disk, clock, upstream ----------------------------------------------------------------------------------------

    async def _full_disk(self) -> None:
        async with self._hurting("full disk", "disk") as fault:
            if fault is None:
                return
            file = self._place.disk / "filler"
            free = shutil.disk_usage(self._place.disk).free
            try:
                await asyncio.to_thread(_fill, file, free)
                await asyncio.sleep(self._dice.uniform(*CUT_S))
            finally:
                file.unlink(missing_ok=True)

    async def _slow_disk(self) -> None:
        """Each write waits up to half a second: the file system is frozen again and again, by a process of its own,
        which thaws it whatever becomes of the night."""
        async with self._hurting("slow disk", "disk") as fault:
            if fault is not None:
                times = int(self._dice.uniform(*CUT_S) / 0.6)
                disk = self._place.disk
                loop = f"for i in $(seq {times}); do fsfreeze -f {disk}; sleep 0.5; fsfreeze -u {disk}; sleep 0.1; done"
                await asyncio.to_thread(subprocess.run, ["sh", "-c", loop], check=True)

    async def _step_clock(self) -> None:
        async with self._hurting("step clock", "clock") as fault:
            if fault is not None:
                self._place.step_clock(self._dice.choice((-600.0, -5.0, 5.0, 3600.0)))
                await asyncio.sleep(self._dice.uniform(*CUT_S))
                self._place.step_clock(0.0)

    async def _wrong_bytes(self) -> None:
        way = self._dice.choice(WAYS)
        async with self._hurting(f"wrong bytes: {way}", "upstream") as fault, aiohttp.ClientSession() as session:
            if fault is not None:
                url = f"http://127.0.0.1:{self._place.upstream.port}/wrong/"
                async with session.post(url + way):
                    await asyncio.sleep(self._dice.uniform(*CUT_S))
                async with session.post(url + "no"):
                    pass


def _nft(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text.encode(), check=True)


def _fill(file: Path, size: int) -> None:
    """All that is free: in ever smaller pieces, because a file system keeps some for itself."""
    with file.open("wb") as out:
        at = 0
        while size >= 4096:
            try:
                os.posix_fallocate(out.fileno(), at, size)
                at += size
            except OSError:
                size //= 2
