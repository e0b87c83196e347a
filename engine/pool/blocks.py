"""The block pool: which blocks are free, which hold a prefix that can be reused, which are in use by whom.

           allocate                   register                    (several sequences may hold one block)
    free ------------> live, private ----------> live, registered <----------.
     ^                      |                         |                      | acquire
     |        release       |           last release  |                      |
     +----------------------'                         v                      |
     '------------------------------------------- cached, registered --------'
                 evict, leaves first

    free    holds nothing that can be hit
    cached  registered and held by no sequence: can be hit, can be evicted once nothing cached hangs from it
    live    held by at least one sequence, registered or not;  free + cached + live == num_blocks
    leased  cached or live, and neither it nor what it hangs from is evicted before its leases end

Knows nothing about sequences, scheduling, time or tensors. engine/tables.py holds the references of sequences,
engine/pool/prefixes.py what the registered blocks hold; engine/leases/leases.py decides what is leased and until when,
and engine/pool/eviction.py the order in which cached blocks go. Written by the engine's loop thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from engine.pool.eviction import EvictionPolicy, LeastRecentlyUsed, Origin
from engine.pool.prefixes import ROOT, Prefixes


class BlockPool:
    """Blocks 0 .. num_blocks - 1 of block_size tokens each. No call is worse than O(log n) for each block it names,
    except forget and check_invariants, which look at every registered block.

    prefixes  what can be found; registered blocks enter it and leave it here alone
    policy    the order of eviction; callers report requests (`begin`) and the time (`advance`) to it
    """

    def __init__(self, num_blocks: int, block_size: int, policy: EvictionPolicy | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefixes = Prefixes(num_blocks, block_size)
        self.taken: dict[bytes, tuple[str, str]] = {}  # evicted digest -> tenant and request that needed its place
        self.evictions = 0  # blocks given up since the start, for others or because of their age
        self.policy: EvictionPolicy = LeastRecentlyUsed(num_blocks) if policy is None else policy

        self._refs = [0] * num_blocks  # sequences that hold the block
        # A heap, lowest ids first: little memory is touched, and what is given back in order is handed out in order.
        self._free = list(range(num_blocks))
        self._leases = [0] * num_blocks  # leases that end in this registered block
        self._pins = [0] * num_blocks  # 1 if refs, 1 if leases, plus pinned registered children; 0: may be evicted
        self._num_live = 0  # blocks with refs
        self._num_evictable = 0  # registered blocks without pins; leaf by leaf, all of them can be evicted

        # The very lists of the forest: pins walk along them.
        self._digest, self._parent, self._children = self.prefixes.digest, self.prefixes.parent, self.prefixes.children

    # -- numbers ------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_live(self) -> int:
        return self._num_live

    @property
    def num_cached(self) -> int:
        return self.num_blocks - len(self._free) - self._num_live

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give at this moment: free ones, and cached ones from which nothing hangs that is
        live or leased."""
        return len(self._free) + self._num_evictable

    def available_beside(self, blocks: Iterable[int]) -> int:
        """What `available` will be after `acquire(blocks)`, for a run that `prefixes.find` returned."""
        pins = self._pins
        return self.available - sum(not pins[block] for block in blocks)

    def is_registered(self, block: int) -> bool:
        return self._digest[block] is not None

    # -- reuse --------------------------------------------------------------------------------------------------------

    def acquire(self, blocks: Iterable[int]) -> None:
        """Takes one reference to each block, parents first. They must be registered or live. Pairs with `release`."""
        refs = self._refs
        for block in blocks:
            refs[block] += 1
            if refs[block] == 1:
                assert self._digest[block] is not None, f"block {block} is free and cannot be acquired"
                self._num_live += 1
                self._pin(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back one reference to each block. A registered block without references stays cached, the
        others are free. Blocks are let go from the end of the run, so its tail is evicted before its head."""
        refs = self._refs
        for block in reversed(blocks):
            assert refs[block] > 0, f"block {block} is released more often than acquired"
            refs[block] -= 1
            if not refs[block]:
                self._num_live -= 1
                if self._pins[block] > 1:  # it stays for a lease, or for what hangs from it: this was its use
                    self.policy.touch(block)
                self._unpin(block)

    def allocate(self, count: int, taker: tuple[str, str] | None = None) -> list[int] | None:
        """`count` private blocks with one reference each, or None and no change when there are not that many.

        taker  its tenant and request, which what is evicted for it is put down to in `taken`
        The blocks hold what their last owner left in them: zero them before they are written (Step.fresh_blocks).
        Evicts cached leaves as far as needed.
        """
        if count > self.available:
            return None
        while len(self._free) < count:
            self.evict(taker)
        blocks = [heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
            self._pins[block] = 1
        self._num_live += count
        return blocks

    def evict(self, taker: tuple[str, str] | None = None) -> None:
        """Gives up the next cached leaf. There must be one."""
        block = self.policy.pop()
        if taker is not None and (digest := self._digest[block]) is not None:
            self.taken[digest] = taker
        self._num_evictable -= 1
        self.evictions += 1
        self._unregister(block)
        heappush(self._free, block)

    # -- leases -------------------------------------------------------------------------------------------------------

    def lease(self, block: int) -> None:
        """Keeps a registered block, and with it everything it hangs from, until `end_lease`. Leases of one block add
        up. The block stays cached or live, as it is; `available` falls by what could have been evicted."""
        assert self._digest[block] is not None, f"block {block} is not registered and cannot be leased"
        self._leases[block] += 1
        if self._leases[block] == 1:
            self._pin(block)

    def end_lease(self, block: int) -> None:
        """Takes one lease of a block back. It is evicted in its turn then: that of its last use, not of this call."""
        assert self._leases[block] > 0, f"block {block} is not leased"
        self._leases[block] -= 1
        if not self._leases[block]:
            self._unpin(block, used=False)

    def is_leased(self, block: int) -> bool:
        """Whether a lease ends in this very block."""
        return self._leases[block] > 0

    def count_leases(self) -> int:
        """Leases of all blocks. O(num_blocks)."""
        return sum(self._leases)

    # -- registration -------------------------------------------------------------------------------------------------

    def register(
        self, block: int, parent: int | None, salt: str, digest: bytes, tokens: bytes, origin: Origin | None = None
    ) -> int | None:
        """Makes the contents of a full, live, private block findable. Call it after the step that wrote it succeeded.

        parent  the registered block that holds the tokens before, which the caller keeps from being evicted; None at
                the beginning of a prefix
        origin  the request that computed it, if eviction is to know
        Returns the block that is findable under this digest from now on: `block` itself; another one when that holds
        the same prefix already, and then `block` stays private and descendants go under the other; None when the
        digest stands for something else (a collision), and then neither `block` nor descendants can be registered.
        """
        assert self._refs[block] > 0, f"block {block} is not live"
        assert self._digest[block] is None, f"block {block} is registered already"
        above = ROOT if parent is None else parent
        assert above == ROOT or self._digest[above] is not None, f"parent {above} of block {block} is not registered"
        holder = self.prefixes.find_block(digest)
        if holder is not None:
            return holder if self.prefixes.holds(holder, above, salt, tokens) else None
        if above != ROOT:
            self._pin(above)
        self.prefixes.add(block, above, salt, digest, tokens)
        self.policy.store(block, above, digest, origin)
        return block

    def forget(self, blocks: Iterable[int]) -> int:
        """Unregisters blocks and everything that hangs from them, because their contents are not to be trusted.
        Those that sequences hold stay with them, as private ones; their leases are at an end. Returns how many were
        unregistered."""
        in_order = self.prefixes.below(blocks)
        for block in reversed(in_order):
            if self._leases[block]:
                self._leases[block] = 0
                self._unpin(block, used=False)
            if not self._pins[block]:
                self.policy.discard(block)
                self._num_evictable -= 1
            self._unregister(block)
            if not self._refs[block]:
                heappush(self._free, block)
        return len(in_order)

    # -- invariants ---------------------------------------------------------------------------------------------------

    def check_invariants(self) -> list[str]:
        """Counts everything anew. Returns what is wrong, in words; empty for a sound pool. O(num_blocks)."""
        wrong = self.prefixes.check_invariants()
        live = cached = evictable = candidates = 0
        pins, free = [0] * self.num_blocks, set(self._free)
        for block in self.prefixes:
            if (parent := self._parent[block]) != ROOT:
                pins[parent] += bool(self._pins[block])
        for block in range(self.num_blocks):
            held, digest, is_free = self._refs[block] > 0, self._digest[block], block in free
            leased = self._leases[block] > 0
            live += held
            cached += not held and digest is not None
            unpinned = digest is not None and not self._pins[block]
            evictable += unpinned
            candidates += unpinned and not self._children[block]
            if is_free == (held or digest is not None):
                wrong.append(f"block {block}: free={is_free}, references={self._refs[block]}, digest={digest!r}")
            if self._refs[block] < 0 or self._pins[block] != pins[block] + held + leased:
                wrong.append(f"block {block}: references or pins are miscounted")
            if self._leases[block] < 0 or (leased and digest is None):
                wrong.append(f"block {block}: {self._leases[block]} leases, and digest={digest!r}")
        if live + cached + self.num_free != self.num_blocks or len(free) != self.num_free:
            wrong.append(f"{self.num_free} free + {cached} cached + {live} live blocks are not {self.num_blocks}")
        counted, kept = (live, evictable, candidates), (self._num_live, self._num_evictable, len(self.policy))
        if counted != kept:
            wrong.append(f"live, evictable and leaf blocks are {counted}, not {kept}")
        return wrong

    # -- pins: a block is pinned while it, or a registered block below it, is live or leased --------------------------

    def _pin(self, block: int) -> None:
        while True:
            self._pins[block] += 1
            if self._pins[block] > 1 or self._digest[block] is None:
                return
            self._num_evictable -= 1
            if not self._children[block]:
                self.policy.discard(block)
            block = self._parent[block]
            if block == ROOT:
                return

    def _unpin(self, block: int, *, used: bool = True) -> None:
        while True:
            self._pins[block] -= 1
            if self._pins[block]:
                return
            if self._digest[block] is None:
                heappush(self._free, block)
                return
            self._num_evictable += 1
            if used:
                self.policy.touch(block)
            if not self._children[block]:
                self.policy.add(block)
            block = self._parent[block]
            if block == ROOT:
                return

    def _unregister(self, block: int) -> None:
        """Takes a leaf out of the index. The caller says what becomes of the block."""
        parent = self.prefixes.remove(block)
        if parent != ROOT:
            if self._pins[block]:
                self._unpin(parent)
            elif not self._children[parent] and not self._pins[parent]:
                self.policy.add(parent)
