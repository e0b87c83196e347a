"""What an answer is made of, and what it used."""

from __future__ import annotations

from typing import Literal

from engine.protocol.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer. prompt_tokens includes cached_tokens and cache_write_tokens, which do not overlap.

    cached_tokens       physically reused, or read from a lease, to the token; whichever is more; or the latter alone
    cache_write_tokens  what the breakpoints wrote; without any, what the next request can reuse
    lease               what became of the breakpoints; of several requests, whether any was degraded
    lease_read_tokens   of the longest lease that the prompt begins with, to the token
    lease_writes        the same by breakpoint: time to live in seconds, tokens; shortest prefix first
    reasoning_tokens    of completion_tokens, those of thoughts
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    lease: Literal["kept", "degraded"] | None = None
    lease_read_tokens: int = 0
    lease_writes: tuple[tuple[float, int], ...] = ()
    reasoning_tokens: int = 0

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
            self.reasoning_tokens + other.reasoning_tokens,
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
    """A chunk of the answer: whole characters only, and nothing that may become part of a stop string.

    scored   the tokens that end in it, when log probabilities are asked for; the text is empty where they have none
    refusal  it is no answer, but says why there is none
    """

    text: str
    scored: tuple[ScoredToken, ...] = ()
    refusal: bool = False


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A chunk of a tool call. Calls come one after another: no chunk of an earlier one follows.

    call       0 for the first call of the answer
    name       with the first chunk of a call, and empty ever after
    arguments  the next characters of its arguments, which are a JSON object when the call is complete
    """

    call: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """A chunk of what the model thinks before its text, or before a call. Engines have none: what they think is text.

    signature  with the last chunk of a thought, or alone: what the client is to send back with the next turn, before
               what comes behind it here; as in Thought
    """

    text: str = ""
    signature: str = ""


Delta = TextDelta | CallDelta | ThinkingDelta


FinishReason = Literal["stop", "length", "tool_calls", "refusal"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every answer that did not fail.

    reason  "tool_calls": it ended by itself, and calls tools; "refusal": the model, or a filter of an upstream, did
            not want to answer, or to go on
    stop    the stop string that ended it
    """

    reason: FinishReason
    usage: Usage
    stop: str | None = None


Event = Started | Delta | Finished
