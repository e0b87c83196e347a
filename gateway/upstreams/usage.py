"""What upstreams write about tokens, as one kind of figure. Pure.

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
from typing import Any, Final, NamedTuple

Said = dict[str, int]
"""Names of an API's own, dotted where they are nested, and the last number of each."""

MARKS: Final = (b'"usage', b'"timings"')
"""JSON without one of these says nothing about tokens; `usageMetadata` begins alike."""

MAX_TOKENS: Final = 10**9
"""Of a prompt, or of all its answers. The longest contexts have a hundredth of it."""


class Tokens(NamedTuple):
    """Of one answer. `prompt` includes `cached` and `cache_write`, which do not overlap.

    writes  of `cache_write`, those whose time to live is told: seconds, tokens
    """

    prompt: int
    completion: int
    cached: int = 0
    cache_write: int = 0
    writes: tuple[tuple[float, int], ...] = ()

    @property
    def is_absurd(self) -> bool:
        """Whether these cannot be the tokens of one answer."""
        return max(self.prompt, self.completion) > MAX_TOKENS


def note(said: Said, value: Any, dialect: str) -> None:
    """Adds what a JSON value says: a whole answer, an event of a stream, or an array of them."""
    for one in value if isinstance(value, list) else (value,):
        for path in _PLACES[dialect]:
            if isinstance(found := _at(one, path), Mapping):
                _flatten(said, found)


def tokens(said: Said, dialect: str) -> Tokens | None:
    """None when the upstream has not said it."""
    return _READ[dialect](said)


def _openai(said: Said) -> Tokens | None:
    if (prompt := _first(said, "prompt_tokens", "input_tokens")) is not None:
        cached = _first(said, *_OPENAI_CACHED)
        if cached is None:
            cached = _cached_of_timings(said, prompt)
        written = _first(said, *_OPENAI_WRITTEN) or 0
        answer = _first(said, "completion_tokens", "output_tokens") or 0
        return _within(prompt, answer, cached, written)._replace(writes=_writes(said, written))
    if "prompt_n" in said:
        cached = said.get("cache_n", 0)
        return Tokens(said["prompt_n"] + cached, said.get("predicted_n", 0), cached)
    return None


def _cached_of_timings(said: Said, prompt: int) -> int:
    """Where these are of the same prompt."""
    cached = said.get("cache_n", 0)
    return cached if said.get("prompt_n", -1) + cached == prompt else 0


def _anthropic(said: Said) -> Tokens | None:
    if "input_tokens" not in said:
        return None
    read, written = said.get("cache_read_input_tokens", 0), said.get("cache_creation_input_tokens", 0)
    prompt = said["input_tokens"] + read + written
    return Tokens(prompt, said.get("output_tokens", 0), read, written, _writes(said, written))


def _gemini(said: Said) -> Tokens | None:
    if "promptTokenCount" not in said:
        return None
    prompt = said["promptTokenCount"] + said.get("toolUsePromptTokenCount", 0)
    completion = said.get("candidatesTokenCount", 0) + said.get("thoughtsTokenCount", 0)
    return _within(prompt, completion, said.get("cachedContentTokenCount", 0), 0)


def _writes(said: Said, written: int) -> tuple[tuple[float, int], ...]:
    """By time to live, where these add up to no more than was written."""
    told = tuple((ttl_s, said[name]) for name, ttl_s in _WRITTEN_FOR.items() if said.get(name))
    return told if sum(tokens for _, tokens in told) <= written else ()


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
_PLACES: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "openai": (("timings",), ("x_groq", "usage"), ("response", "usage"), ("usage",)),
    "anthropic": (("message", "usage"), ("usage",)),
    "gemini": (("usageMetadata",),),
}
_READ: Final[Mapping[str, Callable[[Said], Tokens | None]]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "gemini": _gemini,
}


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _flatten(said: Said, usage: Mapping[str, Any], at: str = "", levels: int = 3) -> None:
    """As deep as counts are."""
    for name, value in usage.items():
        if isinstance(value, Mapping) and levels > 1:
            _flatten(said, value, f"{at}{name}.", levels - 1)
        elif _is_count(value):
            said[at + name] = value


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _first(said: Said, *names: str) -> int | None:
    return next((said[name] for name in names if name in said), None)
