"""Our own engines as a backend of the response cache: which requests it is for, their keys, and their answers. Pure but
for `generate`.

A key is a digest of everything that can change the answer, and nothing else. Its form is that of a Request, so that one
question has one key in every dialect, streamed or not: a JSON array of tagged values, in which no value can pass for
another. Where the model reads the order of names (tools, schemas, arguments of earlier calls) the order counts; a
message is the same however its own names are ordered. Of large requests the same values are added one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import orjson

from engine.protocol import Grammar, Hello, Sampling
from gateway.config import ResponseCacheSettings
from gateway.digests import feed
from gateway.responses.base import VERSION, Mode, Query, Recorded, Refused, Situation, Stored, find_refusal, owner_of
from gateway.responses.recording import decode, encode, text_of
from gateway.tasks import LARGE
from gateway.types import (
    ChatPrompt,
    Event,
    Finished,
    Media,
    Prompt,
    Request,
    Scope,
    Started,
    TextPrompt,
    Tool,
    ToolUse,
    Trace,
    Usage,
)

Generate = Callable[[Request], AsyncGenerator[Event, None]]
"""Steps 2 to 6 of the pipeline."""


def find_bypass(request: Request, settings: ResponseCacheSettings, mode: Mode) -> str | None:
    """Why the cache has no part in it, as one word for headers and metrics; None where it has. `mode` is its tenant's.

    off        the operator does not want it for this tenant, or the client for this request
    not-asked  the tenant's requests have to ask for it
    no-store   neither read nor stored, as the client wants
    prewarm    nothing is generated
    uncached   the client wants nothing to be reused, not even blocks
    tools      the answer may call tools, which the client then runs
    sampling   the next answer to it would be another
    """
    reuse = request.reuse
    if (reason := find_refusal(reuse, mode)) is not None:
        return reason
    if request.prewarm:
        return "prewarm"
    if not request.use_cache:
        return "uncached"
    if request.tool_use is not None and not (settings.tool_calls or reuse.asked):
        return "tools"
    # With temperature 0 or a seed an engine would give the same answer again.
    deterministic = request.sampling.temperature == 0 or request.sampling.seed is not None
    if not (settings.requests == "all" or reuse.asked or deterministic):
        return "sampling"
    return None


@dataclass(slots=True, eq=False)
class EngineQuery(Query[Event]):
    """See Query. `hello` is the model's."""

    request: Request
    hello: Hello
    steps: Generate
    settings: ResponseCacheSettings

    @classmethod
    def of(cls, request: Request, hello: Hello, steps: Generate, settings: ResponseCacheSettings) -> EngineQuery:
        owner = owner_of(request.scope or Scope(tenant=request.tenant.name))
        return cls(request, request_key(request, hello), owner, hello, steps, settings)

    def _wants(self) -> tuple[Hashable, ...]:
        return self.request.tier, self.request.priority

    def generate(self, trace: Trace) -> AsyncGenerator[Event, None]:
        return self.steps(replace(self.request, trace=trace))

    def _off_path(self) -> dict[str, Any]:
        return {"group": None}

    def read(self, body: bytes, *, shared: bool) -> Stored[Event] | None:
        """All at once: in the chunks that it came in, for requests that stream."""
        return decode(body, joined=not (shared or self.request.stream))

    def record(self, items: Sequence[Event], trace: Trace) -> Recorded | Refused:
        last, body = items[-1], encode(items, self.age_ms)
        if isinstance(last, Finished) and last.reason == "refusal":
            return "other"
        if isinstance(last, Finished) and last.reason == "length" and not self.settings.truncated:
            return "truncated"
        return "other" if body is None else Recorded(self.model, body, text_of(items))

    def text(self, items: Sequence[Event]) -> str | None:
        return text_of(items)

    def reused(self, item: Event) -> Event:
        if type(item) is not Started and type(item) is not Finished:
            return item
        usage, prompt = item.usage, item.usage.prompt_tokens
        reasoning = usage.reasoning_tokens
        again = Usage(prompt, usage.completion_tokens, cached_tokens=prompt, reasoning_tokens=reasoning)
        return replace(item, usage=again)

    def find_unfit(self, max_temperature: float) -> str | None:
        request = self.request
        prompt = request.prompt
        if request.tool_use is not None or (isinstance(prompt, ChatPrompt) and prompt.tools):
            return "tools"
        if request.constraint is not None or request.sampling.logprobs is not None or request.group is not None:
            return "form"
        if isinstance(prompt, ChatPrompt) and prompt.media:
            return "form"
        return "sampling" if request.sampling.temperature > max_temperature else None

    def find_situation(self) -> Situation | None:
        return find_situation(self.request, self.hello)


