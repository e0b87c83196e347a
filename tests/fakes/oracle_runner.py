"""A model that knows where every key and value came from.

For each slot of the pool (block, offset) it remembers which tokens, under which salt, were written there. Whoever reads
a slot that does not hold exactly its own prefix, or writes a slot that is in use, fails the test. What it "samples" is
a function of salt and prefix, so an answer must not depend on scheduling, reuse, preemption or neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.pool.blocks import BlockPool
from engine.sequence import NOT_FINITE, Sequence, Step, Work

GARBAGE = (-1, -1)
"""In a slot: numbers that nobody may ever read."""


class Prefixes:
    """Exact identities of (salt, tokens): no hashing, so nothing can collide."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int | str, int], int] = {}

    def next(self, before: int | str, token: int) -> int:
        return self._ids.setdefault((before, token), len(self._ids))


def choose_token(salt: str, tokens: Seq[int], vocab: int) -> int:
    """What every runner here samples after these tokens."""
    state = sum(salt.encode()) + 7
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1442695040888963407) % (1 << 64)
    return (state >> 33) % vocab


def choose_answer(salt: str, prompt: Seq[int], vocab: int, max_tokens: int, stops: frozenset[int]) -> list[int]:
    """The naive twin of the whole engine: one sequence, alone, without a cache."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        token = choose_token(salt, tokens, vocab)
        if token in stops:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@dataclass
class OracleRunner:
    """Runner of engine.sequence, with faults on demand."""

    pool: BlockPool
    vocab: int
    budget: int  # tokens of one step at most
    model: str = ""  # another one computes other keys, values and answers
    poisoned: set[tuple[str, int]] = field(default_factory=set)  # (owner, seq) whose next work is not finite
    fails: bool = False  # the next step writes something and raises
    steps: list[list[tuple[int, int, int, bool]]] = field(default_factory=list)  # seq, start, count, samples

    def __post_init__(self) -> None:
        self.prefixes = Prefixes()
        self.slots: dict[tuple[int, int], int | tuple[int, int]] = {}

    def run(self, step: Step) -> list[int | None]:
        assert step.work, "a step is never empty"
        assert step.num_tokens <= self.budget, "the step is larger than the budget"
        assert len({work.sequence for work in step.work}) == len(step.work), "a sequence is in the step twice"
        assert len(set(step.fresh_blocks)) == len(step.fresh_blocks)
        self.steps.append([(work.sequence.seq, work.start, work.count, work.samples) for work in step.work])
        for block in step.fresh_blocks:
            assert not self.pool.is_registered(block), "a block that can be hit would be zeroed"
            for offset in range(self.pool.block_size):
                self.slots.pop((block, offset), None)
        results = [self._compute(work) for work in step.work]
        if self.fails:
            self.fails = False
            raise RuntimeError("the fake model fails")
        return results

    def _compute(self, work: Work) -> int | None:
        sequence, size = work.sequence, self.pool.block_size
        end = work.start + work.count
        assert work.count >= 1
        assert work.start == sequence.num_computed
        assert end <= sequence.num_tokens
        assert work.samples == (end == sequence.num_tokens)
        assert end <= len(sequence.block_table) * size, "the table does not cover the work"
        assert len(set(sequence.block_table)) == len(sequence.block_table), "a block is in the table twice"
        bad = (sequence.owner, sequence.seq) in self.poisoned
        self.poisoned.discard((sequence.owner, sequence.seq))
        prefix: int | str = self.model + sequence.salt
        for position in range(end):
            block = sequence.block_table[position // size]
            slot = (block, position % size)
            prefix = self.prefixes.next(prefix, sequence.tokens[position])
            if position < work.start:
                assert self.slots.get(slot) == prefix, f"{self._who(sequence)} reads a strange {slot} at {position}"
            else:
                assert not self.pool.is_registered(block), "a block that can be hit would be written"
                assert slot not in self.slots, f"{self._who(sequence)} writes {slot}, which is in use"
                self.slots[slot] = GARBAGE if bad or self.fails else prefix
        if bad:
            return NOT_FINITE
        return choose_token(self.model + sequence.salt, sequence.tokens, self.vocab) if work.samples else None

    @staticmethod
    def _who(sequence: Sequence) -> str:
        return f"{sequence.owner}/{sequence.seq}"
