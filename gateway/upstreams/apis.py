"""The differences between the APIs of upstreams: one row of APIS for each. Pure.

Each API counts cached tokens in its own way. Here a prompt is everything that the model read, cached or not:

    OpenAI, vLLM, SGLang   prompt_tokens includes prompt_tokens_details.cached_tokens (which may be null)
    Responses API          input_tokens includes input_tokens_details.cached_tokens
    DeepSeek               prompt_tokens is prompt_cache_hit_tokens + prompt_cache_miss_tokens
    Moonshot               cached_tokens beside prompt_tokens, which includes them
    Groq                   the same usage in streams under x_groq
    llama.cpp              timings: cache_n beside prompt_n, which does not include them; usage with the sum of both,
                           where there is one
    Ollama                 prompt_tokens, and nothing about caching
    Anthropic              input_tokens leaves out cache_read_input_tokens and cache_creation_input_tokens
    Gemini                 promptTokenCount includes cachedContentTokenCount, but not toolUsePromptTokenCount;
                           candidatesTokenCount leaves out thoughtsTokenCount

Figures that are missing, null or no number are not there. Those that come later in a stream replace earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

Counts = dict[str, int]
"""By the API's own name, dotted where it is nested: the last number of each."""

MARKS: Final = (b'"usage', b'"timings"')
"""JSON without one of these has no token counts; `usageMetadata` begins alike."""

MAX_TOKENS: Final = 10**9
"""Limit of a believable count; the longest contexts have a hundredth of it."""


class Tokens(NamedTuple):
    """Of one answer. `prompt` includes `cached` and `cache_write`, which do not overlap, and `completion` `reasoning`.

    writes  of `cache_write`, those whose time to live is reported: seconds, tokens
    """

    prompt: int
    completion: int
    cached: int = 0
    cache_write: int = 0
    writes: tuple[tuple[float, int], ...] = ()
    reasoning: int = 0

    def with_created(self, ttl_s: float, tokens: int) -> Tokens:
        """What was put into the upstream's cache for this very answer was written by it, and then read."""
        if not (written := min(tokens, self.cached)):
            return self
        writes = (*self.writes, (ttl_s, written))
        return self._replace(cached=self.cached - written, cache_write=self.cache_write + written, writes=writes)

    @property
    def is_absurd(self) -> bool:
        """Whether these cannot be the tokens of one answer."""
        return max(self.prompt, self.completion) > MAX_TOKENS


def _openai(counts: Counts) -> Tokens | None:
    if (prompt := _first(counts, "prompt_tokens", "input_tokens")) is not None:
        cached = _first(counts, *_OPENAI_CACHED)
        if cached is None:
            cached = _cached_of_timings(counts, prompt)
        written = _first(counts, *_OPENAI_WRITTEN) or 0
        answer = _first(counts, "completion_tokens", "output_tokens") or 0
        reasoning = min(_first(counts, *_OPENAI_REASONING) or 0, answer)
        return _within(prompt, answer, cached, written)._replace(writes=_writes(counts, written), reasoning=reasoning)
    if "prompt_n" in counts:
        cached = counts.get("cache_n", 0)
        return Tokens(counts["prompt_n"] + cached, counts.get("predicted_n", 0), cached)
    return None


def _cached_of_timings(counts: Counts, prompt: int) -> int:
    """Where these are of the same prompt."""
    cached = counts.get("cache_n", 0)
    return cached if counts.get("prompt_n", -1) + cached == prompt else 0


def _anthropic(counts: Counts) -> Tokens | None:
    if "input_tokens" not in counts:
        return None
    read, written = counts.get("cache_read_input_tokens", 0), counts.get("cache_creation_input_tokens", 0)
    prompt = counts["input_tokens"] + read + written
    answer = counts.get("output_tokens", 0)
    reasoning = min(counts.get("output_tokens_details.thinking_tokens", 0), answer)
    return Tokens(prompt, answer, read, written, _writes(counts, written), reasoning)


def _gemini(counts: Counts) -> Tokens | None:
    if "promptTokenCount" not in counts:
        return None
    prompt = counts["promptTokenCount"] + counts.get("toolUsePromptTokenCount", 0)
    reasoning = counts.get("thoughtsTokenCount", 0)
    completion = counts.get("candidatesTokenCount", 0) + reasoning
    return _within(prompt, completion, counts.get("cachedContentTokenCount", 0), 0)._replace(reasoning=reasoning)


