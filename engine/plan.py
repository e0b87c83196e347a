"""A step in the making, and where a prefill may be cut.

Pure: no queues, no blocks. engine/scheduler.py fills a plan and turns it into a Step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sequence import Copy, Fork, Sequence, Step, Work

MIN_TAIL_TOKENS = 4
"""A prefill computes at least so many tokens at a time, if it has them. Matrix products of one to three rows take
another path on CPUs and round differently: with four, a warm answer equals the cold one bit for bit."""


def choose_cut(start: int, end: int, budget: int, grid: int, *, forced: bool = False) -> int | None:
    """Where a prefill from `start` towards `end` stops in this step, or None when it should wait for a larger budget.

    The end itself if the budget reaches it, else the last multiple of `grid` that it reaches; no piece is smaller
    than MIN_TAIL_TOKENS. A `forced` prefill goes as far as the budget allows when it reaches no such place.
    """
    if end - start <= budget:
        return end
    reach = start + budget
    cut = reach - reach % grid
    while cut - start >= MIN_TAIL_TOKENS:
        if end - cut >= MIN_TAIL_TOKENS:
            return cut
        cut -= grid
    return max(start + 1, min(reach, end - MIN_TAIL_TOKENS)) if forced and budget > 0 else None


def is_prefill(work: Work) -> bool:
    """Whether a work computes more than the last token of an answer."""
    return work.count > 1 or work.start < work.sequence.num_prompt


@dataclass(slots=True)
class Plan:
    """Work is kept by sequence, because a preemption takes out what was planned already."""

    budget: int  # tokens that are left
    now: float  # monotonic second
    work: dict[Sequence, Work] = field(default_factory=dict)
    forks: dict[Sequence, Sequence] = field(default_factory=dict)  # who samples from the row of whom
    fresh: dict[int, None] = field(default_factory=dict)  # new blocks, each once
    too_small: bool = False  # a prefill waits because the budget that is left does not reach its next cut
    first_too_small: bool = False  # and nothing is prefilled before it in this step
    preempted: bool = False  # for want of blocks: nobody is admitted unless nothing else would run
    blocked: bool = False  # an online sequence waits for a slot or blocks: nothing of the batch lane is admitted

    def add(self, sequence: Sequence, count: int) -> None:
        """The next `count` tokens of a sequence that is not in the plan yet."""
        start = sequence.num_computed
        self.work[sequence] = Work(sequence, start, count, samples=start + count == sequence.num_tokens)
        self.budget -= count
        if sequence.scheduled_s is None:
            sequence.scheduled_s = self.now

    def fork(self, sequence: Sequence, source: Sequence) -> None:
        """A sequence that has nothing left to compute: it samples."""
        self.forks[sequence] = source
        if sequence.scheduled_s is None:
            sequence.scheduled_s = self.now

    def forks_of(self, source: Sequence) -> list[Sequence]:
        """Who forks in this step from a source, perhaps from what it is about to compute."""
        return [fork for fork, its_source in self.forks.items() if its_source is source]

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence out again. New blocks of it stay in `fresh`: to zero one that is free harms nobody."""
        self.forks.pop(sequence, None)
        work = self.work.pop(sequence, None)
        if work is not None:
            self.budget += work.count

    def add_fresh(self, blocks: list[int]) -> None:
        self.fresh.update(dict.fromkeys(blocks))

    def drop_fresh(self, blocks: list[int]) -> None:
        """These belong to a copy from now on, which writes them whole: zeroing them meanwhile would do harm."""
        for block in blocks:
            self.fresh.pop(block, None)

    @property
    def has_prefill(self) -> bool:
        return any(is_prefill(work) for work in self.work.values())

    @property
    def is_empty(self) -> bool:
        return not self.work and not self.forks

    def step(self, copies: list[Copy]) -> Step:
        forks = [Fork(sequence, source) for sequence, source in self.forks.items()]
        return Step(list(self.work.values()), list(self.fresh), copies, forks)
