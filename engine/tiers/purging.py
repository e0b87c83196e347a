"""Purges a scope from the folder of blocks that outlives the engine: after its blocks were forgotten in all pools.

    leases        written anew without those of the scope, also what the last engine left
    own files     of the scope that the pool does not know: what a copy wrote while the pool forgot, or a start missed
    other files   of engines that are gone, of this model and of others; what cannot be read goes as well
    folders of engines that live are named, because only their engines can purge them

Jobs of one tier are done in order, so whatever was being copied when the scope was forgotten has been written, found to
be forgotten and dropped before the first file is looked at here. Nothing begins before the tier is ready: what a start
takes over meanwhile is asked of `Account.purging`. One job of the thread looks at one folder of files.

Pure bookkeeping on the loop's thread; engine/tiers/tiers.py owns it, engine/tiers/disk_sweep.py has the files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from engine.leases.saving import LeaseSaving
from engine.tiers.stores import Part, Swept
from engine.tiers.tier import Account, Lasting, PurgeReport, Tier, worker_of

MOST_PURGES: Final = 16
"""That are under way or wait; more are refused."""

Done = Callable[[PurgeReport], object]


@dataclass(slots=True, eq=False)
class _Purge:
    """One that is asked for.

    own, others  parts that have not been looked at
    in_use       folders among the others that engines have which live
    """

    prefix: str
    report: PurgeReport
    done: Done
    own: deque[Part] = field(default_factory=deque)
    others: deque[Part] = field(default_factory=deque)
    in_use: set[str] = field(default_factory=set)


class Purging:
    """Of one tier. Purges are done one after the other."""

    def __init__(self, tier: Tier, lasting: Lasting, account: Account) -> None:
        self.leases: LeaseSaving | None = None
        self._tier, self._folder, self._account = tier, lasting.folder, account
        self._waiting: deque[_Purge] = deque()
        self._job: _Purge | None = None

    def __len__(self) -> int:
        """Purges that are not done."""
        return len(self._waiting) + (self._job is not None)

    def begin(self, prefix: str, report: PurgeReport, done: Done) -> None:
        """`done` is called with the report when no file of the scope is left, as far as that can be had."""
        self._waiting.append(_Purge(prefix, report, done))
        self.pump()

    def pump(self) -> None:
        """Begins the next one, if it can be. Call it in each turn."""
        if self._tier.ready and self._job is None and self._waiting:
            self._job = self._waiting.popleft()
            if self.leases is None:
                self._find()
            else:
                self.leases.write_now(self._wrote)

    def _wrote(self, error: Exception | None) -> None:
        self._now.report.left += error is not None
        self._find()

    def _find(self) -> None:
        self._run(self._folder.find_own_parts, self._found_own)

    def _found_own(self, parts: list[Part]) -> None:
        self._now.own.extend(parts)
        self._run(self._folder.find_parts, self._found_others)

    def _found_others(self, parts: list[Part]) -> None:
        self._now.others.extend(parts)
        self._go_on()

    def _go_on(self) -> None:
        job = self._now
        while job.others and job.others[0].folder in job.in_use:
            job.others.popleft()
        if job.own:
            self._run(partial(self._folder.find_salted, job.own.popleft(), job.prefix), self._found_salted)
        elif job.others:
            part = job.others.popleft()
            self._run(partial(self._folder.purge, part, job.prefix), partial(self._purged, part))
        else:
            self._job = None
            job.done(job.report)
            self.pump()

    def _found_salted(self, digests: list[bytes]) -> None:
        """What the pool has is of requests that came later."""
        strays = [digest for digest in digests if self._tier.pool.prefixes.find_block(digest) is None]
        if strays:
            self._run(partial(self._folder.remove, strays), self._removed)
        else:
            self._go_on()

    def _removed(self, swept: Swept) -> None:
        self._now.report.add(swept)
        self._go_on()

    def _purged(self, part: Part, swept: Swept) -> None:
        job = self._now
        job.report.add(swept)
        if swept.owner is not None:
            job.in_use.add(part.folder)
            job.report.in_use.append(swept.owner)
        self._go_on()

    def _run(self, call: Callable[[], Any], done: Callable[[Any], object]) -> None:
        worker_of(self._tier).run(call, done)

    @property
    def _now(self) -> _Purge:
        assert self._job is not None, "no purge is under way"
        return self._job
