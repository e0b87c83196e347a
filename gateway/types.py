"""What travels along the street: requests, encoded prompts, events. Values only, no behaviour beyond derived numbers.

Dialects in api/ make Requests and turn Events back into their wire formats; every stage in between sees only these.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from engine.protocol import TOKEN_BYTES, Breakpoint, Grammar, Lane, Sampling

ANONYMOUS = "anonymous"
"""The tenant of a server without configured keys."""


@dataclass(frozen=True)
class Scope:
    """Who shares blocks with whom: requests of equal scopes do, those of different ones never find, compare or time
    each other's. The owner is a tenant, or a namespace that the operator lets several tenants use; key and cache_salt
    are what clients separate their requests with."""

    tenant: str = ""
    namespace: str = ""
    key: str = ""
    cache_salt: str = ""

    @cached_property
    def salt(self) -> str:
        """The scope's part of the block namespace. Every field is tagged and length-prefixed, so that none can pass for
        another. What clients made up is hashed: it may be a secret, and salts are kept with the blocks."""
        fields = (
            ("tenant", self.tenant),
            ("namespace", self.namespace),
            ("key", _hashed(self.key)),
            ("cache_salt", _hashed(self.cache_salt)),
        )
        return "".join(f"{tag}:{len(value)}:{value};" for tag, value in fields if value)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays and whose cache it is."""

    name: str
    admin: bool = False  # may read /admin and everybody's figures
    weight: float = 1.0  # of its share of engines that others want, too
    priority: bool = False  # whether its requests may go before others'

    @property
    def salt(self) -> str:
        """That of requests which ask for nothing else."""
        return Scope(tenant=self.name).salt


LimitKind = Literal["requests", "tokens", "input_tokens", "output_tokens"]
"""What is limited per minute; tokens are those of prompts and completions together."""

Tier = Literal["priority", "default", "flex"]
"""Of the online lane: who goes first, where requests wait."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much of something a tenant may still send.

    limit      at a time, or per minute
    remaining  of those, before the next request is refused
    reset_s    seconds until all of it is free again, if nothing more comes
    """

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a tenant may still send: requests per minute, or that may wait for a place where that has no limit; and
    tokens per minute where they have one."""

    requests: Room
    tokens: Room | None = None
    input_tokens: Room | None = None
    output_tokens: Room | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What a request will take of its tenant's limits, as far as that is known before it is answered.

    input_tokens   of its prompts, estimated
    answer_tokens  that one answer may have; None: as many as the context
    answers        that are generated
    generates      False: it is counted as a request, and nothing else of it
    """

    input_tokens: int = 0
    answer_tokens: int | None = 0
    answers: int = 0
    generates: bool = True


MAX_BREAKPOINTS = 4
"""Of one request. What more of them means differs by dialect; an engine gets no more."""

