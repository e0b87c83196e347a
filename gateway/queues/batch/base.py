"""What a job of the batch lane is, and what its lines ask of a dialect. Values and a Protocol, no code that runs.

    a dialect     asks store.py for jobs, and is the Runner that knows what a line means
    this package  stores jobs and lines, orders the lines, runs each of them until it has one result

A line is one row of the job's input, which is JSONL whatever came over the wire. Nothing here knows what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, Literal, NamedTuple, Protocol

from gateway.types import Usage

State = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
"""As in the OpenAI API. A job that expires is in_progress, then finalizing, until everything that ran is written."""

NO_USAGE: Final = Usage(0, 0)

ENDS: Final[frozenset[State]] = frozenset({"failed", "completed", "expired", "cancelled"})

Unrun = Literal["cancelled", "expired", "failed"]
"""Why a line has no answer: its job was cancelled, its time was over, or it could not be run for a fault of ours."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines of a job. `total` is 0 until they are counted; those that wait or run are in none of the others."""

    total: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0

    @property
    def processing(self) -> int:
        return self.total - self.succeeded - self.failed - self.cancelled - self.expired


class JobError(NamedTuple):
    """`line` counts from 1, blank rows too; None: it is about the whole job."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One batch. Times are seconds since 1970.

    id              32 characters, `0-9a-f`; in their order jobs were made
    dialect         whose job it is, "openai" or "anthropic"; other dialects never see it
    endpoint        the path that its lines are for
    namespace       that the client asked for with its header; None when it did not
    metadata        the dialect's own: anything that is JSON
    reached         when it came to each state
    expires_s       lines that have not begun then never will
    in_files        its results become files of the tenant; else they are read with Batches.results
    output_ttl_s    of these files; None: as long as files of batches are kept
    input_file_id   as it was said, for files that came from one
    model           of all lines; None while it is not known, or when they have several
    validated       its lines are counted and in order
    errors          why it failed, or what it waits for
    output_file_id  of lines that succeeded, once it has ended; None when there are none
    error_file_id   of all other lines, once it has ended; None when there are none
    file_ids        those that were chosen for the two before they were written
    version         goes up with each change
    """

    id: str
    tenant: str
    dialect: str
    endpoint: str
    created_s: float
    expires_s: float
    namespace: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    in_files: bool = False
    output_ttl_s: float | None = None
    input_file_id: str | None = None
    state: State = "validating"
    reached: Mapping[State, float] = field(default_factory=dict)
    model: str | None = None
    validated: bool = False
    counts: Counts = Counts()
    usage: Usage = NO_USAGE
    errors: tuple[JobError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    file_ids: tuple[str, str] | None = None
    version: int = 0

    @property
    def has_ended(self) -> bool:
        return self.state in ENDS


@dataclass(frozen=True, slots=True)
class Order:
    """A job that a client asks for. Fields as in Job.

    num_lines  when they were counted already; else None
    """

    tenant: str
    dialect: str
    endpoint: str
    namespace: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    in_files: bool = False
    output_ttl_s: float | None = None
    window_s: float | None = None  # None is batches.window_s
    num_lines: int | None = None


# -- what batches ask of a dialect ----------------------------------------------------------------------------------


class Line(NamedTuple):
    """Where a row is in the input."""

    offset: int
    num_bytes: int


class Checked(NamedTuple):
    """All lines and what they have in common, or at least one error, which fails the job."""

    lines: list[Line]
    errors: list[JobError]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class LinePlan:
    """What decides when a line runs.

    model    that it asks
    digests  chain digests of its prompt, as in EncodedPrompt; empty when they are not known
    tokens   that it is expected to cost, for turns between tenants
    """

    model: str
    digests: bytes = b""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class LineResult:
    """How a line ended.

    body           its result, one row of JSON without the line end
    retry          "again": it failed in a way that need not be its own fault; this is its result when it fails too
                   often. "died": as "again", and its engine died at work on it. "later": nobody has worked on it (no
                   engine, no room, a limit); it is tried again until its time is over
    retry_after_s  no line of its model is begun for so long, or longer when this goes on; None: as the lane finds right
    """

    ok: bool
    body: bytes
    usage: Usage = NO_USAGE
    retry: Literal["no", "again", "died", "later"] = "no"
    retry_after_s: float | None = None


class Runner(Protocol):
    """What lines mean. `row` is a line's bytes, with its line end where it has one."""

    def check(self, job: Job, rows: BinaryIO) -> Checked:
        """Blocking, in a thread. `rows` are all of the input, blank ones too, of any length. What is wrong here fails
        the job; what is wrong inside of a request is for its result."""

    async def plan(self, job: Job, row: bytes) -> LinePlan | None:
        """Never raises: a request that is wrong has no digests, and is told so when it runs. None: it cannot be told
        now, because the engines of its model are away, and is asked for again."""

    async def run(self, job: Job, row: bytes, request_id: str) -> LineResult:
        """Answers a line. Never raises. Cancelled when somebody else has the line by now, or the gateway stops."""

    def unrun(self, job: Job, row: bytes, why: Unrun) -> bytes:
        """The result of a line that never ran, one row of JSON without the line end. `row` is empty when it is lost."""
