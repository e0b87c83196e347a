"""Messages of the Anthropic API in their two forms: events into a message, and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from gateway.api.replies import event, read_events
from gateway.types import Ending, Replay

Json = dict[str, Any]

_TEXTS: Final[Mapping[str, Sequence[str]]] = {
    "text": ("text",),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": (),
    "tool_use": (),
    "server_tool_use": (),
}
"""Blocks that can be streamed -> their texts, each of which has a delta of its own."""

_ENDINGS: Final[Mapping[str, Ending]] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}


class MessageReplay(Replay):
    """`message` and its events."""

    def fold(self, stream: bytes, *, usage: bool = True) -> Json | None:
        """The message; None for a stream that did not end, or failed."""
        message: Json | None = None
        inputs: dict[int, str] = {}
        ended = False
        for written, _ in read_events(stream):
            read = orjson.loads(written)
            kind = read["type"]
            if kind == "error":
                return None
            ended = ended or kind == "message_stop"
            if kind == "message_start":
                message = {**read["message"], "content": []}
            elif message is not None and not _add(message, read, inputs):
                return None
        if message is None or not ended:
            return None
        for index, written_input in inputs.items():
            message["content"][index]["input"] = orjson.loads(written_input or "{}")
        return message

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """A delta for each text of each block."""
        used, content = whole.get("usage") or {}, whole.get("content", ())
        if any(block.get("type") not in _TEXTS for block in content):
            return None
        start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
        start["usage"] = {**used, "output_tokens": 0}
        end = {name: whole.get(name) for name in ("stop_reason", "stop_sequence")}
        return [
            _event("message_start", message=start),
            *(written for index, block in enumerate(content) for written in _block(index, block)),
            _event("message_delta", delta=end, usage=used),
            _event("message_stop"),
        ]

    def ending(self, whole: Mapping[str, Any]) -> Ending | None:
        """None for a message that is not complete, or was refused."""
        return _ENDINGS.get(whole.get("stop_reason") or "")

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """Of its blocks, which are all texts without citations."""
        blocks = whole["content"]
        plain = all(block["type"] == "text" and not block.get("citations") for block in blocks)
        return "".join(block["text"] for block in blocks) if plain else None


def _add(message: Json, read: Json, inputs: dict[int, str]) -> bool:
    """Adds an event; False for an unknown event. `inputs` of tools are read at the end."""
    match read["type"]:
        case "content_block_start":
            if read["index"] != len(message["content"]):
                return False
            message["content"].append(dict(read["content_block"]))
            if "input" in read["content_block"]:
                inputs[read["index"]] = ""
        case "content_block_delta":
            block, delta, index = message["content"][read["index"]], read["delta"], read["index"]
            name = delta["type"].removesuffix("_delta")
            if name in ("text", "thinking", "signature"):
                block[name] = block.get(name, "") + delta[name]
            elif name == "input_json":
                inputs[index] = inputs.get(index, "") + delta["partial_json"]
            elif name == "citations":
                block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
            else:
                return False
        case "message_delta":
            message.update(read["delta"])
            used = read.get("usage") or {}
            message["usage"] = {**message["usage"], **{name: n for name, n in used.items() if n is not None}}
    return True


def _block(index: int, block: Mapping[str, Any]) -> Sequence[bytes]:
    empty, kind = dict(block), block["type"]
    deltas: list[Json] = []
    if kind == "text":
        deltas = [{"type": "citations_delta", "citation": one} for one in empty.pop("citations", None) or ()]
    for name in _TEXTS[kind]:
        empty[name] = ""
        deltas.append({"type": f"{name}_delta", name: block.get(name, "")})
    if kind.endswith("tool_use"):
        empty["input"] = {}
        deltas.append({"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()})
    return [
        _event("content_block_start", index=index, content_block=empty),
        *(_event("content_block_delta", index=index, delta=delta) for delta in deltas),
        _event("content_block_stop", index=index),
    ]


def _event(kind: str, **fields: Any) -> bytes:
    return event(kind, {"type": kind, **fields})
