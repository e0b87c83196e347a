"""What one replica's cache holds, as the digests of our own blocks. Pure: values in, values out.

A server names a block by a hash of its own, in pages of its own size. Here every chain of its blocks becomes the chain
of digests that the gateway computes for a prompt. A digest is in the index while its last token's block and every block
before it are held, in any tier: the index is prefix-closed, whatever the order of the events.

The server's blocks form a forest. A `_Run` is a stretch of one chain without a fork, in pages of one size, that is held
alike; a run is split where something happens to a part of it, and children hang at a run's end only.

    attached    its chain reaches a prompt's beginning: its digests are in the index
    detached    a block before it is not held, or was never announced: it is held aside until that block is announced.
                The first run of a detached tree is in `_waiting`, under the block that it waits for

How often a block is held (see `_more`): the device tier counts copies, because a server that computes a block twice
stores and removes it twice. A re-announcement of what is held already (vLLM's kv_cache_report_mode) looks the same,
except that it begins at the prompt's first token; so a store that has no parent never counts a second copy. Other tiers
hold a block or do not. An error on either side is an index that knows too little, until the block is stored again.

Memory, for each block of 16 tokens: 220 bytes where the server's pages have 16 tokens, 1,600 where they have one, and
140 where they are large (tests/bench/event_ingestion.py); 600 for a block alone in its run.
Beyond `max_blocks`, detached runs go first, then the ends of the chains that are oldest.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Final

from engine.protocol import (
    DIGEST_BYTES,
    HASHES,
    TIER_CODES,
    TOKEN_BYTES,
    BlockEvents,
    Namespace,
    Tier,
    chain_digests,
    split_digests,
)
from gateway.replicas.events import Cleared, EventBatch, Key, Removed, Stored

RUN_BLOCKS: Final = 1024
"""Of one run at most: it bounds what a change inside it costs."""

DETACHED_SHARE: Final = 4
"""Detached blocks may be one in so many of `max_blocks`."""

_TIERS: Final = tuple(TIER_CODES)  # fastest first

Copies = tuple[int, int, int]
"""Of one block in each of _TIERS."""


class Residency:
    """The blocks of one replica. `namespace` has an empty salt; a salt and an adapter come with the events."""

    def __init__(self, namespace: Namespace, max_blocks: int) -> None:
        self._namespace = namespace
        self._unit = namespace.block_size
        self._max_blocks = max_blocks
        self.unaligned = 0  # blocks of the server, so far, whose tokens could not be told
        self.shed = 0  # blocks, so far, that `max_blocks` left no room for
        self._changes = _Changes()
        self._forget_all()

    @property
    def blocks(self) -> int:
        """Digests in the index."""
        return len(self._published)

    @property
    def orphans(self) -> int:
        """Blocks, of 16 tokens or the server's smaller ones, whose parent is not held."""
        return self._detached

    def apply(self, batch: EventBatch) -> list[BlockEvents]:
        """What a batch changes in the index, in order. Empty when it changes nothing. Never raises."""
        for event in batch.events:
            if type(event) is Stored:
                if self._is_indexed(event.group, full=event.full, choose=True):
                    self._store(event)
            elif type(event) is Removed:
                if self._is_indexed(event.group):
                    self._remove(event)
            elif type(event) is Cleared:
                self._reset()
        if self._held > self._max_blocks or self._detached > self._max_blocks // DETACHED_SHARE:
            self._shed()
        return self._changes.take()

    def clear(self) -> BlockEvents:
        """Forgets everything, as after a restart of the server."""
        self._reset()
        return self._changes.take()[-1]

    def _reset(self) -> None:
        self._forget_all()
        self._changes.reset()

    def _forget_all(self) -> None:
        self._runs: dict[Key, _Run] = {}
        self._waiting: dict[Key, list[_Run]] = {}
        self._published: set[bytes] = set()
        self._again: dict[bytes, int] = {}  # digest -> further chains with it, as of salts that events do not name
        self._held = 0  # blocks, attached and detached; one larger than ours counts as several
        self._detached = 0  # of these
        self._group: int | None = None
        self._group_is_full = False

    def _is_indexed(self, group: int | None, *, full: bool = False, choose: bool = False) -> bool:
        """One group of a hybrid model's layers is followed: one that is known to have full attention, else the first
        one. An event without a group concerns all."""
        if group is None or group == self._group:
            return True
        if not choose or not (self._group is None or (full and not self._group_is_full)):
            return False
        if self._group is not None:
            self._reset()
        self._group, self._group_is_full = group, full
        return True

    # -- stored --------------------------------------------------------------------------------------------------------

    def _store(self, event: Stored) -> None:
        hashes, packed = event.hashes, self._packed(event)
        if packed is None:
            self.unaligned += len(hashes)
            for run, start, end in self._known(hashes):
                self._hold(run, start, end, _more(run.copies, event.tier, event.parent is not None))
        elif self._runs.keys().isdisjoint(hashes):
            self._add(event, event.parent, 0, len(hashes), packed)
        else:
            self._store_some(event, packed)

    def _packed(self, event: Stored) -> bytes | None:
        """Token ids as bytes; None if they cannot be assigned to the blocks."""
        if not event.block_size or len(event.tokens) != len(event.hashes) * event.block_size:
            return None
        if len(event.hashes) > 1 and len(set(event.hashes)) != len(event.hashes):
            return None
        try:
            return array("I", event.tokens).tobytes()
        except (OverflowError, TypeError):
            return None

    def _store_some(self, event: Stored, packed: bytes) -> None:
        """A span of which some blocks are held: those are held once more, the others are added between them."""
        hashes, width, at = event.hashes, event.block_size * TOKEN_BYTES, 0
        while at < len(hashes):
            start, above = at, hashes[at - 1] if at else event.parent
            while at < len(hashes) and hashes[at] not in self._runs:
                at += 1
            if at > start:
                self._add(event, above, start, at, packed[start * width : at * width])
                continue
            run, first, end = next(self._known(hashes, at))
            at += end - first
            self._hold(run, first, end, _more(run.copies, event.tier, event.parent is not None))

    def _add(self, event: Stored, above: Key | None, start: int, end: int, packed: bytes) -> None:
        """Blocks start..end of an event, none of which is held, behind the block `above`."""
        copies, width = _more((0, 0, 0), event.tier, False), event.block_size * TOKEN_BYTES
        for first in range(start, end, RUN_BLOCKS):
            hashes = list(event.hashes[first : min(first + RUN_BLOCKS, end)])
            tokens = packed[(first - start) * width : (first - start + len(hashes)) * width]
            parent = None if above is None else self._ending_with(above)
            extra = event.extra if first == 0 else ""
            if (
                parent is not None
                and not parent.children
                and parent.size == event.block_size
                and parent.copies == copies
                and not extra
                and len(parent.hashes) + len(hashes) <= RUN_BLOCKS
                and (not self._waiting or self._waiting.keys().isdisjoint(hashes))
            ):
                self._extend(parent, hashes, tokens)
            else:
                run = _Run(hashes, event.block_size, copies, bytearray(tokens), extra)
                self._runs.update(dict.fromkeys(hashes, run))
                self._place(run, parent, above, event)
            above = hashes[-1]

    def _ending_with(self, key: Key) -> _Run | None:
        """The run whose last block is `key`, split off if need be; None if the block is not known."""
        run = self._runs.get(key)
        if run is not None and run.hashes[-1] != key:
            run, _ = self._split(run, run.hashes.index(key) + 1)
        return run

    def _place(self, run: _Run, parent: _Run | None, above: Key | None, event: Stored) -> None:
        """Puts a new run where it belongs in the forest."""
        weight = self._weight(run)
        self._held += weight
        self._detached += weight
        if parent is not None:
            run.parent = parent
            parent.children.append(run)
            if parent.attached:
                self._attach(run, *self._end(parent))
        elif above is not None:
            self._wait(run, above)
        else:
            adapter = event.adapter or self._namespace.adapter
            self._attach(run, replace(self._namespace, salt=event.salt, adapter=adapter).root(), b"")

    def _extend(self, run: _Run, hashes: list[Key], tokens: bytes) -> None:
        """Puts blocks behind the last one of a run that has no children."""
        run.hashes += hashes
        self._runs.update(dict.fromkeys(hashes, run))
        weight = len(hashes) * self._block_weight(run.size)
        self._held += weight
        if not run.attached:
            self._detached += weight
        if not run.digests:
            run.tokens += tokens
            return
        digest, lead = self._end(run)
        digests = chain_digests(digest, lead + tokens, self._unit, self._namespace.hash_name)
        run.digests += digests
        if run.tokens:
            run.tokens += tokens
        if run.attached:
            self._publish(digests, run.tier)

    def _attach(self, run: _Run, digest: bytes, lead: bytes) -> None:
        """A detached run, and everything behind it, enters the index. Its parent is attached, or it begins a prompt.

        digest, lead  state of the chain before it, see _end
        """
        rising = [(run, digest, lead)]
        while rising:
            run, digest, lead = rising.pop()
            if self._waiting:
                run = self._adopt(run)
            if not run.digests:
                self._chain(run, digest, lead)
            run.attached = True
            self._detached -= self._weight(run)
            self._publish(run.own_digests, run.tier)
            if run.children:
                digest, lead = self._end(run)
                rising += [(child, digest, lead) for child in run.children]

    def _adopt(self, run: _Run) -> _Run:
        """Hangs the runs that wait for a block of this run behind it. Returns the run with its first block."""
        for key in [key for key in run.hashes if key in self._waiting]:
            above = self._runs[key]
            if above.hashes[-1] != key:
                first = above is run
                above, _ = self._split(above, above.hashes.index(key) + 1)
                run = above if first else run
            for child in self._waiting.pop(key):
                child.waits_for, child.parent = None, above
                above.children.append(child)
        return run

    def _chain(self, run: _Run, digest: bytes, lead: bytes) -> None:
        """Computes the digests of a run that never was attached."""
        if run.extra:
            digest = HASHES[self._namespace.hash_name](digest + run.extra.encode("utf-8", "surrogatepass"))
        tokens = lead + run.tokens
        run.digests = bytearray(digest + chain_digests(digest, tokens, self._unit, self._namespace.hash_name))
        run.lead = len(lead) // TOKEN_BYTES
        aligned = not lead and run.size % self._unit == 0
        run.tokens = bytearray() if aligned else bytearray(tokens)

    def _end(self, run: _Run) -> tuple[bytes, bytes]:
        """State of the chain behind a run: the last digest, and the tokens that are not in it."""
        done = (len(run.digests) // DIGEST_BYTES - 1) * self._unit * TOKEN_BYTES
        return bytes(run.digests[-DIGEST_BYTES:]), bytes(run.tokens[done:])

    def _hold(self, run: _Run, start: int, end: int, copies: Copies) -> None:
        """Blocks start..end of a run are held in other tiers than before, or more often."""
        if copies == run.copies:
            return
        if end < len(run.hashes):
            run, _ = self._split(run, end)
        if start:
            _, run = self._split(run, start)
        before, run.copies = run.tier, copies
        if run.attached and run.tier != before:
            self._changes.store(bytes(run.own_digests), run.tier)
        self._merge(run)

    # -- removed -------------------------------------------------------------------------------------------------------

    def _remove(self, event: Removed) -> None:
        for run, start, end in self._known(event.hashes):
            copies = _fewer(run.copies, event.tier)
            if any(copies):
                self._hold(run, start, end, copies)
            elif start and end == len(run.hashes) and not run.children:
                self._shorten(run, start)  # what a server does nearly always: the end of a chain goes first
            else:
                if end < len(run.hashes):
                    run, _ = self._split(run, end)
                if start:
                    _, run = self._split(run, start)
                self._drop(run)

    def _known(self, hashes: Sequence[Key], at: int = 0) -> Iterator[tuple[_Run, int, int]]:
        """The parts of runs that the hashes from `at` on name, in order; (run, start, end). The forest may change in
        between."""
        while at < len(hashes):
            run = self._runs.get(hashes[at])
            if run is None:
                at += 1
                continue
            own = run.hashes
            if own[-1] == hashes[at]:
                start = end = len(own)
                while at < len(hashes) and start and own[start - 1] == hashes[at]:
                    start, at = start - 1, at + 1
            else:
                start = end = own.index(hashes[at])
                while at < len(hashes) and end < len(own) and own[end] == hashes[at]:
                    end, at = end + 1, at + 1
            yield run, start, end

    def _shorten(self, run: _Run, at: int) -> None:
        """Forgets the blocks of a run without children from `at` on."""
        gone = run.hashes[at:]
        weight = len(gone) * self._block_weight(run.size)
        self._held -= weight
        if not run.attached:
            self._detached -= weight
        for key in gone:
            del self._runs[key]
        cut, done = self._offset(run, at)
        if run.attached:
            self._withdraw(run.digests[(done + 1) * DIGEST_BYTES :])
        del run.hashes[at:], run.digests[(done + 1) * DIGEST_BYTES :], run.tokens[cut * TOKEN_BYTES :]

    def _drop(self, run: _Run) -> None:
        """Forgets all blocks of a run. What hangs behind it waits for its last block."""
        if run.attached:
            self._detach(run)
        children, last = run.children, run.hashes[-1]
        self._unlink(run)
        for key in run.hashes:
            del self._runs[key]
        weight = self._weight(run)
        self._held -= weight
        self._detached -= weight
        for child in children:
            child.parent = None
            self._wait(child, last)

    def _detach(self, run: _Run) -> None:
        """Takes a run, and everything behind it, out of the index: children before parents."""
        for one in reversed(_tree(run)):
            self._withdraw(one.own_digests)
            one.attached = False
            self._detached += self._weight(one)

    def _wait(self, run: _Run, above: Key) -> None:
        run.waits_for = above
        self._waiting.setdefault(above, []).append(run)

    def _unlink(self, run: _Run) -> None:
        """Takes a run off its parent, or out of those that wait."""
        if run.parent is not None:
            run.parent.children.remove(run)
        elif run.waits_for is not None:
            waiting = self._waiting[run.waits_for]
            waiting.remove(run)
            if not waiting:
                del self._waiting[run.waits_for]

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _split(self, run: _Run, at: int) -> tuple[_Run, _Run]:
        """Two runs in place of one, the first with `at` blocks. The larger one stays the same object."""
        if at * 2 < len(run.hashes):
            head = self._cut_head(run, at)
            return head, run
        tail = self._cut(run, at)
        tail.attached, tail.parent, tail.children = run.attached, run, run.children
        for child in tail.children:
            child.parent = tail
        run.children = [tail]
        self._runs.update(dict.fromkeys(tail.hashes, tail))
        return run, tail

    def _cut(self, run: _Run, at: int) -> _Run:
        """Takes the blocks from `at` on off a run; a run of their own, which is linked to nothing."""
        tail = _Run(run.hashes[at:], run.size, run.copies, bytearray(), "")
        cut, done = self._offset(run, at)
        if run.digests:
            tail.digests, tail.lead = run.digests[done * DIGEST_BYTES :], cut - done * self._unit
            del run.digests[(done + 1) * DIGEST_BYTES :]
        tail.tokens = run.tokens[done * self._unit * TOKEN_BYTES :] if run.digests else run.tokens[cut * TOKEN_BYTES :]
        del run.tokens[cut * TOKEN_BYTES :]
        del run.hashes[at:]
        return tail

    def _cut_head(self, run: _Run, at: int) -> _Run:
        """Takes the first `at` blocks off a run; a run of their own, which takes its place before it."""
        head = _Run(run.hashes[:at], run.size, run.copies, bytearray(), run.extra)
        cut, done = self._offset(run, at)
        head.tokens, head.attached, head.lead = run.tokens[: cut * TOKEN_BYTES], run.attached, run.lead
        if run.digests:
            head.digests = run.digests[: (done + 1) * DIGEST_BYTES]
            del run.digests[: done * DIGEST_BYTES]
            run.lead = cut - done * self._unit
        del run.tokens[: (done * self._unit if run.digests else cut) * TOKEN_BYTES]
        del run.hashes[:at]
        if run.parent is not None:
            siblings = run.parent.children
        elif run.waits_for is not None:
            siblings = self._waiting[run.waits_for]
        else:
            siblings = [run]
        siblings[siblings.index(run)] = head
        head.parent, head.waits_for, head.children = run.parent, run.waits_for, [run]
        run.parent, run.waits_for, run.extra = head, None, ""
        self._runs.update(dict.fromkeys(head.hashes, head))
        return head

    def _offset(self, run: _Run, at: int) -> tuple[int, int]:
        """Tokens of a run before its block `at`, with those of its lead, and how many units of ours they fill."""
        cut = run.lead + at * run.size
        return cut, cut // self._unit

    def _merge(self, run: _Run) -> None:
        """Puts a run behind the last block of its parent, if nothing tells the two apart any more."""
        parent = run.parent
        if (
            parent is None
            or len(parent.children) > 1
            or parent.size != run.size
            or parent.copies != run.copies
            or run.extra
            or len(parent.hashes) + len(run.hashes) > RUN_BLOCKS
            or bool(parent.digests) != bool(run.digests)
        ):
            return
        parent.hashes += run.hashes
        parent.tokens += run.tokens[run.lead * TOKEN_BYTES :]
        parent.digests += run.own_digests
        parent.children = run.children
        for child in parent.children:
            child.parent = parent
        self._runs.update(dict.fromkeys(run.hashes, parent))

    def _weight(self, run: _Run) -> int:
        return len(run.hashes) * self._block_weight(run.size)

    def _block_weight(self, size: int) -> int:
        return max(1, size // self._unit)

    # -- limits and the index ------------------------------------------------------------------------------------------

    def _shed(self) -> None:
        """Makes room, somewhat more than is needed."""
        slack = self._max_blocks // 64
        most = self._max_blocks // DETACHED_SHARE
        while self._waiting and (self._held > self._max_blocks or self._detached > most):
            oldest = next(iter(self._waiting.values()))[0]
            for run in reversed(_tree(oldest)):
                self._shed_run(run)
        target = self._max_blocks - slack if self._held > self._max_blocks else self._max_blocks
        while self._held > target:
            for run in list(islice(self._runs.values(), RUN_BLOCKS)):
                while self._held > target and run.hashes:
                    leaf = run
                    while leaf.children:
                        leaf = leaf.children[0]
                    self._shed_run(leaf)

    def _shed_run(self, run: _Run) -> None:
        self.shed += self._weight(run)
        self._drop(run)
        run.hashes = []

    def _publish(self, packed: bytes | bytearray, tier: Tier) -> None:
        digests = split_digests(bytes(packed))
        if not self._published.isdisjoint(digests):
            for digest in digests:
                if digest in self._published:
                    self._again[digest] = self._again.get(digest, 0) + 1
            digests = [digest for digest in digests if digest not in self._published]
            packed = b"".join(digests)
        self._published.update(digests)
        if digests:
            self._changes.store(bytes(packed), tier)

    def _withdraw(self, packed: bytes | bytearray) -> None:
        digests = split_digests(bytes(packed))[::-1]
        if self._again and not self._again.keys().isdisjoint(digests):
            shared = [digest for digest in digests if digest in self._again]
            digests = [digest for digest in digests if digest not in self._again]
            for digest in shared:
                self._again[digest] -= 1
                if not self._again[digest]:
                    del self._again[digest]
        self._published.difference_update(digests)
        if digests:
            self._changes.remove(b"".join(digests))


class _Run:
    """Blocks that follow one another, of one size, held alike. It belongs to one Residency.

    hashes   the server's names, in order
    digests  the chain's digest before the first one that ends in this run, then those that end in it; empty until it
             is attached for the first time
    tokens   what is needed to go on: all tokens of a run that never was attached; then, with `lead` tokens before them
             that are in no digest yet, those of a run whose blocks are not made of whole units; else empty
    """

    __slots__ = (
        *("attached", "children", "copies", "digests", "extra", "hashes", "lead", "parent", "size", "tokens"),
        "waits_for",
    )

    def __init__(self, hashes: list[Key], size: int, copies: Copies, tokens: bytearray, extra: str) -> None:
        self.hashes = hashes
        self.size = size
        self.copies = copies
        self.tokens = tokens
        self.extra = extra  # of the first block, see Stored
        self.digests = bytearray()
        self.lead = 0
        self.attached = False
        self.parent: _Run | None = None
        self.waits_for: Key | None = None
        self.children: list[_Run] = []

    @property
    def tier(self) -> Tier:
        """The fastest one that holds these blocks."""
        return next(tier for tier, held in zip(_TIERS, self.copies, strict=True) if held)

    @property
    def own_digests(self) -> bytearray:
        return self.digests[DIGEST_BYTES:]


def _tree(run: _Run) -> list[_Run]:
    """A run and everything behind it, parents before children."""
    found, rising = [], [run]
    while rising:
        one = rising.pop()
        found.append(one)
        rising += one.children
    return found


@lru_cache(maxsize=1024)
def _more(copies: Copies, tier: Tier, count: bool) -> Copies:
    """After one store in a tier. `count`: a further copy on the device is a copy, and no re-announcement."""
    device, host, disk = copies
    if tier == "device":
        return (device + 1 if count else max(device, 1)), host, disk
    return (device, 1, disk) if tier == "host" else (device, host, 1)


@lru_cache(maxsize=1024)
def _fewer(copies: Copies, tier: Tier) -> Copies:
    """After one removal from a tier; the same where the tier has none."""
    device, host, disk = copies
    if tier == "device":
        return max(device - 1, 0), host, disk
    return (device, 0, disk) if tier == "host" else (device, host, 0)


class _Changes:
    """Gathers changes into as few BlockEvents as keep their order."""

    def __init__(self) -> None:
        self._done: list[BlockEvents] = []
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        self._tier: Tier = "device"  # of what is stored

    def store(self, packed: bytes, tier: Tier) -> None:
        if not packed:
            return
        if self._stored and tier != self._tier:
            self._flush()
        self._tier = tier
        self._stored.append(packed)

    def remove(self, packed: bytes) -> None:
        if self._stored:
            self._flush()
        self._removed.append(packed)

    def reset(self) -> None:
        self._done, self._stored, self._removed = [BlockEvents(reset=True)], [], []

    def take(self) -> list[BlockEvents]:
        self._flush()
        done, self._done = self._done, []
        return done

    def _flush(self) -> None:
        if self._stored or self._removed:
            stored, removed = b"".join(self._stored), b"".join(self._removed)
            self._done.append(BlockEvents(stored=stored, removed=removed, tier=self._tier))
            self._stored, self._removed = [], []
