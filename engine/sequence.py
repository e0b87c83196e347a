"""The nouns that the scheduler, the runner and the loop share: a sequence, and the work of one step.

Data only: no scheduling, no torch. A sequence is written by the loop's thread alone.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from engine.pool.eviction import Origin
from engine.protocol import Breakpoint, FinishReason, Lane, Sampling, TokenLogprobs

if TYPE_CHECKING:
    from engine.sampling.grammar import Matcher


class Status(enum.Enum):
    """Where a sequence is. A preempted sequence is WAITING again, with its tokens and without blocks."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and its continuation.

    tokens        prompt, then what was generated; array("I")
    digests       chain digests of the leading full blocks of `tokens`; the loop extends them while decoding
    block_table   pool block of each logical block; covers at least num_computed tokens while RUNNING
    num_computed  leading tokens whose keys and values are written
    """

    owner: str  # connection of the gateway that sent it
    seq: int  # the gateway's own number for it; (owner, seq) is unique
    tokens: array[int]
    num_prompt: int
    digests: list[bytes]
    sampling: Sampling
    salt: str = ""
    lane: Lane = "online"
    request_id: str = ""
    tenant: str = ""  # whose leases its breakpoints become
    breakpoints: tuple[Breakpoint, ...] = ()  # by number of tokens
    use_cache: bool = True  # False: has no digests, so nothing is found for it and nothing of it is found
    end_ids: frozenset[int] = frozenset()  # token ids that end it: its stop ids, and the end of text unless ignored
    matcher: Matcher | None = None  # what it may say; written by the thread that computes masks
    arrived_s: float = 0.0  # monotonic clock
    scheduled_s: float | None = None  # when the first step that served it began
    status: Status = Status.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_registered: int = 0  # leading blocks of block_table that the pool can find by digest
    cached_tokens: int | None = None  # prompt tokens reused at the first admission; later admissions do not change it
    findable_tokens: int = 0  # leading tokens that could be reused when it arrived
    preemptions: int = 0
    restored: bool = False  # lower tiers were asked for its prefix since it ran last
    num_queued: int = 0  # leading blocks that were handed over to be saved in lower tiers
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # found with the last tokens, and not told yet
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its second token, its third, ...
    finish: FinishReason | None = None
    origin: Origin = field(default_factory=Origin)  # what eviction is told of its blocks

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step: compute tokens[start : start + count]; sample after the last one or not."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass through the model does. Never empty: a scheduler with nothing to do returns None instead."""

    work: list[Work]
    fresh_blocks: list[int] = field(default_factory=list)  # to be zeroed before the step writes into them

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.work)


class Runner(Protocol):
    """The model, as the loop sees it."""

    def run(self, step: Step) -> list[int | None]:
        """Computes a step.

        Returns one entry for each work of the step, in order: the sampled token id, or None for work that does not
        sample. A work whose hidden state is not finite gets NOT_FINITE, whether it samples or not: the loop fails
        that sequence and registers nothing that the step wrote for it. One whose grammar allows nothing gets NO_TOKEN.
        Any exception fails the whole step. Log probabilities that a sequence asks for are appended to its `logprobs`.
        """
        ...


NOT_FINITE = -1
"""In place of a token id: this sequence's numbers were NaN or infinite."""

NO_TOKEN = -2
"""In place of a token id: the sequence's grammar allows none, because it became too complex."""
