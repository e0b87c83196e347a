"""Makes an engine forget a scope: everything whose salt begins with a prefix, which is a tenant or a namespace.

    leases      end
    sequences   that wait or run go on, reuse nothing more, and nothing that they compute is kept
    blocks      cannot be found any more, in no tier; those that sequences hold stay with them until they end
    files       are gone when `done` is called

What requests that come later compute is kept as usual. Runs on the loop's thread; engine/loop.py posts it.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.scheduler import Scheduler
from engine.tiers.tier import PurgeReport


def purge(scheduler: Scheduler, prefix: str, done: Callable[[PurgeReport | None], object]) -> None:
    """`done` is called once, perhaps before this returns; with None when as many purges wait as may."""
    if not scheduler.tiers.can_purge:
        done(None)
        return
    report = PurgeReport(owner=scheduler.tiers.owner)
    report.leases = scheduler.leases.purge(prefix)
    for sequence in scheduler.sequences():
        if sequence.salt.startswith(prefix):
            scheduler.tables.detach(sequence)
            scheduler.claims.close(sequence)
            report.sequences += 1
    scheduler.tiers.purge(prefix, report, done)
