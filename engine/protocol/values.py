"""The values of the contract: identity of blocks, what gateways send, what engines send, keys of the index, endpoints.

    chain_0 = H(namespace, every field tagged and length-prefixed)
    chain_i = H(chain_{i-1} || token ids of block i, little-endian uint32)

A digest is a hint and never a proof: the engine compares the stored token ids before it reuses a block. The gateway
chains the blocks of prompts, the engine goes on with those of answers.

Sequence numbers ("seq") are chosen by the gateway and unique within its connection. A connection that closes aborts
every sequence it carried. engine/protocol/wire.py makes messages bytes.

The tag in braces of an index key keeps all keys of one model in one cluster slot. engine/publish.py writes them,
gateway/index/ and gateway/engines/registry.py read them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import asdict, field, fields, replace
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import xxhash

from engine.protocol.frozen import dataclass

# -- identity of blocks ------------------------------------------------------------------------------------------------

DIGEST_BYTES: Final = 16
TOKEN_BYTES: Final = 4  # little-endian uint32, as array("I") holds them on every platform we run on

MIN_TAIL_TOKENS: Final = 4
"""An engine computes at least so many tokens of a prompt, the last one among them. Matrix products of one to three rows
take another path on CPUs and round differently: with four, a warm answer equals the cold one bit for bit."""

HashName = Literal["xxh3_128", "sha256"]


def _xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _sha256_128(data: bytes) -> bytes:
    """SHA-256 cut to 128 bits, so that digests have one width everywhere (NIST SP 800-107, section 5.1)."""
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


HASHES: Final[dict[HashName, Callable[[bytes], bytes]]] = {"xxh3_128": _xxh3_128, "sha256": _sha256_128}


def adapter_salt(fingerprint: str) -> str:
    """The last field of the salt of an adapter's blocks. Salts are made of tagged, length-prefixed fields, and gateways
    know none of this name, so no tenant and no key can spell it."""
    return f"adapter:{len(fingerprint)}:{fingerprint};" if fingerprint else ""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides the tokens that makes KV vectors differ. Two equal namespaces may share blocks."""

    weights: str  # fingerprint of the weights and their revision
    dtype: str  # dtype the model computes in, e.g. "bfloat16"
    kv_dtype: str  # dtype of the stored keys and values
    block_size: int  # tokens per block
    adapter: str = ""  # fingerprint of an adapter, empty without one
    quantization: str = ""  # scheme of quantised weights, empty without one
    hash_name: HashName = "xxh3_128"
    salt: str = ""  # the tenant's share of the identity; an engine announces its namespace with an empty one

    def root(self) -> bytes:
        """chain_0: the digest that every chain in this namespace starts from. DIGEST_BYTES long."""
        parts = [b"kvasir-block-chain-v1"]
        # An engine keeps blocks of several adapters, and tells them from each other by their salt.
        own = {"adapter": "", "salt": self.salt + adapter_salt(self.adapter)}
        for spec in fields(self):
            value = str(own.get(spec.name, getattr(self, spec.name))).encode("utf-8", "surrogatepass")
            tag = spec.name.encode()
            parts.append(struct.pack("<II", len(tag), len(value)) + tag + value)
        return HASHES[self.hash_name](b"".join(parts))


def chain_digests(
    parent: bytes, tokens: bytes | memoryview, block_size: int, hash_name: HashName = "xxh3_128"
) -> bytes:
    """Digests of every full block in `tokens`, one after the other.

    parent      digest of the block before, or Namespace.root()
    tokens      token ids, TOKEN_BYTES each; a tail shorter than a block is left out
    Returns (num_full_blocks * DIGEST_BYTES) bytes; empty when no block is full.
    """
    digest, width, out = HASHES[hash_name], block_size * TOKEN_BYTES, []
    view = memoryview(tokens)
    for start in range(0, len(view) - width + 1, width):
        parent = digest(parent + view[start : start + width])
        out.append(parent)
    return b"".join(out)


def split_digests(packed: bytes) -> list[bytes]:
    """The digests of a packed run, in order."""
    return [packed[i : i + DIGEST_BYTES] for i in range(0, len(packed), DIGEST_BYTES)]


# -- keys of the index -------------------------------------------------------------------------------------------------

Tier = Literal["device", "host", "disk"]  # "device" is where the model runs, which may be a CPU
TIER_CODES: Final[dict[Tier, bytes]] = {"device": b"g", "host": b"h", "disk": b"d"}

