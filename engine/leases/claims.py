"""The lease side of a sequence: the leases that its prompt uses, those that its breakpoints become, and the figures
that are reported about them.

A breakpoint is granted as soon as the full blocks before it are registered: at admission if they were cached, else
after the step that computed them. engine/leases/leases.py decides what is kept, engine/tables.py holds the sequence's
blocks, engine/scheduler.py says when.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from engine.leases.leases import Leases
from engine.leases.pins import Lease
from engine.protocol import Breakpoint, SequenceUpdate
from engine.sequence import Sequence

MAX_READS: Final = 256
"""Leases that are reported of those which one prompt begins with; the longest ones."""


@dataclass(slots=True)
class _Claim:
    """What one sequence wants and has.

    wishes  breakpoints that are not granted yet and degraded leases that it uses, longest first
    made    what its breakpoints became
    seen    number of the last lease that it renewed if it uses it
    """

    wishes: list[Breakpoint | Lease]
    seen: int
    made: list[Lease] = field(default_factory=list)
    read_tokens: int | None = None  # None before the first admission
    reads: list[int] = field(default_factory=list)  # tokens of the leases that were read, longest first


class Claims:
    """Of the sequences that have breakpoints, or may use a lease. The others cost a look into a dict."""

    def __init__(self, leases: Leases, block_size: int) -> None:
        self.leases = leases
        self._block_size = block_size
        self._claims: dict[Sequence, _Claim] = {}

    def __len__(self) -> int:
        """Sequences that have claims."""
        return len(self._claims)

    def open(self, sequence: Sequence, tokens: bytes) -> None:
        """A sequence has arrived with these tokens: the leases that they begin with are renewed at once, so that
        none of them ends while it waits."""
        leases = self.leases
        if not sequence.use_cache:
            return
        leases.expire(sequence.arrived_s)
        if sequence.breakpoints or leases.any_of(sequence.salt):
            leases.renew(leases.find(sequence.salt, tokens, sequence.digests), sequence.arrived_s)
            self._claims[sequence] = _Claim(list(reversed(sequence.breakpoints)), leases.last_number)

    def admit(self, sequence: Sequence, now: float) -> None:
        """The sequence has got its blocks, and holds those that it reuses. Reads at the first admission."""
        claim = self._claims.get(sequence)
        if claim is None:
            if not (sequence.use_cache and self.leases.any_of(sequence.salt)):
                return
            claim = self._claims[sequence] = _Claim([], seen=0)
        if claim.read_tokens is None:
            self._read(sequence, claim)
        self.register(sequence, now)

    def fork(self, sequence: Sequence, source: Sequence, now: float) -> None:
        """The sequence has got the blocks of another one's prompt: it read what that one read."""
        if (shared := self._claims.get(source)) is not None:
            claim = self._claims.setdefault(sequence, _Claim([], seen=0))
            claim.read_tokens, claim.reads = shared.read_tokens, shared.reads
        self.admit(sequence, now)

    def register(self, sequence: Sequence, now: float) -> None:
        """More blocks of the sequence may be registered: what it wants up to there is granted."""
        claim = self._claims.get(sequence)
        if claim is None:
            return
        wishes, leases = claim.wishes, self.leases
        while wishes and wishes[-1].tokens // self._block_size <= sequence.num_registered:
            wish = wishes.pop()
            tokens = sequence.tokens[: wish.tokens].tobytes()
            digests = sequence.digests[: wish.tokens // self._block_size]
            if isinstance(wish, Lease):
                leases.keep_again(wish, tokens, digests, now)
                continue
            lease = leases.grant(
                sequence.tenant,
                sequence.salt,
                tokens,
                digests,
                wish.ttl_s,
                arrived_s=sequence.arrived_s,
                now=now,
            )
            claim.made.append(lease)

    def describe(self, sequence: Sequence, update: SequenceUpdate) -> None:
        """Fills in the figures of leases, if the sequence has breakpoints or read something."""
        claim = self._claims.get(sequence)
        read = claim.read_tokens or 0 if claim is not None else 0
        if not read and not sequence.breakpoints:
            return
        made = claim.made if claim is not None else []
        kept = max((lease.tokens for lease in made if lease.state == "kept"), default=0)
        update.lease_read_tokens = read
        update.lease_write_tokens = max(0, kept - read)
        if claim is not None and claim.reads and sequence.breakpoints:
            update.lease_reads = claim.reads
        update.leases_degraded = sum(lease.state in ("degraded", "dropped") for lease in made)
        if claim is not None and sequence.num_computed >= sequence.num_prompt:
            # Everything before these is computed, and cannot be found: a digest stands for something else.
            update.leases_degraded += sum(isinstance(wish, Breakpoint) for wish in claim.wishes)

    def close(self, sequence: Sequence) -> None:
        """The sequence has ended; what was granted to it stays."""
        self._claims.pop(sequence, None)

    def _read(self, sequence: Sequence, claim: _Claim) -> None:
        leases, tokens = self.leases, sequence.tokens[: sequence.num_prompt].tobytes()
        found = leases.find(sequence.salt, tokens, sequence.digests)
        leases.renew(found, sequence.arrived_s, after=claim.seen)
        claim.read_tokens = leases.read(found, sequence.salt, tokens, sequence.digests)
        # What a shorter one keeps is part of what the longest keeps, which was compared.
        claim.reads = list(dict.fromkeys(lease.tokens for lease in found if lease.tokens <= claim.read_tokens))
        del claim.reads[MAX_READS:]
        degraded = [lease for lease in found if lease.state == "degraded"]
        claim.wishes = sorted([*claim.wishes, *degraded], key=lambda wish: -wish.tokens)