def _writes(counts: Counts, written: int) -> tuple[tuple[float, int], ...]:
    """By time to live, where these add up to no more than was written."""
    writes = tuple((ttl_s, counts[name]) for name, ttl_s in _WRITTEN_FOR.items() if counts.get(name))
    return writes if sum(tokens for _, tokens in writes) <= written else ()


def _within(prompt: int, completion: int, cached: int, written: int) -> Tokens:
    """No more of the prompt can be cached, or written, than there is."""
    cached = min(cached, prompt)
    return Tokens(prompt, completion, cached, min(written, prompt - cached))


_OPENAI_CACHED: Final = (
    "prompt_tokens_details.cached_tokens",
    "input_tokens_details.cached_tokens",
    "prompt_cache_hit_tokens",
    "cached_tokens",
)
_OPENAI_REASONING: Final = (
    "completion_tokens_details.reasoning_tokens",
    "output_tokens_details.reasoning_tokens",
)
_OPENAI_WRITTEN: Final = (
    "prompt_tokens_details.cache_write_tokens",
    "input_tokens_details.cache_write_tokens",
    "prompt_tokens_details.created_cache_tokens",
)
_WRITTEN_FOR: Final = {
    "cache_creation.ephemeral_5m_input_tokens": 300.0,
    "cache_creation.ephemeral_1h_input_tokens": 3600.0,
    "input_tokens_details.cache_write_tokens_details.ttl_30m_tokens": 1800.0,
    "input_tokens_details.cache_write_tokens_details.ttl_12h_tokens": 43200.0,
}


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if type(value) is dict else None
    return value


def _flatten(counts: Counts, usage: Mapping[str, Any], at: str = "", levels: int = 3) -> None:
    """As deep as counts are."""
    for name, value in usage.items():
        if type(value) is dict and levels > 1:
            _flatten(counts, value, f"{at}{name}.", levels - 1)
        elif _is_count(value):
            counts[at + name] = value


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _first(counts: Counts, *names: str) -> int | None:
    return next((counts[name] for name in names if name in counts), None)


@dataclass(frozen=True)
class Api:
    """
    how_to_ask     the SDK and the route, for a client that used another
    key_header     in which the key goes; `authorization` takes it behind `Bearer`
    models_path    a GET that lists the models
    usage_paths    where an answer or an event has its usage
    read_usage     the tokens out of it; None when they are not there
    headers        of the gateway's own requests
    base_path      that the base URL of its SDKs has, and a path does not repeat
    """

    how_to_ask: str
    key_header: str
    models_path: str
    usage_paths: tuple[tuple[str, ...], ...]
    read_usage: Callable[[Counts], Tokens | None]
    headers: Mapping[str, str] = field(default_factory=dict)
    base_path: str = ""

    def note(self, counts: Counts, value: Any) -> None:
        """Adds what a JSON value reports: a whole answer, an event of a stream, or an array of them."""
        for one in value if type(value) is list else (value,):
            for path in self.usage_paths:
                if type(one) is dict and path[0] in one and type(found := _at(one, path)) is dict:
                    _flatten(counts, found)


APIS: Final[Mapping[str, Api]] = {
    "openai": Api(
        how_to_ask="the OpenAI SDK (POST /v1/chat/completions)",
        key_header="authorization",
        models_path="/v1/models",
        usage_paths=(("timings",), ("x_groq", "usage"), ("response", "usage"), ("usage",)),
        read_usage=_openai,
        base_path="/v1",
    ),
    "anthropic": Api(
        how_to_ask="the Anthropic SDK (POST /v1/messages)",
        key_header="x-api-key",
        models_path="/v1/models?limit=1000",
        usage_paths=(("message", "usage"), ("usage",)),
        read_usage=_anthropic,
        headers={"anthropic-version": "2023-06-01"},
    ),
    "gemini": Api(
        how_to_ask="the Google Gen AI SDK (POST /v1beta/models/{model}:generateContent)",
        key_header="x-goog-api-key",
        models_path="/v1beta/models?pageSize=1000",
        usage_paths=(("usageMetadata",),),
        read_usage=_gemini,
    ),
}
"""By the setting `dialect` of an upstream."""
