"""Responses of the OpenAI API in their two forms: events into a response, and back. Pure.

A stream ends with the whole response, so that only the way back has to be made up: the events of a stream that says
everything at once, in the order that the SDK's accumulator insists on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from gateway.api.replies import event, read_events
from gateway.types import Ending, Replay

Json = dict[str, Any]

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
        """None for a response that failed, was filtered, or is still being made."""
        if whole["status"] == "incomplete":
            reason = (whole.get("incomplete_details") or {}).get("reason")
            return "length" if reason == "max_output_tokens" else None
        if whole["status"] != "completed":
            return None
        return "stop" if all(item["type"] in ("message", "reasoning") for item in whole["output"]) else "tool_calls"

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """Of its messages, which are all texts without annotations; what a model thought is not part of it."""
        parts = [part for item in whole["output"] if item["type"] == "message" for part in item["content"]]
        plain = all(part["type"] == "output_text" and not part.get("annotations") for part in parts)
        return "".join(part["text"] for part in parts) if plain else None


def _item(index: int, item: Mapping[str, Any]) -> list[tuple[str, Json]] | None:
    """The events of an item; None for one that cannot be streamed."""
    match item["type"]:
        case "message":
            empty, inside = {**item, "content": []}, [*_parts(index, item)]
        case "function_call":
            empty, inside = {**item, "arguments": ""}, _arguments(index, item)
        case "reasoning" if not (item.get("summary") or item.get("content")):
            empty, inside = {**item}, []
        case _:
            return None
    return [
        ("response.output_item.added", {"output_index": index, "item": {**empty, "status": "in_progress"}}),
        *inside,
        ("response.output_item.done", {"output_index": index, "item": item}),
    ]


def _parts(index: int, item: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
    """Raises KeyError for a part that is neither a text nor a refusal."""
    for number, part in enumerate(item["content"]):
        where = {"item_id": item["id"], "output_index": index, "content_index": number}
        name = {"output_text": "text", "refusal": "refusal"}[part["type"]]
        kind = f"response.{part['type']}"
        scored = {"logprobs": part.get("logprobs") or []} if name == "text" else {}
        empty = {**part, name: "", **dict.fromkeys(scored, ())}
        yield "response.content_part.added", {**where, "part": empty}
        yield f"{kind}.delta", {**where, "delta": part[name], **scored}
        yield f"{kind}.done", {**where, name: part[name], **scored}
        yield "response.content_part.done", {**where, "part": part}


def _arguments(index: int, item: Mapping[str, Any]) -> list[tuple[str, Json]]:
    where = {"item_id": item["id"], "output_index": index}
    kind = "response.function_call_arguments"
    return [
        (f"{kind}.delta", {**where, "delta": item["arguments"]}),
        (f"{kind}.done", {**where, "name": item["name"], "arguments": item["arguments"]}),
    ]
