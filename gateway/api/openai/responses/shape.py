"""A response as it is written: the events of a stream, or a whole answer, into the same object.

Events follow the order that the SDK's accumulator insists on. Knows nothing of how responses are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from gateway.api.dialect import printable
from gateway.api.openai.response import new_call_id
from gateway.api.openai.responses.items import item_id
from gateway.api.openai.responses.request import ResponsesRequest
from gateway.api.openai.responses.response import error_code, failed_response, logprobs_json, new_response, usage_json
from gateway.api.openai.responses.tools import Declared, Item, Tools
from gateway.api.replies import Answer, event, json_line, json_text
from gateway.api.stream import Shape
from gateway.config import LeaseSettings
from gateway.errors import KvasirError
from gateway.types import CallDelta, Finished, FinishReason, Started, TextDelta, Tier, Tool, Usage

Diagnose = Callable[[Mapping[str, Any], Usage], dict[str, Any]]
"""What `prompt_cache_diagnostics` says of a response."""


class ResponseShape(Shape):
    """One response. `response` is the object as it stands; `begun` says whether a client has been told its id."""

    def __init__(
        self,
        query: ResponsesRequest,
        token: str,
        *,
        leases: LeaseSettings,
        generated: Callable[[], int],
        tier: Tier = "default",
        diagnose: Diagnose | None = None,
    ) -> None:
        """`generated` is how many tokens it has so far, for one that does not come to its end. `tier` is the one
        served."""
        self.response = new_response(query, token, tier, leases)
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
        self._text: _Text | None = None  # the items that are open; at most one of them is
        self._call: _Call | None = None

    @property
    def output(self) -> list[Item]:
        output: list[Item] = self.response["output"]
        return output

    # -- a stream ---------------------------------------------------------------------------------------------------

    def prelude(self) -> bytes:
        self.begun = True
        return self._tell("response.created", self.response) + self._tell("response.in_progress", self.response)

    def opening(self, index: int, echo: str, started: Started) -> bytes:
        """Nothing more before the first text."""
        self._prompt = started.usage
        return b""

    def text(self, index: int, delta: TextDelta) -> bytes:
        """A piece of a message, which it opens if it is the first."""
        opened = b"" if self._text else self._close() + self._open_text()
        scored = logprobs_json(delta.scored)
        self._text_open.add(delta.text, scored)
        return opened + b"event: response.output_text.delta\ndata: %b%d,%b,%b%b}\n\n" % (
            b'{"type":"response.output_text.delta","sequence_number":',
            self._next_number(),
            self._text_open.place,
            b'"delta":%b,"logprobs":' % json_text(delta.text),
            json_line(scored) if scored else b"[]",
        )

    def call(self, index: int, delta: CallDelta) -> bytes:
        """A piece of a call, which it opens if it has a name."""
        opened = self._close() + self._open_call(delta.name) if delta.name else b""
        if self._call is None:
            raise KvasirError("A piece of a call came before its name.")
        if not delta.arguments:
            return opened
        self._call.arguments.append(delta.arguments)
        if self._call.tool.kind != "function":  # told at once when it is complete
            return opened
        return opened + self._event(
            "response.function_call_arguments.delta",
            item_id=self._call.item["id"],
            output_index=self._call.index,
            delta=delta.arguments,
        )

    def closing(self, index: int, finished: Finished) -> bytes:
        """An answer of nothing is an empty message, unless nothing is what was asked for."""
        self._reason = finished.reason
        opened = b"" if self.output or self._prewarm else self._open_text()
        return opened + self._close(cut=finished.reason == "length")

    def ending(self, usage: Usage) -> bytes:
        """`finish` was called before, or is now."""
        if self.response["status"] == "in_progress":
            self.finish(usage)
        return self._tell(f"response.{self.response['status']}", self.response)

    def failure(self, error: KvasirError) -> bytes:
        """What was said so far stays in the output, unfinished."""
        if self.response["status"] == "in_progress":
            self.fail(error)
        sent = self._unsent + self._event(
            "error", code=error_code(error), message=printable(error.message), param=error.param
        )
        return sent + self._tell("response.failed", self.response)

    # -- the object ---------------------------------------------------------------------------------------------------

    def take(self, answer: Answer) -> None:
        """The whole answer, when nothing is streamed; `finish` makes it the response."""
        for delta in _pieces(answer):
            if isinstance(delta, TextDelta):
                self.text(0, delta)
            else:
                self.call(0, delta)
        self.closing(0, Finished(answer.reason, answer.usage))

    def finish(self, usage: Usage) -> None:
        """The response is complete, or cut."""
        response = self.response
        if self._reason == "length" and not self._prewarm:
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["status"] = "completed"
            response["completed_at"] = int(time.time())
        response["usage"] = usage_json(usage, self._leases)
        if self._diagnose is not None:
            response["prompt_cache_diagnostics"] = self._diagnose(response, usage)

    def fail(self, error: KvasirError) -> None:
        """What is open is closed, with events that `failure` tells."""
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

    def _open_text(self) -> bytes:
        index = len(self.output)
        message = {"id": self._item_id("message"), "type": "message", "status": "in_progress", "role": "assistant"}
        message["content"] = []  # type: ignore[assignment]
        self._text = _Text(index, message)
        added = self._event("response.output_item.added", output_index=index, item=message)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.output.append(message)
        return added + self._event("response.content_part.added", **self._text.where, part=part)

    def _open_call(self, name: str) -> bytes:
        """Its item is told when its arguments are, unless they come in pieces."""
        index = len(self.output)
        tool = self._tools.get(name) or Declared(Tool(name), "function", name)
        item = tool.begun(new_call_id())
        item = {"id": self._item_id(item["type"]), **item}
        self._call = _Call(index, item, tool)
        self.output.append(item)
        return self._event("response.output_item.added", output_index=index, item=item) if tool.streamed else b""

    def _close_call(self, call: _Call, status: str) -> bytes:
        item, tool = call.item, call.tool
        where = {"item_id": item["id"], "output_index": call.index}
        tool.fill(item, "".join(call.arguments))
        sent = b""
        if not tool.streamed:
            sent = self._event("response.output_item.added", output_index=call.index, item=item)
        item["status"] = status
        if tool.kind == "function":
            kind = "response.function_call_arguments.done"
            sent += self._event(kind, **where, name=item["name"], arguments=item["arguments"])
        elif tool.kind == "custom":
            sent += self._event("response.custom_tool_call_input.delta", **where, delta=item["input"])
            sent += self._event("response.custom_tool_call_input.done", **where, input=item["input"])
        return sent + self._event("response.output_item.done", output_index=call.index, item=item)

    def _close(self, *, cut: bool = False) -> bytes:
        """Whatever is open. `cut`: it was not completed."""
        status = "incomplete" if cut else "completed"
        if self._text is not None:
            closed, self._text = self._text, None
            part = closed.finish(status)
            return (
                self._event("response.output_text.done", **closed.where, text=part["text"], logprobs=part["logprobs"])
                + self._event("response.content_part.done", **closed.where, part=part)
                + self._event("response.output_item.done", output_index=closed.index, item=closed.item)
            )
        if self._call is not None:
            call, self._call = self._call, None
            return self._close_call(call, status)
        return b""

    @property
    def _text_open(self) -> _Text:
        assert self._text is not None
        return self._text

    def _item_id(self, kind: str) -> str:
        return item_id(kind, self._token, f"o{len(self.output):04x}")

    # -- events -------------------------------------------------------------------------------------------------------

    def _tell(self, kind: str, response: dict[str, Any]) -> bytes:
        return self._event(kind, response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event(kind, {"type": kind, "sequence_number": self._next_number(), **fields})

    def _next_number(self) -> int:
        number, self._number = self._number, self._number + 1
        return number


class _Text:
    """A message that is being written; its one part gets its text at the end."""

    def __init__(self, index: int, item: Item) -> None:
        self.index = index
        self.item = item
        self.where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        self.place = orjson.dumps(self.where)[1:-1]
        self._pieces: list[str] = []
        self._scored: list[dict[str, Any]] = []

    def add(self, text: str, scored: list[dict[str, Any]]) -> None:
        self._pieces.append(text)
        self._scored += scored

    def finish(self, status: str) -> Item:
        """Its part, complete."""
        part = {"type": "output_text", "text": "".join(self._pieces), "annotations": [], "logprobs": self._scored}
        self.item["status"] = status
        self.item["content"] = [part]
        return part


class _Call:
    """A call that is being written."""

    def __init__(self, index: int, item: Item, tool: Declared) -> None:
        self.index = index
        self.item = item
        self.tool = tool
        self.arguments: list[str] = []


def _pieces(answer: Answer) -> list[TextDelta | CallDelta]:
    """What a stream would have brought, in a few pieces: calls are where they were in the text."""
    deltas: list[TextDelta | CallDelta] = []
    done = 0
    for number, call in enumerate(answer.calls):
        deltas += _texts_between(answer, done, call.offset)
        deltas.append(CallDelta(number, call.name, call.arguments))
        done = call.offset
    return [*deltas, *_texts_between(answer, done, None)]


def _texts_between(answer: Answer, start: int, end: int | None) -> list[TextDelta]:
    """The text between two places, if there is any."""
    scored = tuple(one for one in answer.scored or () if start <= one.offset and (end is None or one.offset < end))
    text = answer.text[start:end]
    return [TextDelta(text, scored)] if text or scored else []
