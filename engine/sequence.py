"""The nouns that the scheduler, the runner and the loop share: a sequence, the work of one step, and what is counted.

Data only: no scheduling, no torch. A sequence is written by the loop's thread alone.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.pool.eviction import Origin
from engine.protocol import Breakpoint, FinishReason, Lane, Sampling, TokenLogprobs

if TYPE_CHECKING:
    from engine.sampling.grammar_worker import Matcher
    from engine.speculation import Drafter


class Status(enum.Enum):
    """Where a sequence is. A preempted sequence is WAITING again, with its tokens and without blocks. One that is HELD
    waits for its grammar, in no lane."""

    HELD = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and its continuation.

    tokens        prompt, then what was generated; array("I")
    digests       chain digests of the leading full blocks of `tokens`; the loop extends them while decoding
    block_table   int32, pool block of each logical block; covers at least num_computed tokens while RUNNING
    num_computed  leading tokens whose keys and values are written
    """

    owner: str  # connection of the gateway that sent it
    seq: int  # the gateway's own number for it; (owner, seq) is unique
    tokens: array[int]
    num_prompt: int
    digests: list[bytes]
    sampling: Sampling
    salt: str = ""  # with what names its adapter
    adapter: int = 0  # number of its adapter; 0: none
    lane: Lane = "online"
    request_id: str = ""
    tenant: str = ""  # whose leases its breakpoints become
    breakpoints: tuple[Breakpoint, ...] = ()  # by number of tokens
    use_cache: bool = True  # False: has no digests, so nothing is found for it and nothing of it is found
    end_ids: frozenset[int] = frozenset()  # token ids that end it: its stop ids, and the end of text unless ignored
    matcher: Matcher | None = None  # what it may say
    siblings: Siblings | None = None  # other answers to its prompt, from which it may fork, or they from it
    arrived_s: float = 0.0  # monotonic clock
    scheduled_s: float | None = None  # when the first step that served it began
    status: Status = Status.WAITING
    block_table: array[int] = field(default_factory=lambda: array("i"))
    num_computed: int = 0
    num_registered: int = 0  # leading blocks of block_table that the pool can find by digest
    cached_tokens: int | None = None  # prompt tokens reused at the first admission; later admissions do not change it
    findable_tokens: int = 0  # leading tokens that could be reused when it arrived
    restored: bool = False  # the disk was asked for its prefix since it ran last
    num_queued: int = 0  # leading blocks that were handed over to be saved on disk
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # found with the last tokens, and not reported yet
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its second token, its third, ...
    finish: FinishReason | None = None
    origin: Origin = field(default_factory=Origin)  # of its blocks, for eviction
    follow_start: int = 0  # the draft model has written keys and values of tokens[follow_start:follow_end]
    follow_end: int = 0
    drafter: Drafter | None = None  # what it may go on with; from its second token on

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def row(self) -> Any:
        """Logits behind the prompt, (vocab_size,), of a sequence that forks."""
        assert self.siblings is not None, "a fork has siblings"
        assert self.siblings.row is not None, "there is no row to fork from"
        return self.siblings.row

    @property
    def can_sample(self) -> bool:
        """Whether its next token can be chosen in the next step: one whose mask is late is asked again later."""
        return self.matcher is None or self.matcher.prepare(self.tokens, self.num_prompt)


