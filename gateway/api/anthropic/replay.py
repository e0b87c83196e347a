"""Messages of the Anthropic API in their two forms: events into a message, and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import orjson

from gateway.api.sse import event, read_events

Json = dict[str, Any]

_TEXTS: Final = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
_ENDINGS: Final[Mapping[str, Literal["stop", "tool_calls", "length"]]] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}


class MessageReplay:
    """`message` and its events."""

    usage_on_request: Final = False

    def fold(self, stream: bytes, *, usage: bool = True) -> Json | None:
        """The message; None for a stream that did not end, or failed. All tell their usage."""
        message: Json | None = None
        partial: dict[int, str] = {}
        ended = False
        for written, _ in read_events(stream):
            told = orjson.loads(written)
            kind = told["type"]
            if kind == "error":
                return None
            ended = ended or kind == "message_stop"
            if kind == "message_start":
                message = {**told["message"], "content": []}
            elif message is not None and not self._add(message, told, partial):
                return None
        if message is None or not ended:
            return None
        for index, written_input in partial.items():
            message["content"][index]["input"] = orjson.loads(written_input or "{}")
        return message

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """A delta for each block."""
        usage_told = whole.get("usage") or {}
        start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
        start["usage"] = {**usage_told, "output_tokens": 0}
        events = [event("message_start", {"type": "message_start", "message": start})]
        for index, block in enumerate(whole.get("content", ())):
            if (told := _block(index, block)) is None:
                return None
            events += told
        end = {name: whole.get(name) for name in ("stop_reason", "stop_sequence")}
        events.append(event("message_delta", {"type": "message_delta", "delta": end, "usage": usage_told}))
        return [*events, event("message_stop", {"type": "message_stop"})]

    def restream(self, stream: bytes, *, usage: bool) -> Sequence[bytes] | None:
        """Its own events: every stream tells its usage."""
        return [written for _, written in read_events(stream)]

    def ending(self, whole: Mapping[str, Any]) -> Literal["stop", "tool_calls", "length"] | None:
        """None for a message that is not complete, or was refused."""
        return _ENDINGS.get(whole.get("stop_reason") or "")

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """Of its blocks, which are all texts without citations."""
        blocks = whole["content"]
        plain = all(block["type"] == "text" and not block.get("citations") for block in blocks)
        return "".join(block["text"] for block in blocks) if plain else None

    def _add(self, message: Json, told: Json, partial: dict[int, str]) -> bool:
        """Whether it is known what the event adds."""
        match told["type"]:
            case "content_block_start":
                if told["index"] != len(message["content"]):
                    return False
                message["content"].append(dict(told["content_block"]))
                if "input" in told["content_block"]:
                    partial[told["index"]] = ""
            case "content_block_delta":
                return _add_delta(message["content"][told["index"]], told["delta"], partial, told["index"])
            case "message_delta":
                message.update(told["delta"])
                usage = told.get("usage") or {}
                message["usage"] = {**message["usage"], **{name: n for name, n in usage.items() if n is not None}}
        return True


def _add_delta(block: Json, delta: Json, partial: dict[int, str], index: int) -> bool:
    kind = delta["type"]
    if (name := _TEXTS.get(kind)) is not None:
        block[name] = block.get(name, "") + delta[name]
    elif kind == "input_json_delta":
        partial[index] = partial.get(index, "") + delta["partial_json"]
    elif kind == "citations_delta":
        block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
    else:
        return False
    return True


def _block(index: int, block: Mapping[str, Any]) -> list[bytes] | None:
    """None for a kind that nobody knows how to stream."""
    deltas: list[Json] = []
    empty = dict(block)
    match block.get("type"):
        case "text":
            empty["text"] = ""
            deltas = [{"type": "citations_delta", "citation": one} for one in empty.pop("citations", None) or ()]
            deltas.append({"type": "text_delta", "text": block["text"]})
        case "thinking":
            empty |= {"thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            deltas.append({"type": "signature_delta", "signature": block.get("signature", "")})
        case "tool_use" | "server_tool_use":
            empty["input"] = {}
            deltas = [{"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}]
        case "redacted_thinking":
            pass
        case _:
            return None
    started = {"type": "content_block_start", "index": index, "content_block": empty}
    told = [
        event("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta})
        for delta in deltas
    ]
    return [
        event("content_block_start", started),
        *told,
        event("content_block_stop", {"type": "content_block_stop", "index": index}),
    ]
