"""What a gateway sends: sequences to be generated, and those it no longer wants. Values only; wire.py makes them bytes.

Sequence numbers ("seq") are chosen by the gateway and unique within its connection. A connection that closes aborts
every sequence it carried.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple

Lane = Literal["online", "batch"]
LANES: Final[tuple[Lane, ...]] = ("online", "batch")  # who is served first


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence is continued. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch their filters off,
    repetition_penalty 1 and the other penalties 0 change nothing."""

    max_tokens: int  # 0 computes the prompt and nothing more, so that it can be reused
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0  # of the likeliest token's probability; what is less likely is left out
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and answer; above 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: tuple[int, ...] = ()  # token ids that end the sequence and are not returned as text
    ignore_eos: bool = False
    min_tokens: int = 0  # before so many, no stop id and no end of text
    prompt_logprobs: int | None = None  # as logprobs, for the prompt's tokens; only where the cache is not used
    logprobs: int | None = None  # likeliest tokens that are told of with each token; None tells of none, nor of itself

    def to_json(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {name: value for name, default in _SAMPLING_DEFAULTS if (value := getattr(self, name)) != default} | {
            "max_tokens": self.max_tokens
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sampling:
        bias = tuple((int(token), float(value)) for token, value in data.pop("logit_bias", ()))
        return cls(logit_bias=bias, stop_ids=tuple(data.pop("stop_ids", ())), **data)


_SAMPLING_DEFAULTS: Final = tuple((spec.name, spec.default) for spec in fields(Sampling))


GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "lark_schemas"]

MAX_GRAMMAR_BYTES: Final = 256 << 10
"""Of a grammar's text in UTF-8."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text has to be.

    text  the JSON Schema, the regular expression or the Lark grammar; empty for json_object. lark_schemas is a Lark
          grammar that refers to JSON Schemas by name, as @name: {"lark": ..., "schemas": {name: schema}}
    """

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The prompt's first `tokens` tokens are to be kept for `ttl_s` seconds, counted from the request's arrival and
    again from that of every later request that begins with them."""

    tokens: int  # need not be a multiple of the block size
    ttl_s: float


class Group(NamedTuple):
    """Several answers to one prompt: sequences that differ in their sampling alone fork instead of computing it
    again. A hint; those whose prompts differ stay alone."""

    number: int  # the gateway's own; unique within its connection
    size: int  # sequences that there will be


@dataclass(frozen=True, slots=True)
class Submit:
    """A new sequence. `digests` covers the full blocks of `tokens`, under the namespace with `salt` filled in."""

    seq: int
    tokens: bytes  # token ids, TOKEN_BYTES each
    digests: bytes  # DIGEST_BYTES each
    sampling: Sampling
    salt: str = ""
    lane: Lane = "online"
    request_id: str = ""
    tenant: str = ""  # whose budget the leases count against
    breakpoints: tuple[Breakpoint, ...] = ()
    use_cache: bool = True  # False: reuses nothing, and nothing of it can be reused
    grammar: Grammar | None = None  # what the text has to be
    group: Group | None = None  # the other answers to its prompt


@dataclass(frozen=True, slots=True)
class Abort:
    """The gateway no longer wants this sequence. Answered by nothing; late updates for it are to be ignored."""

    seq: int


GatewayMessage = Submit | Abort