MAX_MARKERS = 160
"""Places that the prompt stage looks for in one prompt."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A breakpoint before the prompt is tokens: right after the first `chars` characters of a message's content, or
    behind one of its tool calls, or behind a tool.

    call  number among the message's calls; `chars` says nothing then
    tool  number among the prompt's tools; `message` and `chars` say nothing then

    Behind a call or a tool means behind the last text in it: what closes it, and has no text, may come after.
    """

    message: int
    chars: int
    ttl_s: float
    call: int | None = None
    tool: int | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    parameters  a JSON Schema of type object for its arguments; None takes no arguments
    strict      its arguments are held to the schema also where the model chooses to call it, if its calls begin with a
                token of their own
    path        of `parameters` in the client's request, for error messages
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    path: str = "tools"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may do with the tools of its prompt.

    callable  the tools that it may call: all of the prompt's, or some of them
    mode      "auto": text or calls; "required": one call or more, and nothing else
    parallel  whether there may be more than one call
    """

    callable: tuple[Tool, ...]
    mode: Literal["auto", "required"] = "auto"
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as the chat template wants them: "role" and "content" (a string), "tool_calls", "name", ..."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    markers: tuple[Marker, ...] = ()  # MAX_BREAKPOINTS at most, where the prompt goes to an engine
    tools: tuple[Tool, ...] = ()
    min_breakpoint_tokens: int = 0  # a marker after fewer is no breakpoint
    continues: bool = False  # the answer goes on with the last message, which is an assistant's


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is continued as it is. Special strings in it are text, not tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids that are continued as they are, TOKEN_BYTES each; nothing is put in front of them."""

    tokens: bytes


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a text has to be, and what asked for it, for error messages.

    param   the parameter
    places  paths inside of the grammar, and those in the client's request that they stand for
    """

    grammar: Grammar
    param: str
    places: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class CachedContent:
    """The beginning of prompts, which a client asked to keep under a name until a time.

    name      made by the gateway, unguessable
    body      what was sent, as its dialect wrote it; empty where it is only listed
    tokens    up to the breakpoint at its end
    *_s       seconds since 1970
    """

    name: str
    model: str
    body: bytes
    num_bytes: int
    tokens: int
    created_s: float
    updated_s: float
    expires_s: float
    display_name: str = ""


Prompt = ChatPrompt | TextPrompt | TokenPrompt
PromptParam = Literal["messages", "prompt", "input", "contents"]


@dataclass(frozen=True, slots=True)
class Lease:
    """What became of the breakpoints of a request that has some.

    degraded  breakpoints that ordinary eviction may take; all of them, where an engine knows no leases
    kept      the last breakpoint, when none is degraded
    """

    degraded: int
    kept: Breakpoint | None

    @property
    def state(self) -> Literal["kept", "degraded"]:
        return "degraded" if self.kept is None else "kept"


@dataclass(frozen=True, slots=True)
class Hit:
    """An answer that was remembered, and what generating it had taken.

    kind           "exact": the answer to this very request; "semantic": to one that means the same
    prompt_tokens  of the request that it was generated for
    generation_ms  from its arrival to its last token
    """

    kind: Literal["exact", "semantic"]
    prompt_tokens: int
    completion_tokens: int
    generation_ms: float


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a request says of the response cache. Everything here restricts what is reused or with whom, but `asked`,
    which takes part where the tenant's policy leaves that to requests.

    asked       None leaves it to the policy; False: nothing of it is looked up, shared or kept
    read        whether what was answered before will do
    write       whether the answer may be kept
    only_kept   nothing is generated for it: it is answered from the cache, or refused
    max_age_s   of what will do
    ttl_s       for which the answer is kept, at most
    partition   separates what would be shared; of the client's making
    semantic    whether what means the same will do; None leaves it to the policy
    similarity  that such an answer needs at least; it may only raise the cache's own bound
    """

    asked: bool | None = None
    read: bool = True
    write: bool = True
    only_kept: bool = False
    max_age_s: float | None = None
    ttl_s: float | None = None
    partition: str = ""
    semantic: bool | None = None
    similarity: float | None = None


PLAIN_REUSE = Reuse()

