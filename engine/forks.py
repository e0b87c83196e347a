"""Several answers to one prompt: which sequences they are, and from which of them another one may fork.

               the prompt's last tokens are in this step, or were
    source ------------------------------------------------------> its blocks and its last row
                                                                       |
    fork    waiting ----------------------------------------------> running, with nothing left to compute

A gateway says which sequences belong together; only those that really have the same prompt do. The first of them
computes it. The others wait for that, take its blocks, and sample from the same row of logits, each with its own seed.
Whoever comes later does the same as long as one of them runs. Nobody depends on it: without a source a sequence is
admitted like any other.

Pure bookkeeping. engine/planner.py asks, engine/tables.py shares the blocks and copies the last one when it is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.plan import Plan
from engine.protocol import Group
from engine.sequence import Sequence, Status


@dataclass(slots=True, eq=False)
class Siblings:
    """Sequences of one prompt.

    size     how many there will be; `arrived` is how many there have been
    members  those that have not ended
    row      logits behind the prompt, (vocab_size,), while somebody may still want them; the runner's
    """

    key: tuple[str, int]
    size: int
    members: dict[Sequence, None] = field(default_factory=dict)
    arrived: int = 0
    row: Any = None

    @property
    def row_wanted(self) -> bool:
        """Whether there is, or will be, one that has no token yet; besides the one that asks, which has none."""
        return self.arrived < self.size or sum(not member.num_generated for member in self.members) > 1

    def settle(self) -> None:
        """One of them has its first token or has ended: the row is let go of when nobody waits for one any more."""
        if self.arrived >= self.size and all(member.num_generated for member in self.members):
            self.row = None


class Forks:
    """The sequences of all gateways that have siblings."""

    def __init__(self) -> None:
        self._siblings: dict[tuple[str, int], Siblings] = {}

    def __len__(self) -> int:
        """Prompts with more than one answer. At most as many as there are sequences."""
        return len(self._siblings)

    def join(self, sequence: Sequence, group: Group | None) -> None:
        """A sequence has arrived. It stays alone if it differs from those it is said to belong to."""
        if group is None or group.size < 2:
            return
        key = (sequence.owner, group.number)
        siblings = self._siblings.get(key)
        if siblings is None:
            siblings = self._siblings[key] = Siblings(key, group.size)
        elif not _alike(sequence, next(iter(siblings.members))):
            return
        siblings.members[sequence] = None
        siblings.arrived += 1
        sequence.siblings = siblings

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        siblings, sequence.siblings = sequence.siblings, None
        if siblings is None:
            return
        del siblings.members[sequence]
        if not siblings.members:
            del self._siblings[siblings.key]
        siblings.settle()


def find_source(sequence: Sequence, plan: Plan) -> tuple[Sequence | None, bool]:
    """From whom a waiting sequence can fork in this step; and whether it should wait, because a sibling computes their
    prompt and is not done."""
    siblings, is_computed = sequence.siblings, False
    if siblings is None or sequence.num_generated:
        return None, False
    for other in siblings.members:
        if other.status is not Status.RUNNING:
            continue
        if other.num_generated:  # not one that recomputes what a preemption took
            if siblings.row is not None and other.num_tokens - other.num_computed == 1:
                return other, False
        elif (work := plan.work.get(other)) is not None and work.samples:
            return other, False
        else:
            is_computed = True
    return None, is_computed


def _alike(one: Sequence, other: Sequence) -> bool:
    full = len(one.digests)
    return (
        (one.salt, one.lane, one.use_cache) == (other.salt, other.lane, other.use_cache)
        and one.sampling.prompt_logprobs == other.sampling.prompt_logprobs
        and one.tokens == other.tokens[: other.num_prompt]
        and one.digests == other.digests[:full]
    )
