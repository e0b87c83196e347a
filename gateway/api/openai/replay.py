"""Chats and completions of the OpenAI API in their two forms: chunks into a whole answer, and back. Pure.

For answers of any server that speaks this API: names that are not known here are kept where they can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import orjson

from gateway.api.sse import data, read_events

DONE = b"[DONE]"
Json = dict[str, Any]

_ONCE: Final = frozenset(("role", "id", "type"))
"""Texts of a message, or of an object in it, that do not come in pieces."""

_SPOKEN: Final = frozenset(("role", "content", "reasoning", "reasoning_content"))
"""Of a message that is one text."""


class ChatReplay:
    """`chat.completion` and its chunks."""

    usage_on_request: Final = True

    def fold(self, stream: bytes, *, usage: bool = True) -> Json | None:
        """The whole answer; None for a stream that did not end, failed, or tells no `usage` that has to be there."""
        whole, choices = _base(stream, "chat.completion", usage=usage), dict[int, Json]()
        if whole is None:
            return None
        for chunk in _choices(stream):
            choice = choices.setdefault(chunk.get("index", 0), _choice(chunk))
            _add(choice["message"], chunk.get("delta") or {})
            choice["finish_reason"] = chunk.get("finish_reason") or choice["finish_reason"]
            _add_logprobs(choice, chunk.get("logprobs"))
        for choice in choices.values():
            _finish(choice["message"])
        return {**whole, "choices": [choices[index] for index in sorted(choices)]}

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """A chunk for each message, one for its end, and one for the usage."""
        base = _chunk_base(whole, "chat.completion.chunk")
        chunks: list[Json] = []
        for choice in whole.get("choices", ()):
            message, index = dict(choice.get("message") or {}), choice.get("index", 0)
            message["tool_calls"] = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls") or ())]
            delta = {name: value for name, value in message.items() if value is not None and value != []}
            said = {"index": index, "delta": delta, "logprobs": choice.get("logprobs"), "finish_reason": None}
            chunks.append({**base, "choices": [said]})
            end = {"index": index, "delta": {}, "logprobs": None, "finish_reason": choice.get("finish_reason")}
            chunks.append({**base, "choices": [end]})
        return _stream(chunks, base, whole, usage=usage)

    def restream(self, stream: bytes, *, usage: bool) -> Sequence[bytes] | None:
        """Its own chunks. A usage that was not told cannot be."""
        return restream(stream, usage=usage)

    def ending(self, whole: Mapping[str, Any]) -> Literal["stop", "tool_calls", "length"] | None:
        """The one that says least, of all choices."""
        return ending(whole)

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """Of its only choice; what a model thought before it is not part of it."""
        (choice,) = whole["choices"]
        message = choice["message"]
        more = any(value for name, value in message.items() if name not in _SPOKEN)
        return message["content"] if isinstance(message["content"], str) and not more else None


class CompletionReplay:
    """`text_completion` and its chunks, which have one form."""

    usage_on_request: Final = True

    def fold(self, stream: bytes, *, usage: bool = True) -> Json | None:
        """See ChatReplay."""
        whole, choices = _base(stream, "text_completion", usage=usage), dict[int, Json]()
        if whole is None:
            return None
        for chunk in _choices(stream):
            if chunk.get("logprobs") is not None:
                return None
            index = chunk.get("index", 0)
            choice = choices.setdefault(index, {"index": index, "text": "", "logprobs": None, "finish_reason": None})
            choice["text"] += chunk.get("text") or ""
            choice["finish_reason"] = chunk.get("finish_reason") or choice["finish_reason"]
        return {**whole, "choices": [choices[index] for index in sorted(choices)]}

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """A chunk for each text."""
        base = _chunk_base(whole, "text_completion")
        return _stream([{**base, "choices": [choice]} for choice in whole.get("choices", ())], base, whole, usage=usage)

    def restream(self, stream: bytes, *, usage: bool) -> Sequence[bytes] | None:
        """See ChatReplay."""
        return restream(stream, usage=usage)

    def ending(self, whole: Mapping[str, Any]) -> Literal["stop", "tool_calls", "length"] | None:
        """See ChatReplay."""
        return ending(whole)

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """It is no chat."""
        return None


class EmbeddingReplay:
    """A list of vectors, which is never streamed."""

    usage_on_request: Final = False

    def fold(self, stream: bytes, *, usage: bool = True) -> Json | None:
        """There is none."""
        return None

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """There is none."""
        return None

    def restream(self, stream: bytes, *, usage: bool) -> Sequence[bytes] | None:
        """There is none."""
        return None

    def ending(self, whole: Mapping[str, Any]) -> Literal["stop", "tool_calls", "length"] | None:
        """None for what has no vectors."""
        return "stop" if whole["data"] and all(one["embedding"] for one in whole["data"]) else None

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """It is no chat."""
        return None


def restream(stream: bytes, *, usage: bool) -> Sequence[bytes] | None:
    """With the chunk of the usage, or without it; None where it is wanted and not there."""
    pieces, told = [], False
    for event, written in read_events(stream):
        chunk = _object(event)
        is_usage = chunk is not None and chunk.get("choices") == [] and chunk.get("usage") is not None
        told |= is_usage
        if usage or not is_usage:
            pieces.append(written)
    return pieces if told or not usage else None


def ending(whole: Mapping[str, Any]) -> Literal["stop", "tool_calls", "length"] | None:
    """How all choices ended; None when one of them did in another way, or not at all, and for what says an error."""
    reasons = {choice.get("finish_reason") for choice in whole.get("choices", ())}
    if (
        whole.get("error") is not None
        or not reasons
        or not reasons <= {"stop", "tool_calls", "function_call", "length"}
    ):
        return None
    return "length" if "length" in reasons else "stop" if reasons == {"stop"} else "tool_calls"


def _base(stream: bytes, kind: str, *, usage: bool) -> Json | None:
    """What is told of the whole answer."""
    base: Json = {}
    used, done = None, False
    for event, _ in read_events(stream):
        done = event == DONE
        if not done:
            chunk = _object(event)
            if chunk is None or chunk.get("error") is not None:
                return None
            used = chunk.get("usage") or used
            base = {**chunk, **{name: value for name, value in base.items() if value}}  # some begin with empty names
    if not done or (usage and used is None):
        return None
    return {**{name: value for name, value in base.items() if name != "obfuscation"}, "object": kind, "usage": used}


def _choices(stream: bytes) -> Iterator[Json]:
    for event, _ in read_events(stream):
        if event != DONE:
            yield from (_object(event) or {}).get("choices") or ()


def _choice(chunk: Json) -> Json:
    message: Json = {"role": "assistant", "content": None}
    return {"index": chunk.get("index", 0), "message": message, "logprobs": None, "finish_reason": None}


def _add(message: Json, delta: Mapping[str, Any]) -> None:
    """Texts, lists and what is inside of objects go on, calls are told apart by their numbers, and of everything else
    the last counts."""
    for name, value in delta.items():
        if not value and name in ("tool_calls", "function_call"):
            continue
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", {})
            for piece in value:
                _add_call(calls.setdefault(piece.get("index", 0), {}), piece)
        elif name == "function_call":
            _add_call(message.setdefault("function_call", {}), value)
        elif isinstance(value, str) and name not in _ONCE:
            message[name] = (message.get(name) or "") + value
        elif isinstance(value, list):
            message[name] = [*(message.get(name) or ()), *value]
        elif isinstance(value, dict):
            _add(message.setdefault(name, {}), value)
        elif value is not None:
            message[name] = value


def _add_call(call: Json, piece: Mapping[str, Any]) -> None:
    for name, value in piece.items():
        if isinstance(value, dict):
            _add_call(call.setdefault(name, {}), value)
        elif name in ("arguments", "input"):  # the latter of a custom tool
            call[name] = call.get(name, "") + (value or "")
        elif name != "index" and value is not None:
            call[name] = value


def _finish(message: Json) -> None:
    if isinstance(calls := message.get("tool_calls"), dict):
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
        message["content"] = message["content"] or None
    message.setdefault("refusal", None)


def _add_logprobs(choice: Json, told: Mapping[str, Any] | None) -> None:
    if told is None:
        return
    kept = choice["logprobs"] = choice["logprobs"] or {}
    for name, value in told.items():
        kept[name] = [*(kept.get(name) or ()), *value] if value is not None else kept.get(name)


def _chunk_base(whole: Mapping[str, Any], kind: str) -> Json:
    return {**{name: value for name, value in whole.items() if name not in ("choices", "usage")}, "object": kind}


def _stream(chunks: list[Json], base: Json, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
    if usage:
        if whole.get("usage") is None:
            return None
        chunks = [*({**chunk, "usage": None} for chunk in chunks), {**base, "choices": [], "usage": whole["usage"]}]
    return [*(data(chunk) for chunk in chunks), b"data: " + DONE + b"\n\n"]


def _object(event: bytes) -> Json | None:
    try:
        value = orjson.loads(event)
    except orjson.JSONDecodeError:
        return None
    return value if type(value) is dict else None
