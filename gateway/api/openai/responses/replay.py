"""Responses of the OpenAI API in their two forms: events into a response, and back. Pure.

A stream ends with the whole response, so only the way back needs work: the events of a stream with one delta for each
text, in the order that the SDK's accumulator requires.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from gateway.api.replies import event, read_events
from gateway.types import Ending, Replay

Json = dict[str, Any]
Event = tuple[str, Json]
"""Type, and the fields besides it and the number."""

_PART_TEXTS: Final = {"output_text": "text", "refusal": "refusal"}
"""Type of a part -> the field that has its text."""

_ENDS: Final = frozenset(("response.completed", "response.incomplete"))


class ResponseReplay(Replay):
    """`response` and its events."""

    def fold(self, stream: bytes, *, usage: bool = True) -> Json | None:
        """The response that the last event has; None for a stream that did not end, or failed."""
        whole: Json | None = None
        for written, _ in read_events(stream):
            read = orjson.loads(written)
            if read["type"] in _ENDS:
                whole = read["response"]
        return whole

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """A delta for each text, and for the arguments of each call."""
        begun = {**whole, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
        items = [_item(index, item) for index, item in enumerate(whole["output"])]
        events = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
            *(one for item in items for one in item or ()),
            (f"response.{whole['status']}", {"response": whole}),
        ]
        if None in items:
            return None
        return [
            event(kind, {"type": kind, "sequence_number": number, **fields})
            for number, (kind, fields) in enumerate(events)
        ]

    def ending(self, whole: Mapping[str, Any]) -> Ending | None:
        """None for a response that failed, was filtered or refused, or is still being made."""
        if whole["status"] == "incomplete":
            reason = (whole.get("incomplete_details") or {}).get("reason")
            return "length" if reason == "max_output_tokens" else None
        if whole["status"] != "completed":
            return None
        if any(part.get("type") == "refusal" for item in whole["output"] for part in item.get("content") or ()):
            return None
        return "stop" if all(item["type"] in ("message", "reasoning") for item in whole["output"]) else "tool_calls"

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """Of its messages, which are all texts without annotations; what a model thought is not part of it."""
        parts = [part for item in whole["output"] if item["type"] == "message" for part in item["content"]]
        plain = all(part["type"] == "output_text" and not part.get("annotations") for part in parts)
        return "".join(part["text"] for part in parts) if plain else None


def _item(index: int, item: Json) -> list[Event] | None:
    """The events of an item; None for one that cannot be streamed."""
    where = {"item_id": item.get("id"), "output_index": index}
    kind = item["type"]
    if kind == "message":
        empty: Json = {"content": []}
        inside = [one for number, part in enumerate(item["content"]) for one in _part(where, number, part)]
    elif kind == "function_call":
        delta = {**where, "delta": item["arguments"]}
        empty, inside = {"arguments": ""}, [("response.function_call_arguments.delta", delta), *call_done(where, item)]
    elif kind == "reasoning" and not (item.get("summary") or item.get("content")):
        empty, inside = {}, []
    else:
        return None
    return [item_added(where, {**item, **empty, "status": "in_progress"}), *inside, item_done(where, item)]


def _part(where: Json, number: int, part: Json) -> list[Event]:
    """The events of a part. Raises KeyError for one that is neither a text nor a refusal."""
    name, scored = _PART_TEXTS[part["type"]], _logprobs(part)
    empty = {**part, name: "", **dict.fromkeys(scored, ())}
    delta = {**where, "content_index": number, "delta": part[name], **scored}
    return [
        part_added(where, number, empty),
        (f"response.{part['type']}.delta", delta),
        *part_done(where, number, part),
    ]


def _logprobs(part: Json) -> Json:
    return {"logprobs": part.get("logprobs") or []} if part["type"] == "output_text" else {}


# -- events of an item; `where` is its id and its place in the output -------------------------------------------------


def item_added(where: Json, item: Json) -> Event:
    return "response.output_item.added", {"output_index": where["output_index"], "item": item}


def item_done(where: Json, item: Json) -> Event:
    return "response.output_item.done", {"output_index": where["output_index"], "item": item}


def part_added(where: Json, number: int, part: Json) -> Event:
    return "response.content_part.added", {**where, "content_index": number, "part": part}


def part_done(where: Json, number: int, part: Json) -> list[Event]:
    name, place = _PART_TEXTS[part["type"]], {**where, "content_index": number}
    return [
        (f"response.{part['type']}.done", {**place, name: part[name], **_logprobs(part)}),
        ("response.content_part.done", {**place, "part": part}),
    ]


def summary_done(where: Json, item: Json, text: str) -> list[Event]:
    """Makes the text, if there is some, the summary of a thought."""
    if not text:
        return []
    part, place = {"type": "summary_text", "text": text}, {**where, "summary_index": 0}
    item["summary"] = [part]
    return [
        ("response.reasoning_summary_text.done", {**place, "text": text}),
        ("response.reasoning_summary_part.done", {**place, "part": part}),
    ]


def call_done(where: Json, item: Json) -> list[Event]:
    """Nothing for a call of a built-in tool: its item has everything."""
    match item["type"]:
        case "function_call":
            fields = {**where, "name": item["name"], "arguments": item["arguments"]}
            return [("response.function_call_arguments.done", fields)]
        case "custom_tool_call":
            kind, written = "response.custom_tool_call_input", item["input"]
            return [(f"{kind}.delta", {**where, "delta": written}), (f"{kind}.done", {**where, "input": written})]
    return []