def request_key(request: Request, model: Hello) -> bytes:
    """32 bytes."""
    return _digest("answer", request, model, request.prompt)


def find_situation(request: Request, model: Hello) -> Situation | None:
    """None for what is no chat that ends with a text of its user."""
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt) or prompt.continues or not prompt.messages or prompt.media:
        return None
    last = prompt.messages[-1]
    text = last.get("content")
    if last.get("role") != "user" or type(text) is not str:
        return None
    without = replace(prompt, messages=[*prompt.messages[:-1], {**last, "content": None}])
    return Situation(_digest("situation", request, model, without), text)


def _digest(kind: str, request: Request, model: Hello, prompt: Prompt) -> bytes:
    reuse, constraint, use = request.reuse, request.constraint, request.tool_use
    parts: tuple[tuple[object, ...], ...] = (
        ("kvasir", kind, VERSION),
        ("scope", request.salt, reuse.partition),
        ("model", request.model, _model(model)),
        ("prompt", *_prompt(prompt)),
        ("sampling", _sampling(request.sampling)),
        ("stop", request.stop),
        ("constraint", None if constraint is None else _grammar(constraint.grammar)),
        ("tool_use", None if use is None else _tool_use(use)),
        ("answer", request.number, request.prewarm),
    )
    if request.thinking is not None:  # an upstream is to answer it
        parts = (*parts, ("thinking", request.thinking))
    if request.work <= LARGE:
        return hashlib.sha256(orjson.dumps(parts)).digest()
    hashed = hashlib.sha256()
    feed(hashed, parts)
    return hashed.digest()


@lru_cache(maxsize=64)
def _model(model: Hello) -> tuple[object, ...]:
    """What it answers with. The tokeniser has the chat template in it."""
    root = model.namespace.root().hex()
    return (model.model, root, model.tokenizer, model.context_tokens, model.vocab_size, model.eos_ids)


@lru_cache(maxsize=256)
def _sampling(sampling: Sampling) -> str:
    """Most requests have one of a few."""
    return orjson.dumps(sampling).decode()


def _prompt(prompt: Prompt) -> tuple[object, ...]:
    if isinstance(prompt, ChatPrompt):
        messages = [sorted(message.items()) for message in prompt.messages]
        tools = [_tool(tool) for tool in prompt.tools]
        more = [values for values in (prompt.thoughts, [_medium(one) for one in prompt.media]) if values]
        return ("chat", messages, tools, prompt.add_generation_prompt, prompt.continues, *more)
    return ("text", prompt.text) if isinstance(prompt, TextPrompt) else ("tokens", prompt.tokens.hex())


def _medium(media: Media) -> tuple[object, ...]:
    """Of its bytes a digest; where they are in the request, and not how the client wrote them."""
    data = hashlib.sha256(media.data.encode()).hexdigest()
    place = (media.message, media.chars)
    return (media.kind, media.mime_type, data, media.url, media.name, media.detail, *place)


def _tool(tool: Tool) -> tuple[object, ...]:
    return (tool.name, tool.description, tool.parameters, tool.strict)


def _tool_use(use: ToolUse) -> tuple[Any, ...]:
    return ([_tool(tool) for tool in use.callable], use.mode, use.parallel)


def _grammar(grammar: Grammar) -> tuple[str, str]:
    return (grammar.kind, grammar.text)
