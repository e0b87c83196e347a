"""Events into bytes of the Anthropic API: messages, their streams, and models.

A stream is `message_start`, for each block `content_block_start`, its deltas and `content_block_stop`, then
`message_delta` and `message_stop`; or `error` in place of what is left. Blocks are numbered as they come.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final, Literal

import orjson

from gateway.api.anthropic.caching import Cached
from gateway.api.anthropic.wire import error_json, time_text
from gateway.api.replies import Answer, Stamp, ToldThought, ToolCall, event, json_text, new_id
from gateway.api.stream import Shape
from gateway.api.tools import read_arguments
from gateway.errors import KvasirError
from gateway.types import CallDelta, Finished, FinishReason, Started, TextDelta, ThinkingDelta, Tier, Usage

ServiceTier = Literal["standard", "priority", "batch"]
SERVED_TIERS: Final[Mapping[Tier, ServiceTier]] = {"priority": "priority", "default": "standard", "flex": "standard"}

_REASONS: Final[dict[FinishReason, str]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "refusal": "refusal",
}
_CUMULATIVE: Final = (
    *("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
    *("output_tokens", "output_tokens_details"),
)
_DELTA: Final = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
_NO_END: Final = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
_PING: Final = event("ping", {"type": "ping"})
_MESSAGE_STOP: Final = event("message_stop", {"type": "message_stop"})


class MessageShape(Shape):
    """One message. `max_tokens` are those of the request. `cached`, `lease`, which is `kept` or
    `degraded`, and `more`, fields of the message, are filled in before the first byte is written."""

    def __init__(self, model: str, request_id: str, max_tokens: int, *, service_tier: ServiceTier = "standard") -> None:
        self.message_id: Final = f"msg_{secrets.token_hex(16)}"
        self.cached = Cached()
        self.is_predicted = False  # `cached` is what the index says; the end of the answer will say it
        self.lease: str | None = None
        self.more: dict[str, Any] = {}
        self._model = model
        self._request_id = request_id
        self._max_tokens = max_tokens
        self._service_tier: ServiceTier = service_tier
        self._block = -1  # number of the last block
        self._open: str | None = None  # kind of the block that is open
        self._head = b""  # of a delta of text in the block that is open

    def stamp(self) -> Stamp:
        """What is new in each answer; ids of tool calls are not in it."""
        return Stamp(self.message_id.encode(), lambda: f"msg_{new_id()}".encode())

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        (answer,) = answers
        content = [_block(part) for part in answer.in_order()]
        end = _end(answer.reason, answer.stop, usage, self._max_tokens)
        return orjson.dumps({**self._message(content), **end, "usage": self._usage(usage)})

    def ping(self) -> bytes:
        return _PING

    def opening(self, index: int, echo: str, started: Started) -> bytes:
        """The message without its content, and the usage of its prompt."""
        message = {**self._message([]), **_NO_END, "usage": self._usage(started.usage)}
        return event("message_start", {"type": "message_start", "message": message})

    def text(self, index: int, delta: TextDelta) -> bytes:
        """A chunk of text, in a block that is opened if need be."""
        opened = b"" if self._open == "text" else self._begin("text", {"type": "text", "text": ""})
        return b'%b%b{"type":"text_delta","text":%b}}\n\n' % (opened, self._head, json_text(delta.text))

    def call(self, index: int, delta: CallDelta) -> bytes:
        """A chunk of a tool call. Each call is a block of its own."""
        data = b""
        if delta.name:
            data = self._begin("tool_use", {**_tool_use(delta.name), "input": {}}) + self._partial("")
        return data + self._partial(delta.arguments) if delta.arguments else data

    def thinking(self, index: int, delta: ThinkingDelta) -> bytes:
        """A chunk of a thought, in a block that is opened if need be. A signature closes it; alone it is a block."""
        data = b""
        if delta.text:
            if self._open != "thinking":
                data = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            data += b'%b{"type":"thinking_delta","thinking":%b}}\n\n' % (self._head, json_text(delta.text))
        if not delta.signature:
            return data
        if self._open != "thinking":
            data += self._begin("redacted_thinking", {"type": "redacted_thinking", "data": delta.signature})
        else:
            written = json_text(delta.signature)
            data += b'%b{"type":"signature_delta","signature":%b}}\n\n' % (self._head, written)
        return data + self._stop()

    def closing(self, index: int, finished: Finished) -> bytes:
        """The end of the last block, and why there is no other."""
        end = _end(finished.reason, finished.stop, finished.usage, self._max_tokens)
        usage = self._usage(finished.usage)
        reported = {
            "type": "message_delta",
            "delta": end,
            "usage": {key: usage[key] for key in _CUMULATIVE if key in usage},
        }
        return self._stop() + event("message_delta", reported)

    def ending(self, usage: Usage) -> bytes:
        return _MESSAGE_STOP

    def failure(self, error: KvasirError) -> bytes:
        return event("error", error_json(error, self._request_id))

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """`input_tokens` were neither read from the cache nor written to it. `cache_lease` is ours, and there only when
        the request has breakpoints."""
        cached = self.cached
        return {
            "input_tokens": usage.prompt_tokens - cached.read - cached.written,
            "cache_creation_input_tokens": cached.written,
            "cache_read_input_tokens": cached.read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": cached.written_5m,
                "ephemeral_1h_input_tokens": cached.written_1h,
            },
            "output_tokens": usage.completion_tokens,
            **(
                {"output_tokens_details": {"thinking_tokens": thoughts}} if (thoughts := usage.reasoning_tokens) else {}
            ),
            "service_tier": self._service_tier,
            **({} if self.lease is None else {"cache_lease": self.lease}),
        }

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self.more,
        }

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        stop = self._stop()
        self._block += 1
        self._open = kind
        self._head = _DELTA % self._block
        start = {"type": "content_block_start", "index": self._block, "content_block": block}
        return stop + event("content_block_start", start)

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return event("content_block_stop", {"type": "content_block_stop", "index": self._block})

    def _partial(self, written: str) -> bytes:
        return b'%b{"type":"input_json_delta","partial_json":%b}}\n\n' % (self._head, json_text(written))


def _tool_use(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name}


def _block(part: ToldThought | str | ToolCall) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, ToolCall):
        return {**_tool_use(part.name), "input": read_arguments(part.arguments)}
    if part.text:
        return {"type": "thinking", "thinking": part.text, "signature": part.signature}
    return {"type": "redacted_thinking", "data": part.signature}


def _end(reason: FinishReason, stop: str | None, usage: Usage, max_tokens: int) -> dict[str, Any]:
    """Fewer tokens than max_tokens at the length limit: the context was full."""
    reported = "stop_sequence" if stop is not None else _REASONS[reason]
    if reason == "length" and usage.completion_tokens < max_tokens:
        reported = "model_context_window_exceeded"
    details = {"type": "refusal", "category": None, "explanation": None} if reason == "refusal" else None
    return {"stop_reason": reported, "stop_sequence": stop, "stop_details": details}


def model_json(model: str, created: int, context_tokens: int | None) -> dict[str, Any]:
    """`context_tokens` None while none of its engines can be reached."""
    return {
        "type": "model",
        "id": model,
        "display_name": model,
        "created_at": time_text(created),
        "lifecycle": "active",
        "max_input_tokens": context_tokens,
        "max_tokens": context_tokens,
    }