Outcome = Literal["exact", "shared", "semantic", "miss", "bypass"]


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the response cache had for a request.

    outcome     "exact": the answer to this very request; "shared": the same, while it was generated for somebody else;
                "semantic": that to one that means the same; "bypass": the cache had no part in it
    reason      of a bypass, one word
    entry       id of the answer that was found, or would be kept; it tells nothing of the request
    age_s       of the answer that was found
    similarity  of the request that it was given to, where that was another
    """

    outcome: Outcome
    reason: str = ""
    entry: str = ""
    age_s: float = 0.0
    similarity: float | None = None

    @property
    def found(self) -> bool:
        return self.outcome in ("exact", "shared", "semantic")

    @property
    def all_there(self) -> bool:
        """Whether the whole answer was found, so that there is nothing to wait for between its pieces."""
        return self.outcome in ("exact", "semantic")


class Repeat(Protocol):
    """What the response cache gave to a request, as long as the very same request would get it again."""

    @property
    def num_bytes(self) -> int:
        """That it keeps in memory."""
        ...

    def again(self) -> Lookup | None:
        """The cache gives it once more, and has counted that. None: it would not give this answer now."""
        ...


@dataclass(slots=True)
class Trace:
    """What happened to a request, filled in along the street; the log line, the metrics and the headers read it."""

    engine: str | None = None
    hit: Hit | None = None  # then nothing was computed for it
    fork: bool = False  # its prompt is accounted for with another answer's
    prompt_tokens: int = 0
    cached_tokens: int = 0  # whose blocks were physically reused
    told_cached_tokens: int = 0  # as in Usage
    cache_write_tokens: int = 0
    lease_read_tokens: int = 0  # of the longest lease that the prompt begins with, to the token
    lease_write_tokens: int = 0  # beyond those, up to the last breakpoint that is kept from now on
    lease_writes: tuple[tuple[float, int], ...] = ()  # as in Usage
    lease_reads: tuple[int, ...] = ()  # tokens of all leases that the prompt begins with, longest first
    breakpoints: tuple[Breakpoint, ...] = ()  # of the prompt, shortest prefix first
    kept_tokens: int = 0  # up to the last of them that is kept
    lease: Lease | None = None
    by_upstream: bool = False  # it was an upstream that answered, and its cache that was read
    completion_tokens: int = 0
    tokenized_tokens: int = 0  # of prompt_tokens, those that had to be tokenised anew
    retries: int = 0
    overhead_ms: float = 0.0  # the gateway's own time before the engine had the request, waiting in a queue excluded
    queue_ms: float = 0.0  # waiting for a place, in the gateway and in the engine
    first_token_ms: float | None = None  # from arrival
    finish: str | None = None
    lookup: Lookup | None = None  # in the response cache; None: it was not asked
    repeat: Repeat | None = None  # of an answer that was in the cache's memory


@dataclass(slots=True)
class Group:
    """Requests for several answers to one prompt. They go to one engine, which computes their prompt once.

    size    how many there are
    number  by which the engine knows them
    """

    size: int
    number: int = field(default_factory=itertools.count(1).__next__)
    incarnation: str | None = None  # of the engine that was chosen for the first of them
    choosing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be generated. `sampling.max_tokens` 0 means up to the context's end, or nothing for `prewarm`."""

    request_id: str
    tenant: Tenant
    model: str
    prompt: Prompt
    sampling: Sampling
    received_s: float  # monotonic clock
    deadline_s: float  # monotonic clock; nothing is waited for past it
    stop: tuple[str, ...] = ()  # strings that end the answer and are not part of it
    prompt_param: PromptParam = "messages"  # the name of the prompt in error messages
    lane: Lane = "online"
    tier: Tier = "default"  # says nothing in the batch lane
    scope: Scope | None = None  # None is the tenant's own
    use_cache: bool = True  # False: nothing is reused, and nothing of it can be
    only_leased: bool = False  # what was reused without a lease is not told as cached
    prewarm: bool = False  # computes the prompt, so that it is cached, and generates nothing
    fit: bool = False  # max_tokens that are more than the context has left are cut to that, and not refused
    constraint: Constraint | None = None
    tool_use: ToolUse | None = None  # None: what the model writes is text, whatever it looks like
    group: Group | None = None
    number: int = 0  # among the requests of its group; the prompt is accounted for with the first
    stream: bool = False  # the client gets pieces as they come; else it is all one how an answer is cut
    reuse: Reuse = PLAIN_REUSE
    trace: Trace = field(default_factory=Trace)

    @property
    def salt(self) -> str:
        """Under which its blocks are kept and found."""
        return self.tenant.salt if self.scope is None else self.scope.salt


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """A text and how many numbers its vector is to have.

    tokens      ids of the embedding model, its special tokens included
    dimensions  the model's own, or fewer
    """

    tokens: Sequence[int]
    dimensions: int


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as engines and index know it.

    tokens       token ids, TOKEN_BYTES each
    digests      chain digests of its full blocks, DIGEST_BYTES each, under the namespace with the request's salt
    breakpoints  where the client asked for caching, shortest first, each at another token
    """

    tokens: bytes
    digests: bytes
    new_tokens: int = 0  # tokens of segments that were not in the memo
    breakpoints: tuple[Breakpoint, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Ask:
    """What a place at an engine is asked for, as the queue knows it.

    deadline_s     monotonic clock; nothing is waited for past it
    cached_tokens  leading tokens of the prompt that each incarnation holds; one that is missing holds none
    only           the incarnation that it has to be, for requests that belong together
    avoid          incarnations that failed it, and get it only where there is no other
    lane           online, or batch: then it has a place only where nobody of the online lane wants one
    tier           who goes first, in the online lane
    weight         of the tenant's share
    digests        of the prompt's full blocks, where the lane looks for what begins like it
    block_size     tokens of each
    """

    tenant: str
    prompt_tokens: int
    deadline_s: float
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    only: str | None = None
    avoid: frozenset[str] = frozenset()
    lane: Lane = "online"
    tier: Tier = "default"
    weight: float = 1.0
    digests: bytes = b""
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer. prompt_tokens includes cached_tokens and cache_write_tokens, which do not overlap.

    cached_tokens       physically reused, or read from a lease, to the token; whichever is more; or the latter alone
    cache_write_tokens  what the breakpoints wrote; without any, what the next request can reuse
    lease               what became of the breakpoints; of several requests, whether any was degraded
    lease_read_tokens   of the longest lease that the prompt begins with, to the token
    lease_writes        the same by breakpoint: time to live in seconds, tokens; shortest prefix first
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    lease: Literal["kept", "degraded"] | None = None
    lease_read_tokens: int = 0
    lease_writes: tuple[tuple[float, int], ...] = ()

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
            "degraded" if "degraded" in (self.lease, other.lease) else self.lease or other.lease,
            self.lease_read_tokens + other.lease_read_tokens,
            self.lease_writes + other.lease_writes,
        )


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of every answer: an engine has the request and its first token is there. The trace says more.

    usage  of the prompt; the completion has no tokens yet
    """

    engine: str
    usage: Usage
    scored: tuple[ScoredToken, ...] = ()  # the prompt, when asked for; nothing comes before its first token: 0 there


