"""A response as it is written: the events of a stream, or a whole answer, into the same object.

Events follow the order that the SDK's accumulator requires. How responses are stored is keeping.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from gateway.api.dialect import printable
from gateway.api.openai.response import chat_logprobs, new_call_id
from gateway.api.openai.responses.items import item_id
from gateway.api.openai.responses.replay import (
    Event,
    call_done,
    item_added,
    item_done,
    part_added,
    part_done,
    summary_done,
)
from gateway.api.openai.responses.request import ResponsesRequest
from gateway.api.openai.responses.tools import Declared, Item, Tools
from gateway.api.replies import Answer, ToldThought, event
from gateway.api.stream import Shape
from gateway.config import LeaseSettings, duration_s
from gateway.errors import KvasirError
from gateway.types import (
    CallDelta,
    Finished,
    FinishReason,
    ScoredToken,
    Started,
    TextDelta,
    ThinkingDelta,
    Tier,
    Tool,
    Usage,
)

REPORTED_TTLS: Final = ("30m", "12h")
"""Lifetimes whose tokens are always reported; those of others only where there are any."""

_RATE_LIMITED: Final = 429

Diagnose = Callable[[Mapping[str, Any], Usage], dict[str, Any]]
"""Makes the `prompt_cache_diagnostics` of a response."""


class ResponseShape(Shape):
    """One response. `response` is the object as it stands; `begun`: a client has received its id."""

    def __init__(
        self,
        query: ResponsesRequest,
        token: str,
        *,
        leases: LeaseSettings,
        generated: Callable[[], int],
        tier: Tier,
        diagnose: Diagnose | None,
    ) -> None:
        """`generated` is how many tokens it has so far, for one that does not come to its end. `tier` is the one
        served."""
        self.response = new_response(query, token, tier, leases)
        self.output: list[Item] = self.response["output"]
        self.begun = False
        self._prewarm = query.values.get("prompt_cache_options", {}).get("prewarm", False)
        self._leases = leases
        self._generated = generated
        self._diagnose = diagnose
        self._token = token
        self._tools = {one.tool.name: one for one in query.values.get("tools", Tools()).declared}
        self._number = 0  # of the next event
        self._unsent = b""  # events of a response that failed
        self._reason: FinishReason = "stop"
        self._prompt: Usage | None = None  # of a stream that has begun
        self._open: _Open | None = None

    # -- a stream ---------------------------------------------------------------------------------------------------

    def prelude(self) -> bytes:
        self.begun = True
        return self._events(
            ("response.created", {"response": self.response}), ("response.in_progress", {"response": self.response})
        )

    def opening(self, index: int, echo: str, started: Started) -> bytes:
        """Nothing more before the first text."""
        self._prompt = started.usage
        return b""

    def text(self, index: int, delta: TextDelta) -> bytes:
        """A chunk of a message, which it opens if it is the first."""
        part = "refusal" if delta.refusal else "output_text"
        opened = b"" if self._open and self._open.part == part else self._close() + self._open_text(part)
        assert self._open is not None
        scored = logprobs_json(delta.scored)
        self._open.texts.append(delta.text)
        self._open.scored.extend(scored)
        if delta.refusal:
            refused = {**self._open.where, "content_index": 0, "delta": delta.text}
            return opened + self._events(("response.refusal.delta", refused))
        fields = {**self._open.where, "content_index": 0, "delta": delta.text, "logprobs": scored}
        return opened + self._events(("response.output_text.delta", fields))

    def call(self, index: int, delta: CallDelta) -> bytes:
        """A chunk of a call, which it opens if it has a name."""
        opened = self._close() + self._open_call(delta.name) if delta.name else b""
        if self._open is None or self._open.tool is None:
            raise KvasirError("A chunk of a call came before its name.")
        self._open.texts.append(delta.arguments)
        if not delta.arguments or self._open.tool.kind != "function":  # others are written when they are complete
            return opened
        fields = {**self._open.where, "delta": delta.arguments}
        return opened + self._events(("response.function_call_arguments.delta", fields))

    def thinking(self, index: int, delta: ThinkingDelta) -> bytes:
        """A chunk of a thought's summary, in an item that is opened if need be. A signature closes it; it is always
        there, as the API has it by now, because nothing comes back that is not."""
        written = b""
        if self._open is None or self._open.item["type"] != "reasoning":
            written = self._close()
            opened = self._begin({"type": "reasoning", "status": "in_progress", "summary": []}, None)
            written += self._events(item_added(opened.where, opened.item))
        assert self._open is not None
        where = {**self._open.where, "summary_index": 0}
        if delta.text:
            part = {"type": "summary_text", "text": ""}
            if not self._open.texts:
                written += self._events(("response.reasoning_summary_part.added", {**where, "part": part}))
            self._open.texts.append(delta.text)
            written += self._events(("response.reasoning_summary_text.delta", {**where, "delta": delta.text}))
        if delta.signature:
            self._open.item["encrypted_content"] = delta.signature
            written += self._close()
        return written

    def closing(self, index: int, finished: Finished) -> bytes:
        """An answer of nothing is an empty message, unless nothing is what was asked for."""
        self._reason = finished.reason
        opened = b"" if self.output or self._prewarm else self._open_text()
        return opened + self._close(cut=finished.reason == "length")

    def ending(self, usage: Usage) -> bytes:
        """`finish` was called before, or is now."""
        if self.response["status"] == "in_progress":
            self.finish(usage)
        return self._events((f"response.{self.response['status']}", {"response": self.response}))

    def failure(self, error: KvasirError) -> bytes:
        """What was generated so far stays in the output, unfinished."""
        if self.response["status"] == "in_progress":
            self.fail(error)
        fields = {"code": error_code(error), "message": printable(error.message), "param": error.param}
        return self._unsent + self._events(("error", fields), ("response.failed", {"response": self.response}))

    # -- the object ---------------------------------------------------------------------------------------------------

    def take(self, answer: Answer) -> None:
        """The whole answer, when nothing is streamed; `finish` makes it the response."""
        done = 0
        thoughts = list(answer.thoughts)
        self._take_thoughts(thoughts, -1)
        for number, call in enumerate(answer.calls):  # where they were in the text
            self._take_text(answer, done, call.offset)
            self._take_thoughts(thoughts, number)
            self.call(0, CallDelta(number, call.name, call.arguments))
            done = call.offset
        self._take_text(answer, done, None)
        self._take_thoughts(thoughts, len(answer.calls))
        if answer.refusal:
            self.text(0, TextDelta(answer.refusal, refusal=True))
        self.closing(0, Finished(answer.reason, answer.usage))

    def _take_text(self, answer: Answer, start: int, end: int | None) -> None:
        """The text between two places, if there is any."""
        scored = tuple(one for one in answer.scored or () if start <= one.offset and (end is None or one.offset < end))
        if (text := answer.text[start:end]) or scored:
            self.text(0, TextDelta(text, scored))

    def _take_thoughts(self, thoughts: list[ToldThought], number: int) -> None:
        """Those before this call."""
        while thoughts and thoughts[0].call <= number:
            thought = thoughts.pop(0)
            self.thinking(0, ThinkingDelta(thought.text, thought.signature))

    def finish(self, usage: Usage) -> None:
        """The response is complete, or cut."""
        response = self.response
        if self._reason == "length" and not self._prewarm:
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif self._reason == "refusal":
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "content_filter"}
        else:
            response["status"] = "completed"
            response["completed_at"] = int(time.time())
        response["usage"] = usage_json(usage, self._leases)
        if self._diagnose is not None:
            response["prompt_cache_diagnostics"] = self._diagnose(response, usage)

    def fail(self, error: KvasirError) -> None:
        """Closes the open item, with events that `failure` sends."""
        self._unsent = self._close(cut=True)
        self.response = failed_response(self.response, error)
        if self._prompt is not None:
            usage = replace(self._prompt, completion_tokens=self._generated())
            self.response["usage"] = usage_json(usage, self._leases)

    def cancel(self) -> None:
        """For a client that hears nothing more of it."""
        self._close(cut=True)
        self.response["status"] = "cancelled"

    # -- items --------------------------------------------------------------------------------------------------------

    def _open_text(self, part: str = "output_text") -> bytes:
        message = {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
        opened = self._begin(message, None, part)
        return self._events(item_added(opened.where, opened.item), part_added(opened.where, 0, _part(part, "", [])))

    def _open_call(self, name: str) -> bytes:
        """Its item is sent when its arguments are, unless they are streamed."""
        tool = self._tools.get(name) or Declared(Tool(name), "function", name)
        opened = self._begin(tool.begun(new_call_id()), tool)
        return self._events(item_added(opened.where, opened.item)) if tool.streamed else b""

    def _begin(self, item: Item, tool: Declared | None, part: str = "") -> _Open:
        index = len(self.output)
        item = {"id": item_id(item["type"], self._token, f"o{index:04x}"), **item}
        self._open = _Open({"item_id": item["id"], "output_index": index}, item, tool, [], [], part)
        self.output.append(item)
        return self._open

    def _close(self, *, cut: bool = False) -> bytes:
        """The item that is open, if one is. `cut`: it was not completed."""
        if self._open is None:
            return b""
        (where, item, tool, texts, scored, part), self._open = self._open, None
        status, written = "incomplete" if cut else "completed", "".join(texts)
        if item["type"] == "reasoning":
            item["status"] = status
            return self._events(*summary_done(where, item, written), item_done(where, item))
        if tool is None:
            item["status"] = status
            item["content"] = [_part(part, written, scored)]
            return self._events(*part_done(where, 0, item["content"][0]), item_done(where, item))
        tool.fill(item, written)
        added = b"" if tool.streamed else self._events(item_added(where, item))
        item["status"] = status
        return added + self._events(*call_done(where, item), item_done(where, item))

    # -- events -------------------------------------------------------------------------------------------------------

    def _events(self, *events: Event) -> bytes:
        written = []
        for kind, fields in events:
            written.append(event(kind, {"type": kind, "sequence_number": self._number, **fields}))
            self._number += 1
        return b"".join(written)


class _Open(NamedTuple):
    """The item that is being written.

    where   its id and its place in the output
    tool    of a call; None: it is a message, or a thought
    texts   chunks of the message's only part, of the thought's summary, or of the call's arguments
    scored  log probabilities of the message
    part    type of the message's only part
    """

    where: dict[str, Any]
    item: Item
    tool: Declared | None
    texts: list[str]
    scored: list[dict[str, Any]]
    part: str


def _part(kind: str, text: str, scored: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "refusal":
        return {"type": kind, "refusal": text}
    return {"type": kind, "text": text, "annotations": [], "logprobs": scored}


# -- the response object -----------------------------------------------------------------------------------------------


def new_response(query: ResponsesRequest, token: str, tier: Tier, leases: LeaseSettings) -> dict[str, Any]:
    """All its fields. Parameters are as they were requested, or have their defaults."""
    values, body = query.values, query.body
    return {
        "id": f"resp_{token}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": values.get("background", False),
        "error": None,
        "incomplete_details": None,
        "instructions": values.get("instructions"),
        "max_output_tokens": values.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": values.get("metadata", {}),
        "model": values["model"],
        "output": [],
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "previous_response_id": values.get("previous_response_id"),
        "prompt_cache_diagnostics": None,
        "prompt_cache_options": _options(query, leases),
        "prompt_cache_key": values.get("prompt_cache_key"),
        "prompt_cache_retention": body.get("prompt_cache_retention"),
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": tier,
        "store": False,
        "temperature": values.get("temperature", 1.0),
        "text": {"format": {"type": "text"}, "verbosity": "medium"}
        | {key: value for key, value in (body.get("text") or {}).items() if value is not None},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": list(values.get("tools", Tools()).published),
        "top_logprobs": values.get("top_logprobs", 0),
        "top_p": values.get("top_p", 1.0),
        "truncation": values.get("truncation", "disabled"),
        "usage": None,
        "user": user if type(user := body.get("user")) is str else None,
    }


def _options(query: ResponsesRequest, leases: LeaseSettings) -> dict[str, Any] | None:
    """Those that were applied. Without any, nothing is kept on purpose."""
    options = query.values.get("prompt_cache_options")
    if options is None:
        return None
    return {
        "mode": options.get("mode", "implicit"),
        "ttl": options.get("ttl", leases.default_ttl),
        "comparison_response_id": options.get("comparison_response_id"),
    }


def failed_response(response: dict[str, Any], error: KvasirError) -> dict[str, Any]:
    """The same, failed."""
    error_json = {"code": error_code(error), "message": printable(error.message)}
    return {**response, "status": "failed", "error": error_json}


def usage_json(usage: Usage, leases: LeaseSettings) -> dict[str, Any]:
    """input_tokens is the whole prompt, cached and written tokens included."""
    details: dict[str, Any] = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens}
    if usage.lease_writes:
        details["cache_write_tokens_details"] = _writes_json(usage, leases)
    if usage.lease:
        details["cache_lease"] = usage.lease
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _writes_json(usage: Usage, leases: LeaseSettings) -> dict[str, int]:
    by_ttl = {}
    for ttl in dict.fromkeys((*REPORTED_TTLS, *leases.ttls, leases.default_ttl)):
        tokens = sum(tokens for ttl_s, tokens in usage.lease_writes if ttl_s == duration_s(ttl))
        if tokens or ttl in REPORTED_TTLS:
            by_ttl[f"ttl_{ttl}_tokens"] = tokens
    return by_ttl


def logprobs_json(scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    """As chats have them, but for special tokens, which have no bytes: no list is an empty one here."""
    if not scored:
        return []
    content: list[dict[str, Any]] = chat_logprobs(scored)["content"]
    for entry in content:
        for one in (entry, *entry["top_logprobs"]):
            one["bytes"] = one["bytes"] or []
    return content


def error_code(error: KvasirError) -> str:
    """One of the few codes in the SDK's type."""
    if error.status == _RATE_LIMITED:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"
