"""A model that knows where every key and value came from.

For each slot of the pool (block, offset) it remembers which tokens, under which salt, were written there. Whoever reads
a slot that does not hold exactly its own prefix, writes a slot that is in use, or forks from the row of another prompt
fails the test. What it "samples" is a function of salt and prefix, so an answer must not depend on scheduling, reuse,
forks, preemption or neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.pool.blocks import BlockPool
from engine.sequence import NOT_FINITE, ROW_FAILED, Result, Sequence, Step, StepGivenUp, Work
from engine.speculation import accept

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
    broken: set[tuple[str, int]] = field(default_factory=set)  # (owner, seq) of which the next row cannot be sampled
    all_bad: bool = (
        False  # all that a poisoned sequence has is found to be not finite, not only what it has just written
    )
    fails: bool = False  # the next step writes something and raises
    steps: list[list[tuple[int, int, int, bool]]] = field(default_factory=list)  # seq, start, count, samples

    def __post_init__(self) -> None:
        self.prefixes = Prefixes()
        self.slots: dict[tuple[int, int], int | tuple[int, int]] = {}

    def run(self, step: Step) -> list[Result]:
        assert step.num_results, "a step is never empty"
        prefilled = sum(work.count for work in step.work if work.count > 1)
        assert prefilled <= max(self.budget, 264), "the step is larger than the budget"
        assert len(set(step.sequences)) == step.num_results, "a sequence is in the step twice"
        assert len(set(step.fresh_blocks)) == len(step.fresh_blocks)
        self.steps.append([(work.sequence.seq, work.start, work.count, work.samples) for work in step.work])
        for block in step.fresh_blocks:
            assert not self.pool.is_registered(block), "a block that can be hit would be zeroed"
            for offset in range(self.pool.block_size):
                self.slots.pop((block, offset), None)
        self._copy(step)
        if step.unwanted is not None and step.unwanted():
            self._leave_garbage(step)
            raise StepGivenUp
        results = [self._compute(work) for work in step.work]
        results += [self._fork(fork) for fork in step.forks]
        if self.fails:
            self.fails = False
            raise RuntimeError("the fake model fails")
        for number, sequence in enumerate(step.sequences):
            if results[number] != NOT_FINITE and (sequence.owner, sequence.seq) in self.broken:
                self.broken.discard((sequence.owner, sequence.seq))
                results[number] = ROW_FAILED
        return results

    def _leave_garbage(self, step: Step) -> None:
        """Where a step that is given up would have written. Nobody may read it."""
        for work in step.work:
            for position in range(work.start, work.start + work.num_rows):
                block = work.sequence.block_table[position // self.pool.block_size]
                self.slots[block, position % self.pool.block_size] = GARBAGE

    def _copy(self, step: Step) -> None:
        sources = {copy.source for copy in step.copies}
        targets = {copy.target for copy in step.copies}
        assert targets <= set(step.fresh_blocks), "a block that may hold anything is copied into"
        assert not sources & targets
        assert len(targets) == len(step.copies)
        for copy in step.copies:
            assert 0 < copy.count < self.pool.block_size
            for offset in range(copy.count):
                self.slots[copy.target, offset] = self.slots[copy.source, offset]

    def find_not_finite(self, blocks: list[int]) -> list[int]:
        size = self.pool.block_size
        return [
            block
            for block in blocks
            if self.all_bad or any(self.slots.get((block, at)) == GARBAGE for at in range(size))
        ]

    def _fork(self, sequence: Sequence) -> int:
        size = self.pool.block_size
        assert not sequence.num_generated
        assert sequence.num_computed == sequence.num_tokens == sequence.num_prompt
        assert len(sequence.block_table) == -(-sequence.num_tokens // size)
        bad = (sequence.owner, sequence.seq) in self.poisoned or sequence.row == GARBAGE
        self.poisoned.discard((sequence.owner, sequence.seq))
        if bad or self.fails:
            return NOT_FINITE
        prefix = self._read(sequence, sequence.num_tokens)
        assert sequence.row == prefix, f"{self._who(sequence)} forks from the row of another prompt"
        return choose_token(self.model + sequence.salt, sequence.tokens, self.vocab)

    def _compute(self, work: Work) -> Result:
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
        prefix = self._read(sequence, work.start)
        for position in range(work.start, end):
            block = sequence.block_table[position // size]
            slot = (block, position % size)
            prefix = self.prefixes.next(prefix, sequence.tokens[position])
            assert not self.pool.is_registered(block), "a block that can be hit would be written"
            in_use = self.slots.get(slot, GARBAGE) != GARBAGE
            assert not in_use, f"{self._who(sequence)} writes {slot}, which is in use"
            self.slots[slot] = GARBAGE if bad or self.fails else prefix
        if work.samples and not sequence.num_generated and sequence.siblings is not None:
            sequence.siblings.row = (GARBAGE if bad else prefix) if sequence.siblings.row_wanted else None
        if bad:
            return NOT_FINITE
        if work.drafts:
            return self._verify(work, prefix)
        return choose_token(self.model + sequence.salt, sequence.tokens, self.vocab) if work.samples else None

    def _verify(self, work: Work, prefix: int | str) -> Result:
        """What comes of drafts. Where they are wrong nobody may read what was written."""
        sequence, size = work.sequence, self.pool.block_size
        assert work.samples
        assert sequence.num_generated
        assert sequence.num_generated + len(work.drafts) < sequence.sampling.max_tokens, "drafts beyond the end"
        assert not sequence.end_ids & set(work.drafts)
        texts = [[*sequence.tokens, *work.drafts[:count]] for count in range(work.num_asked)]
        drawn = [choose_token(self.model + sequence.salt, text, self.vocab) for text in texts]
        if hash(prefix) % 5 == 0:  # a row behind the first one fails
            drawn[-1] = ROW_FAILED
        result = accept(work.drafts, drawn)
        for number, token in enumerate(work.drafts):
            position = work.start + work.count + number
            block = sequence.block_table[position // size]
            slot = (block, position % size)
            assert not self.pool.is_registered(block), "a draft is written into a block that can be hit"
            assert self.pool._refs[block] == 1, "a draft is written into a block that others hold"
            assert self.slots.get(slot, GARBAGE) == GARBAGE, "a draft is written into a slot that is in use"
            prefix = self.prefixes.next(prefix, token)
            self.slots[slot] = prefix if number < len(result) - 1 and not self.fails else GARBAGE
        return result if result[0] >= 0 else result[0]

    def _read(self, sequence: Sequence, end: int) -> int | str:
        """The sequence's prefix up to there, which its slots must hold."""
        prefix: int | str = self.model + sequence.salt
        for position in range(end):
            slot = (sequence.block_table[position // self.pool.block_size], position % self.pool.block_size)
            prefix = self.prefixes.next(prefix, sequence.tokens[position])
            assert self.slots.get(slot) == prefix, f"{self._who(sequence)} reads a strange {slot} at {position}"
        return prefix

    @staticmethod
    def _who(sequence: Sequence) -> str:
        return f"{sequence.owner}/{sequence.seq}"