@dataclass(frozen=True, slots=True)
class Spelled:
    """A token as its tokeniser writes it.

    text   U+FFFD for bytes that are no whole character
    bytes  None for special tokens, which are no text
    """

    text: str
    bytes: bytes | None


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer with its log probability and those of the likeliest tokens in its place, best first.

    offset  characters of the answer before it
    """

    token: Spelled
    logprob: float
    top: tuple[tuple[Spelled, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer: whole characters only, and nothing that may yet turn out to be part of a stop string.

    scored  the tokens that end in it, when log probabilities are asked for; the text is empty where they have none
    """

    text: str
    scored: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call. Calls come one after another: no piece of an earlier one follows.

    call       0 for the first call of the answer
    name       with the first piece of a call, and empty ever after
    arguments  the next characters of its arguments, which are a JSON object when the call is complete
    """

    call: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a tenant had us keep, without its bytes. It never changes.

    id         32 characters, `0-9a-f`; in their order files were made
    filename   as the client named it, without folders; nothing on disk is called so
    purpose    what it is for, as in the OpenAI API
    mime_type  as the client said
    expires_s  seconds since 1970, as created_s; None: kept until it is deleted
    """

    id: str
    filename: str
    purpose: str
    mime_type: str
    num_bytes: int
    created_s: float
    expires_s: float | None


FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every answer that did not fail.

    reason  "tool_calls": it ended by itself, and calls tools
    stop    the stop string that ended it
    """

    reason: FinishReason
    usage: Usage
    stop: str | None = None


Event = Started | TextDelta | CallDelta | Finished


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request that goes on to an upstream as the client wrote it.

    path     of the client's URL, `{model}` in the place of the model's name where it has one
    query    of the client's URL, still encoded, without keys; empty without one
    headers  of the client, those alone that are passed on
    values   what the body says, parsed; not to be changed
    metered  whether its answer tells a usage
    """

    request_id: str
    tenant: Tenant
    dialect: str
    model: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    values: Mapping[str, Any]
    received_s: float  # monotonic clock
    deadline_s: float  # monotonic clock
    metered: bool = True
    reuse: Reuse = PLAIN_REUSE
    trace: Trace = field(default_factory=Trace)


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """An upstream's answer as it came, an error of its own included.

    headers  those that a client may see; without Content-Length the length is not known
    pieces   of the body, as they come. Raises UpstreamLostError, or DeadlineError, when it does not come to its end
    label    of the model, for metrics: one of few, whatever clients ask for
    """

    upstream: str
    status: int
    headers: tuple[tuple[str, str], ...]
    pieces: AsyncGenerator[bytes, None]
    label: str