ENGINES_KEY: Final = "kvasir:engines"  # sorted set: incarnation -> Unix second at which its announcement expires


def announcement_key(incarnation: str) -> str:
    """String with a TTL: the JSON announcement (see Hello.to_json, plus "url") of one engine incarnation."""
    return f"kvasir:engine:{incarnation}"


def blocks_key(model: str, incarnation: str) -> str:
    """Hash with a TTL: digest -> TIER_CODES byte + decimal block id. It lives as long as the heartbeat renews it."""
    tag = xxhash.xxh3_64_hexdigest(model.encode())
    return f"kvasir:{{{tag}}}:blocks:{incarnation}"


# -- what a gateway sends ----------------------------------------------------------------------------------------------

Lane = Literal["online", "batch"]
LANES: Final[tuple[Lane, ...]] = ("online", "batch")  # in the order of service


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
    logprobs: int | None = None  # likeliest tokens reported with each token; None reports none, nor its own

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
    adapter: str = ""  # fingerprint of the LoRA adapter; `digests` are under the namespace with it


@dataclass(frozen=True, slots=True)
class Abort:
    """The gateway no longer wants this sequence. Answered by nothing; late updates for it are to be ignored."""

    seq: int


GatewayMessage = Submit | Abort


# -- what an engine sends ----------------------------------------------------------------------------------------------

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
    adapters: tuple[tuple[str, str], ...] = ()  # LoRA: names under which the model with one is served, fingerprints
    parent: str = ""  # the model that an adapter is of

    def named(self, model: str) -> Hello:
        """The same engine as it serves one of its adapters; as it is for any other name. One object for equal ones."""
        return self if model == self.model or not self.adapters else _named(self, model)

    def to_json(self) -> dict[str, Any]:
        """What an engine without adapters says is read by gateways that know none."""
        return {name: value for name, value in asdict(self).items() if value or name not in ("adapters", "parent")}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Hello:
        namespace = Namespace(**data.pop("namespace"))
        adapters = tuple((str(name), str(fingerprint)) for name, fingerprint in data.pop("adapters", ()))
        return cls(namespace=namespace, eos_ids=tuple(data.pop("eos_ids")), adapters=adapters, **data)


@lru_cache(maxsize=4096)
def _named(hello: Hello, model: str) -> Hello:
    if (fingerprint := dict(hello.adapters).get(model)) is None:
        return hello
    namespace = replace(hello.namespace, adapter=fingerprint)
    return replace(hello, model=model, namespace=namespace, adapters=(), parent=hello.model)


class Taker(NamedTuple):
    """Whose request needed the place of so many blocks; empty where that is not known, or where it was none."""

    blocks: int
    tenant: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Blocks that can be hit from now on, and blocks that cannot any more. `reset` starts from an empty table.

    A block that is stored again has moved: `tier` is the fastest one that holds it. Removed ones are in no tier."""

    stored: bytes = b""  # packed digests, parents before children
    removed: bytes = b""  # packed digests, children before parents
    reset: bool = False
    tier: Tier = "device"  # of everything in `stored`
    takers: tuple[Taker, ...] = ()  # of `removed`, one run behind the other, all of it or nothing


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


# -- the engine's HTTP -------------------------------------------------------------------------------------------------

STREAM_PATH: Final = "/v1/stream"  # WebSocket
TOKENIZER_PATH: Final = "/v1/tokenizer"  # GET -> JSON, see TokenizerFiles
HEALTH_PATH: Final = "/health"  # GET -> 200 when ready, 503 while draining
STATS_PATH: Final = "/v1/stats"  # GET -> JSON, the engine's own counters
PURGE_PATH: Final = "/v1/purge"  # POST {"salt_prefix": ...} -> JSON, see docs/engine.md
SECRET_HEADER: Final = "x-kvasir-secret"  # noqa: S105 - the name of a header


MOST_PREFIX_CHARS: Final = 4096
"""Of `salt_prefix`; longer than the longest name of a tenant or namespace."""

PURGE_LIMIT_S: Final = 60.0
"""An engine answers a purge after so long at the latest, and says what it has done by then."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a gateway needs to render and tokenise for a model, without having its files."""

    tokenizer_json: str  # the file of the tokenizers library
    chat_template: str | None
    special_tokens: dict[str, str]  # names a template may use ("bos_token", "eos_token", ...) -> text
    add_bos: bool  # a plain completion prompt starts with the tokeniser's own prefix

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TokenizerFiles:
        return cls(**data)

    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json(), sort_keys=True).encode())
