"""One streamed chat request with the openai SDK: what the benchmarks of reuse time, count and price."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai


@dataclass(frozen=True)
class Prices:
    """Per token, in units of the same currency; only ratios are printed."""

    input: float
    cached_read: float
    cache_write: float
    output: float


@dataclass(frozen=True)
class Asked:
    """One answer: its time to the first token, and its usage in tokens."""

    first_ms: float
    prompt: int
    cached: int
    written: int
    completion: int

    def cost(self, prices: Prices) -> float:
        computed = self.prompt - self.cached - self.written
        read, written = self.cached * prices.cached_read, self.written * prices.cache_write
        return computed * prices.input + read + written + self.completion * prices.output

    def cost_uncached(self, prices: Prices) -> float:
        return self.prompt * prices.input + self.completion * prices.output


def ask(client: openai.OpenAI, model: str, messages: Sequence[dict[str, Any]], max_tokens: int) -> Asked:
    """Asks at temperature 0 and reads the stream to its end."""
    start_s, first_ms, usage = time.perf_counter(), None, None
    with client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            if first_ms is None:
                first_ms = (time.perf_counter() - start_s) * 1e3
            usage = chunk.usage or usage
    assert first_ms is not None
    assert usage is not None
    details = usage.prompt_tokens_details.model_dump() if usage.prompt_tokens_details else {}
    cached, written = details.get("cached_tokens") or 0, details.get("cache_write_tokens") or 0
    return Asked(first_ms, usage.prompt_tokens, cached, written, usage.completion_tokens)
