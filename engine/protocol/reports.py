"""What an engine sends: itself, its blocks, and what each step did. Values only; wire.py makes them bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, NamedTuple

from engine.protocol.identity import Namespace
from engine.protocol.index_keys import Tier

PROTOCOL_VERSION: Final = 5

FinishReason = Literal["stop", "length", "abort", "error"]
"""`error`: this sequence failed, and would anywhere. `abort`: the engine gave it up; another one may take it."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What an engine says of itself before anything else."""

    incarnation: str  # new at every start of the process
    model: str  # name under which the model is served
    namespace: Namespace  # with an empty salt
    context_tokens: int  # prompt + completion must fit
    vocab_size: int
    num_blocks: int
    max_sequences: int  # sequences that run at the same time
    eos_ids: tuple[int, ...]
    tokenizer: str  # fingerprint of what TOKENIZER_PATH returns
    created: int  # Unix second at which the engine started
    version: int = PROTOCOL_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Hello:
        namespace = Namespace(**data.pop("namespace"))
        return cls(namespace=namespace, eos_ids=tuple(data.pop("eos_ids")), **data)


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Blocks that can be hit from now on, and blocks that cannot any more. `reset` starts from an empty table.

    A block that is stored again has moved: `tier` is the fastest one that holds it. Removed ones are in no tier."""

    stored: bytes = b""  # packed digests, parents before children
    removed: bytes = b""  # packed digests, children before parents
    reset: bool = False
    tier: Tier = "device"  # of everything in `stored`


@dataclass(frozen=True, slots=True)
class Load:
    """How busy an engine is, at the end of a step."""

    waiting: int = 0  # sequences admitted and not yet running
    running: int = 0
    prefill_backlog: int = 0  # tokens of waiting and running sequences still to be prefilled
    free_blocks: int = 0  # never written, or holding nothing that can be hit
    cached_blocks: int = 0  # unreferenced, can be hit, can be evicted
    live_blocks: int = 0  # referenced by a sequence; free + cached + live == total
    leased_blocks: int = 0  # cached or live, and kept by a lease
    prefill_tokens_per_s: float = 0.0  # moving averages; 0 before anything was measured
    decode_tokens_per_s: float = 0.0
    draining: bool = False
    batch_waiting: int = 0  # of those that wait, and the next two likewise, in the batch lane, which gives way
    batch_running: int = 0
    batch_backlog: int = 0


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities, before everything that a sampler does: of a token, and of the likeliest."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # token ids and theirs, the likeliest first


@dataclass(slots=True)
class SequenceUpdate:
    """What one step did for one sequence. The first update carries cached_tokens and the two times, and that of a
    sequence whose prompt has breakpoints, or begins with what a lease keeps, the figures of leases."""

    seq: int
    tokens: list[int] = field(default_factory=list)  # new tokens; a stop token is not among them
    cached_tokens: int | None = None  # prompt tokens whose blocks were reused
    queue_ms: float | None = None  # from arrival at the engine to the first scheduled step
    prefill_ms: float | None = None  # from the first scheduled step to the first token
    finish: FinishReason | None = None
    stop_id: int | None = None  # the stop token, when one ended the sequence
    error: str | None = None  # what went wrong, when finish is "error" or "abort"
    grammar_path: str | None = None  # inside of the grammar, when finish is "error" because it cannot be carried out
    lease_read_tokens: int | None = None  # of the longest lease that the prompt begins with, to the token
    lease_write_tokens: int | None = None  # up to the last breakpoint that is kept from now on, beyond those read
    leases_degraded: int | None = None  # breakpoints that ordinary eviction may take, for want of budget
    lease_reads: list[int] | None = None  # tokens of all leases that the prompt begins with, longest first
    logprobs: list[TokenLogprobs] | None = None  # one for each of `tokens`, when they were asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # one for each token of the prompt but the first


@dataclass(frozen=True, slots=True)
class StepFrame:
    """Everything one step did for the sequences of one gateway."""

    updates: list[SequenceUpdate]
    load: Load


EngineMessage = Hello | BlockEvents | StepFrame
