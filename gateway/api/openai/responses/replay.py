"""Responses of the OpenAI API in their two forms: events into a response, and back. Pure.

A stream ends with the whole response, so that only the way back has to be made up: the events of a stream that says
everything at once, in the order that the SDK's accumulator insists on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import orjson

from gateway.api.sse import event, read_events

Json = dict[str, Any]

_ENDS: Final = frozenset(("response.completed", "response.incomplete"))
_ENDINGS: Final[Mapping[str, Literal["length"]]] = {"max_output_tokens": "length"}


class ResponseReplay:
    """`response` and its events."""

    usage_on_request: Final = False

    def fold(self, stream: bytes, *, usage: bool = True) -> Json | None:
        """The response that the last event has; None for a stream that did not end, or failed. All tell their usage."""
        whole: Json | None = None
        for written, _ in read_events(stream):
            told = orjson.loads(written)
            if told["type"] in _ENDS:
                whole = told["response"]
        return whole

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """A delta for each text, and for the arguments of each call."""
        begun = {**whole, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
        told: list[tuple[str, Json]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for index, item in enumerate(whole["output"]):
            events = _item(index, item)
            if events is None:
                return None
            told += events
        told.append((f"response.{whole['status']}", {"response": whole}))
        return [
            event(kind, {"type": kind, "sequence_number": number, **fields})
            for number, (kind, fields) in enumerate(told)
        ]

    def restream(self, stream: bytes, *, usage: bool) -> Sequence[bytes] | None:
        """Its own events: every stream tells its usage."""
        return [written for _, written in read_events(stream)]

    def ending(self, whole: Mapping[str, Any]) -> Literal["stop", "tool_calls", "length"] | None:
        """None for a response that failed, was filtered, or is still being made."""
        if whole["status"] == "incomplete":
            return _ENDINGS.get((whole.get("incomplete_details") or {}).get("reason", ""))
        if whole["status"] != "completed":
            return None
        return "stop" if all(item["type"] in ("message", "reasoning") for item in whole["output"]) else "tool_calls"

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """Of its messages, which are all texts without annotations; what a model thought is not part of it."""
        parts = [part for item in whole["output"] if item["type"] == "message" for part in item["content"]]
        plain = all(part["type"] == "output_text" and not part.get("annotations") for part in parts)
        return "".join(part["text"] for part in parts) if plain else None


def _item(index: int, item: Mapping[str, Any]) -> list[tuple[str, Json]] | None:
    """The events of an item; None for one that nobody knows how to stream."""
    match item["type"]:
        case "message":
            empty, inside = {**item, "content": []}, [*_parts(index, item)]
        case "function_call":
            empty, inside = {**item, "arguments": ""}, _arguments(index, item)
        case "reasoning" if not (item.get("summary") or item.get("content")):
            return [*_opened(index, {**item, "status": "in_progress"}), *_done(index, item)]
        case _:
            return None
    return [*_opened(index, {**empty, "status": "in_progress"}), *inside, *_done(index, item)]


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


def _opened(index: int, item: Json) -> list[tuple[str, Json]]:
    return [("response.output_item.added", {"output_index": index, "item": item})]


def _done(index: int, item: Mapping[str, Any]) -> list[tuple[str, Json]]:
    return [("response.output_item.done", {"output_index": index, "item": item})]
