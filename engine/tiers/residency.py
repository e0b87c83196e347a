"""What the gateways are told of several tiers: for each block the fastest one that holds it.

Pure bookkeeping over the block pools. Each tier is prefix-closed by itself (a pool evicts leaves only), so their union
is, and no block is in a faster tier than its parent's fastest. engine/tiers/tiers.py notes changes here, engine/loop.py
publishes them, engine/publish.py and gateway/index/ read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.pool.blocks import BlockPool
from engine.protocol import BlockEvents, Tier, split_digests


class Residency:
    """Changes of the union since the last `take`."""

    def __init__(self, pools: Sequence[BlockPool], names: Sequence[Tier]) -> None:
        """Both from the fastest tier to the slowest."""
        self._pools = pools
        self._names = names
        self._before: list[dict[bytes, bool]] = [{} for _ in pools]  # changed digest -> was it held at the last take
        self._stored: list[dict[bytes, None]] = [{} for _ in pools]  # in the order in which they came to be
        self._removed: list[dict[bytes, None]] = [{} for _ in pools]  # in the order in which they went

    def note(self, tier: int) -> list[bytes]:
        """Takes the events of one tier's pool. Returns the digests that it gave up since the last call."""
        events = self._pools[tier].prefixes.take_events()
        before, stored, removed = self._before[tier], self._stored[tier], self._removed[tier]
        gone = split_digests(events.removed)
        for digest in gone:
            before.setdefault(digest, True)
            stored.pop(digest, None)
            removed.pop(digest, None)
            removed[digest] = None
        for digest in split_digests(events.stored):
            before.setdefault(digest, False)
            removed.pop(digest, None)
            stored[digest] = None
        return gone

    def take(self) -> list[BlockEvents]:
        """What became findable, moved or ceased to be, net, at most one run for each tier; often empty.

        Applied one after the other they keep a table prefix-closed: what is gone comes first, children before parents,
        then what is stored, the fastest tier first and parents before children within each.
        """
        if len(self._pools) == 1:
            events = self._pools[0].prefixes.take_events()
            return [events] if events.stored or events.removed else []
        self.note(0)
        now: dict[bytes, int | None] = {}
        for changed in self._before:
            for digest in changed:
                if digest not in now:
                    held = [pool.prefixes.find_block(digest) is not None for pool in self._pools]
                    was = [before.get(digest, is_held) for before, is_held in zip(self._before, held, strict=True)]
                    if _first(held) != _first(was):
                        now[digest] = _first(held)
        stored = [
            [digest for digest in changed if now.get(digest, -1) == tier] for tier, changed in enumerate(self._stored)
        ]
        told = {digest for run in stored for digest in run}
        for digest, tier in now.items():
            if tier is not None and digest not in told:  # it moved down: its place in the table is as it was
                stored[tier].append(digest)
        removed = self._gone(now)
        for changes in (self._before, self._stored, self._removed):
            for change in changes:
                change.clear()
        runs = [BlockEvents(b"".join(run), tier=name) for run, name in zip(stored, self._names, strict=True) if run]
        if removed:
            first = runs[0] if runs else BlockEvents()
            runs[:1] = [replace(first, removed=removed)]
        return runs

    def snapshot(self) -> list[BlockEvents]:
        """Everything that can be found now, the fastest tier first, to start a table from."""
        told: set[bytes] = set()
        runs: list[BlockEvents] = []
        for pool, name in zip(self._pools, self._names, strict=True):
            run = [digest for digest in split_digests(pool.prefixes.snapshot().stored) if digest not in told]
            told.update(run)
            runs.append(BlockEvents(b"".join(run), tier=name, reset=not runs))
        return runs

    def _gone(self, now: dict[bytes, int | None]) -> bytes:
        """Children before parents: where a child left a tier, its parent was still there, so that of all the places
        where a digest stands the last one is behind all those of its children."""
        order: dict[bytes, None] = {}
        for removed in self._removed:
            for digest in removed:
                if digest in now and now[digest] is None:
                    order.pop(digest, None)
                    order[digest] = None
        return b"".join(order)


def _first(held: Sequence[bool]) -> int | None:
    """The fastest tier."""
    return next((tier for tier, is_held in enumerate(held) if is_held), None)
