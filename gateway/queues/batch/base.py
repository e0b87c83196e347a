"""The values of the batch queue, and the Protocol of what a dialect does with lines.

    a dialect     asks store.py for jobs, and is the Runner that reads and answers lines
    this package  stores jobs and lines, orders the lines, runs each of them until it has one result

A line is one row of the job's input, which is JSONL in any dialect. This package does not read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, Literal, NamedTuple, Protocol

from gateway.types import Usage

State = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
"""As in the OpenAI API. A job that expires is in_progress, then finalizing, until all results are written."""

NO_USAGE: Final = Usage(0, 0)

ENDS: Final[frozenset[State]] = frozenset({"failed", "completed", "expired", "cancelled"})

Unrun = Literal["cancelled", "expired", "failed"]
"""Why a line has no answer: its job was cancelled or expired, or this server failed."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines of a job; `total` is 0 until they are counted. `processing` are those that wait or run."""

    total: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0

    @property
    def processing(self) -> int:
        return self.total - self.succeeded - self.failed - self.cancelled - self.expired


class JobError(NamedTuple):
    """`line` counts from 1, blank rows too; None: the whole job."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One batch. Times are seconds since 1970. A draft has no id and no times: BatchStore.create sets them.

    id              32 characters, `0-9a-f`, in the order of creation
    dialect         "openai" or "anthropic"; other dialects never see it
    endpoint        the path that its lines are for
    expires_s       lines that have not begun by then never will
    namespace       that the client requested with its header, if any
    key             id of the key that it came with, where an admin made it
    metadata        the dialect's own: anything that is JSON
    in_files        its results become files of the tenant; else they are read with BatchStore.results
    output_ttl_s    of these files; None: as long as files of batches are kept
    input_file_id   as the client wrote it, for rows of a file
    reached         when it came to each state
    model           of all lines; None while it is unknown, or when they have several
    validated       its lines are counted and in order
    errors          why it failed, or what it waits for
    output_file_id  of lines that succeeded, once it has ended; None when there are none
    error_file_id   of all other lines, once it has ended; None when there are none
    file_ids        those of both, chosen before they are written
    version         0 before it is stored; goes up with each change
    """

    id: str
    tenant: str
    dialect: str
    endpoint: str
    created_s: float = 0.0
    expires_s: float = 0.0
    namespace: str | None = None
    key: str = ""
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


# -- lines ----------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """Where a row is in the input."""

    offset: int
    num_bytes: int


class Checked(NamedTuple):
    """All lines and their model if it is the same one, or at least one error, which fails the job."""

    lines: list[Line]
    errors: list[JobError]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class LinePlan:
    """What decides when a line runs: its model, the chain digests of its prompt as in EncodedPrompt (empty when
    unknown), and its expected tokens, for turns between tenants."""

    model: str
    digests: bytes = b""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class LineResult:
    """How a line ended.

    body           its result, one row of JSON without the line end
    retry          "again": the failure need not be its own fault; this is its result when it fails too often. "died":
                   as "again", and its engine died at work on it. "later": it was not begun (no engine, no room, a
                   limit); it is tried again until its time is over
    retry_after_s  no line of its model is begun for so long, or longer when this goes on; None: no requested time
    """

    ok: bool
    body: bytes
    usage: Usage = NO_USAGE
    retry: Literal["no", "again", "died", "later"] = "no"
    retry_after_s: float | None = None


class Runner(Protocol):
    """Reads and answers lines. `row` is a line's bytes, with its line end where it has one."""

    def check(self, job: Job, rows: BinaryIO) -> Checked:
        """Blocking, in a thread. `rows` is the whole input, blank and overlong rows included. An error here fails the
        job; an error inside of a request is for its result."""

    async def plan(self, job: Job, row: bytes) -> LinePlan | None:
        """Never raises: a wrong request has no digests, and its result is the error. None: later, because the engines
        of its model are unreachable."""

    async def run(self, job: Job, row: bytes, request_id: str) -> LineResult:
        """Answers a line. Never raises. Cancelled when another gateway has the line, or this one stops."""

    def unrun(self, job: Job, row: bytes, why: Unrun) -> bytes:
        """The result of a line that never ran, one row of JSON without the line end. `row` is empty when it is lost."""
