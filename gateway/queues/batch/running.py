"""The lines that this gateway runs: claimed while there is room for more, each run until it has a result or waits
again, their leases renewed. A line whose lease was lost is cancelled: another gateway has it.

A result is on disk before it is stored as one. Lines that end while Redis is unreachable keep their result until then.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from gateway import tasks
from gateway.errors import MAX_DEAD_ENGINES, OverloadedError, StorageError, StorageFullError
from gateway.native import no_panic
from gateway.queues.batch.base import NO_USAGE, Job, LineResult, Runner
from gateway.queues.batch.job import why_dropped
from gateway.queues.batch.lines import KINDS, Claim, Result
from gateway.queues.batch.paths import Ref
from gateway.queues.batch.pauses import Pauses
from gateway.queues.batch.store import Stores
from gateway.types import Usage

log = logging.getLogger(__name__)

_T = TypeVar("_T")

MODELS_AT_ONCE: Final = 64
"""Models whose lines are looked at, besides paused ones."""

ROW_BYTES: Final = 64 << 20
"""Of the rows of all lines that run on one gateway, besides server.max_bodies_bytes; one row may have more."""

FULL_S: Final = 30.0
"""Until lines are claimed again after the disk was full."""


class RunningLines:
    """Those of one gateway. `room` is set when lines may be claimed that could not be before."""

    def __init__(
        self, stores: Stores, runner: Runner, owner: str, clock: Callable[[], float], job_done: Callable[[str], None]
    ) -> None:
        """`job_done` gets the id of a job whose last line got its result here."""
        self.room = asyncio.Event()
        self.pauses = Pauses(clock)
        self._apart = Apart()
        self._counted: Counter[str] = Counter()  # what became of lines
        self._owner = owner
        self._jobs, self._lines, self._folder = stores.jobs, stores.lines, stores.folder
        self._settings, self._now = stores.settings, stores.now
        self._runner = runner
        self._clock = clock
        self._job_done = job_done
        self._running: dict[Ref, tuple[Claim, asyncio.Task[None]]] = {}
        self._no_room_until_s = float("-inf")  # for results, by the clock
        self._took_over_s = float("-inf")

    def __len__(self) -> int:
        return len(self._running)

    def tasks(self) -> list[asyncio.Task[None]]:
        """Tasks that run them. A caller that cancels them puts the lines back, or leaves them to other gateways."""
        return [task for _, task in self._running.values()]

    def figures(self) -> dict[str, int]:
        """How many lines run, how many models are paused; and since the start: results by kind, lines that were put
        back, and lines that were taken over from another gateway."""
        figures = {"in_flight": len(self), "paused_models": self.pauses.num_paused()}
        return figures | {name: self._counted[name] for name in (*KINDS, "put_back", "taken_over")}

    async def put_all_back(self) -> None:
        """Puts all lines back. Raises OverloadedError."""
        try:
            for claim, _ in self._running.values():
                await self._lines.put_back(self._owner, claim)
        finally:
            self._running.clear()

    async def claim(self) -> None:
        """Begins as many lines as there is room for. Raises OverloadedError and StorageError."""
        if self._clock() < self._no_room_until_s or self._room_for() <= 0:
            return
        if self._clock() >= self._took_over_s + self._settings.poll_s:
            self._took_over_s = self._clock()
            if not await asyncio.to_thread(self._folder.has_room):  # for results
                self._wait_for_room()
                return
            now_ms = round(self._now() * 1e3)
            tried = 0 if any(claim.attempts > 1 for claim, _ in self._running.values()) else 1
            claims = await self._lines.take_over(self._owner, self._room_for(), now_ms, self._until_ms(), tried)
            self._counted["taken_over"] += len(claims)
            self._begin(claims)
        found = await self._lines.models(MODELS_AT_ONCE + self.pauses.num_paused())
        running = Counter(claim.model for claim, _ in self._running.values())
        models = self.pauses.open(found)
        models.sort(key=lambda model: running[model])  # one whose lines take long leaves room for the others
        for number, model in enumerate(models):
            share = -(-self._room_for() // (len(models) - number))  # what one does not use, the others have
            if self.pauses.is_doubted(model):
                share = min(share, 1)
            if share > 0:
                claims = await self._lines.claim(self._owner, model, share, self._until_ms())
                self._begin(claims)
                if not claims:
                    self.pauses.idle(model)

    async def renew(self) -> None:
        """Renews their leases, and cancels lines that another gateway has. Raises OverloadedError."""
        asked = dict(self._running)
        ours = set(await self._lines.renew(self._owner, list(asked), self._until_ms())) if asked else set()
        for ref, held in asked.items():
            if ref not in ours and self._running.get(ref) is held:  # else it ended, and may have been claimed again
                del self._running[ref]
                held[1].cancel()
                self.room.set()

    def _begin(self, claims: list[Claim]) -> None:
        for claim in claims:
            if claim.ref not in self._running:
                self._running[claim.ref] = (claim, tasks.spawn(self._answer(claim), name="batch line"))

    async def _answer(self, claim: Claim) -> None:
        cancelled = False
        try:
            job = await self._surely(lambda: self._jobs.find(claim.ref.job))
            if job is None:  # forgotten, and this line with it
                await self._surely(lambda: self._lines.complete(claim, Result("failed"), NO_USAGE))
                await self._surely(lambda: self._lines.forget(claim.ref.job))
            elif (why := why_dropped(job, self._now())) is not None:
                await self._done(job, claim, Result(why), NO_USAGE)
            elif claim.attempts >= self._settings.max_attempts:
                log.warning("a line of %s was tried %d times, and each gateway ended", job.tenant, claim.attempts)
                await self._done(job, claim, Result("failed"), NO_USAGE)
            else:
                with no_panic():
                    await self._run(job, claim)
        except asyncio.CancelledError:
            cancelled = True
            raise
        except StorageFullError:
            self._wait_for_room()
            await self._back(claim)
        except Exception as error:
            if not isinstance(error, StorageError):  # which was logged
                log.exception("a line of a batch could not be run")
            claim = claim._replace(attempts=claim.attempts + 1)
            if claim.attempts < self._settings.max_attempts:
                await self._back(claim)
            else:
                await self._surely(lambda: self._lines.complete(claim, Result("failed"), NO_USAGE))
        finally:
            if not cancelled:  # `renew` and `put_all_back` forget what they cancel
                self._running.pop(claim.ref, None)
                self.room.set()

    async def _back(self, claim: Claim) -> None:
        self._counted["put_back"] += await self._surely(lambda: self._lines.put_back(self._owner, claim))

    async def _run(self, job: Job, claim: Claim) -> None:
        num_bytes = await asyncio.to_thread(self._folder.row_bytes, job, claim.ref.line)
        async with self._apart.turn(claim.model, num_bytes, alone=claim.deaths > 0):
            (row,) = await asyncio.to_thread(self._folder.read_lines, job, claim.ref.line, 1)
            answer = await self._asked(job, row)
        died, again = answer.retry == "died", answer.retry == "again"
        if died or answer.retry == "later" or (again and answer.retry_after_s is not None):
            self.pauses.pause(claim.model, answer.retry_after_s, job.expires_s - self._now())
        else:
            self.pauses.answered(claim.model)
        claim = claim._replace(attempts=claim.attempts + again, deaths=claim.deaths + died)
        is_exhausted = claim.attempts >= self._settings.max_attempts or claim.deaths >= MAX_DEAD_ENGINES
        if answer.retry != "no" and not is_exhausted:
            await self._back(claim)
            return
        offset = await asyncio.to_thread(self._folder.append, job, self._owner, answer.body)
        result = Result("succeeded" if answer.ok else "failed", self._owner, offset, len(answer.body))
        await self._done(job, claim, result, answer.usage)

    async def _asked(self, job: Job, row: bytes) -> LineResult:
        try:
            with no_panic():
                return await self._runner.run(job, row, f"req_{secrets.token_hex(16)}")
        except Exception:
            log.exception("a line of a batch could not be run")
            return LineResult(ok=False, body=self._runner.unrun(job, row, "failed"), retry="again")

    async def _done(self, job: Job, claim: Claim, result: Result, usage: Usage) -> None:
        done = await self._surely(lambda: self._lines.complete(claim, result, usage))
        self._counted[result.kind] += done is not None
        if done is not None and done >= job.counts.total:
            self._job_done(job.id)

    def _room_for(self) -> int:
        return self._settings.max_in_flight - len(self._running)

    def _until_ms(self) -> int:
        return round((self._now() + self._settings.lease_s) * 1e3)

    def _wait_for_room(self) -> None:
        if self._clock() >= self._no_room_until_s:  # once for all lines that ran together
            log.warning("lines of batches wait for %g s: their disk has no room for results", FULL_S)
            self._no_room_until_s = self._clock() + FULL_S

    async def _surely(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """What `call` returns, however long Redis is unreachable."""
        while True:
            try:
                return await call()
            except OverloadedError:
                await asyncio.sleep(self._settings.poll_s)


class Apart:
    """Which lines run together. A line whose engine died runs without other lines of its model on this gateway: if it
    was the cause, no other line fails with it."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._alone: set[str] = set()  # models of which a line runs by itself
        self._changed = asyncio.Event()
        self.row_bytes = 0

    @asynccontextmanager
    async def turn(self, model: str, num_bytes: int, *, alone: bool) -> AsyncIterator[None]:
        """Entered when the line, with a row of so many bytes, may run; `alone`: without other lines of the model."""
        while (
            model in self._alone
            or (alone and self._running[model])
            or (self.row_bytes and self.row_bytes + num_bytes > ROW_BYTES)
        ):
            await self._changed.wait()
        self._running[model] += 1
        self.row_bytes += num_bytes
        if alone:
            self._alone.add(model)
        try:
            yield
        finally:
            self.row_bytes -= num_bytes
            self._running[model] -= 1
            if not self._running[model]:
                del self._running[model]
            if alone:
                self._alone.discard(model)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
