"""Turns a step of the scheduler into the flat arrays that one pass through the model reads.

All tokens of all works lie in one row, one work after the other: no padding between sequences, so nothing is computed
for nobody. Knows block tables and positions, nothing about models or attention; engine/compute/runner.py feeds it and
engine/compute/attention.py reads the spans. Numpy only.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.sequence import Step, Work

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """One work's rows of the batch, and where its sequence's keys and values lie.

    row    first row of the batch
    count  rows
    asked  the last ones, whose logits are wanted
    start  position of the first row in its sequence; the last row attends to positions 0 .. start + count - 1
    table  int32, pool block of each logical block; covers start + count tokens
    """

    row: int
    count: int
    start: int
    table: array[int]
    asked: int = 1

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """The arrays of one step.

    tokens     (num_tokens,)  int64  token ids
    positions  (num_tokens,)  int64  position of each token in its own sequence
    slots      (num_tokens,)  int64  slot that each token's keys and values go to: block * block_size + offset
    asked      (num_asked,)   int64  rows whose logits are wanted: the last of each work, before it where it has drafts
    scored     (num_scored,)  int64  rows whose next token is a prompt's whose log probability is wanted
    adapters   (num_tokens,)  int64  number of each row's adapter, 0 without one; None: no row has one
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    asked: Ints
    spans: list[Span]
    scored: Ints
    adapters: Ints | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def make_batch(step: Step, block_size: int) -> Batch:
    """The arrays of a step. Copies what it takes from the sequences, which may grow as soon as this returns."""
    tokens, positions, slots = (np.empty(step.num_rows, np.int64) for _ in range(3))
    spans: list[Span] = []
    asked: list[int] = []
    row = 0
    for work in step.work:
        sequence, start, count = work.sequence, work.start, work.num_rows
        table = sequence.block_table
        if count == 1:
            tokens[row] = sequence.tokens[start]
            positions[row] = start
            slots[row] = table[start // block_size] * block_size + start % block_size
        else:
            _fill_rows(work, block_size, tokens[row : row + count], positions[row : row + count], slots[row:])
        spans.append(Span(row, count, start, table, work.num_asked))
        row += count
        asked += range(row - work.num_asked, row)
    scored = [
        span.row + at - span.start for work, span in zip(step.work, spans, strict=True) for at in scored_positions(work)
    ]
    numbers = [work.sequence.adapter for work in step.work]
    adapters = np.repeat(numbers, [work.num_rows for work in step.work]) if any(numbers) else None
    return Batch(tokens, positions, slots, np.array(asked, np.int64), spans, np.array(scored, np.int64), adapters)


def make_rows(rows: list[tuple[int, int, array[int]]], block_size: int) -> Batch:
    """The arrays of a step of one token for each sequence: the token, its position, and the block table."""
    tokens = np.array([token for token, _, _ in rows], np.int64)
    positions = np.array([at for _, at, _ in rows], np.int64)
    slots = np.array([table[at // block_size] * block_size + at % block_size for _, at, table in rows], np.int64)
    spans = [Span(row, 1, at, table) for row, (_, at, table) in enumerate(rows)]
    return Batch(tokens, positions, slots, np.arange(len(rows)), spans, np.empty(0, np.int64))


def scored_positions(work: Work) -> range:
    """Positions of a work from which the next token of the prompt is to be scored, and was not before a preemption."""
    sequence = work.sequence
    if sequence.sampling.prompt_logprobs is None:
        return range(0)
    first = max(work.start, len(sequence.prompt_logprobs))
    return range(first, max(first, min(work.start + work.count, sequence.num_prompt - 1)))


def _fill_rows(work: Work, block_size: int, tokens: Ints, positions: Ints, slots: Ints) -> None:
    start, end = work.start, work.start + work.num_rows
    known = work.sequence.tokens[start : start + work.count]  # slicing an array copies: no view keeps it from growing
    tokens[: work.count], tokens[work.count :] = known, work.drafts
    positions[:] = np.arange(start, end)
    first = start // block_size
    blocks = np.array(work.sequence.block_table[first : (end - 1) // block_size + 1], np.int64)
    slots[: end - start] = blocks[positions // block_size - first] * block_size + positions % block_size


def run_start(table: list[int], num_blocks: int) -> int | None:
    """The first block, when the first `num_blocks` blocks of a table are consecutive in the pool; else None."""
    first = table[0]
    if table[num_blocks - 1] - first != num_blocks - 1:
        return None
    if table[:num_blocks] == list(range(first, first + num_blocks)):
        return first
    return None


def consecutive(slots: Ints) -> int | None:
    """The first slot, when the slots are consecutive and ascending; else None."""
    first = int(slots[0])
    if int(slots[-1]) - first == len(slots) - 1 and (np.diff(slots) == 1).all():
        return first
    return None