@dataclass(slots=True, eq=False)
class Siblings:
    """Sequences of one prompt.

    size     how many there will be; `arrived` is how many there have been
    members  those that have not ended
    row      logits behind the prompt, (vocab_size,), while a sibling may still want them; the runner's
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

    @property
    def waiting(self) -> list[Sequence]:
        """Those that may fork."""
        return [member for member in self.members if member.status is Status.WAITING and not member.num_generated]

    def computes(self, sequence: Sequence) -> bool:
        """Whether one that waits will be able to fork: another one has computed the prompt, or does."""
        running = (member for member in self.members if member.status is Status.RUNNING)
        return not sequence.num_generated and any(self.row is not None or not other.num_generated for other in running)

    def settle(self) -> None:
        """One of them has its first token or has ended: the row is dropped when no sibling waits for it."""
        if self.arrived >= self.size and all(member.num_generated for member in self.members):
            self.row = None


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step: compute tokens[start : start + count]; sample after the last one or not.

    drafts  what may come next, computed behind the sequence's last token and sampled after, too
    wanted  drafts of the draft model, which the runner asks for
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    drafts: tuple[int, ...] = ()
    wanted: int = 0

    @property
    def num_rows(self) -> int:
        return self.count + len(self.drafts)

    @property
    def num_asked(self) -> int:
        """Its last rows whose logits are wanted."""
        return 1 + len(self.drafts)

    @property
    def is_prefill(self) -> bool:
        """Whether it computes more than the last token of an answer."""
        return self.count > 1 or self.start < self.sequence.num_prompt


@dataclass(frozen=True, slots=True)
class Copy:
    """The first `count` slots of a block go to a fresh one. Nothing is written to the source before that."""

    source: int
    target: int
    count: int


@dataclass(slots=True)
class Drafting:
    """What the draft model took of a step, which the runner notes."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass through the model does: zero, copy, compute, sample. There is work or there are forks: a scheduler
    with nothing to do returns None instead."""

    work: list[Work]
    fresh_blocks: list[int] = field(default_factory=list)  # to be zeroed before the step writes into them
    copies: list[Copy] = field(default_factory=list)
    forks: list[Sequence] = field(default_factory=list)  # that sample from the row of their siblings
    unwanted: Callable[[], bool] | None = None  # asked while it is computed, whether to give it up; None: to its end
    drafting: Drafting = field(default_factory=Drafting)

    @property
    def num_rows(self) -> int:
        return sum(item.num_rows for item in self.work)

    @property
    def num_results(self) -> int:
        return len(self.work) + len(self.forks)

    @property
    def sequences(self) -> list[Sequence]:
        """In the order of the results."""
        return [work.sequence for work in self.work] + self.forks


Result = int | list[int] | None
"""Of a work or fork: its token, or what stands in place of one; of a work with drafts those that are accepted and the
token behind them; None where nothing is sampled."""


class StepGivenUp(Exception):  # noqa: N818 - nothing went wrong
    """The step was not computed, because something else is to be computed first."""


NOT_FINITE = -1
"""In place of a token id: this sequence's numbers were NaN or infinite."""

NO_TOKEN = -2
"""In place of a token id: the sequence's grammar allows none, because it became too complex."""

ROW_FAILED = -3
"""In place of a token id: something went wrong with this sequence alone; the log has it."""

MASK_LATE = -4
"""In place of a token id: what its grammar allows is not known yet. The row is computed again when it is."""


@dataclass(slots=True)
class Counters:
    """What happened since the start; sequences, tokens or events, as the name says."""

    submitted: int = 0
    refused: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    not_finite: int = 0
    failed_rows: int = 0  # sequences that an error of their own ended, in a step that went on with the others
    preemptions: int = 0
    shared_waits: int = 0  # times a waiting sequence was passed over while another computed their common prefix
    shared_tokens: int = 0  # of cached_tokens, those that another computed after the sequence had arrived
    masks_late: int = 0  # rows that were computed and not sampled from, because their grammar's mask was not there
    forks: int = 0  # sequences that took the prompt of a sibling, and computed nothing of it
    copied_blocks: int = 0  # that were shared when one of their sequences wrote into them
    steps: int = 0  # those that were given up among them
    steps_given_up: int = 0  # because a sequence arrived in the online queue
    prompt_tokens: int = 0  # of sequences at their first admission
    cached_tokens: int = 0  # of those, reused
    prefilled_tokens: int = 0  # computed, recomputation after preemption included
    decoded_tokens: int = 0
    drafted_tokens: int = 0  # computed and sampled beside the last tokens of sequences
    accepted_tokens: int = 0  # of those, what was sampled; they are decoded tokens, too
