"""Chats, completions and embeddings of the OpenAI API in their two forms: chunks into a whole answer, and back. Pure.

For answers of any server that speaks this API: names that are not known here are kept where they can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from gateway.api.replies import data, read_events
from gateway.types import Ending, Replay

DONE: Final = b"[DONE]"
Json = dict[str, Any]

_ONCE: Final = frozenset(("role", "id", "type"))
"""Texts of a message, or of an object in it, that are not cut into chunks."""

_TEXTS: Final = frozenset(("role", "content", "reasoning", "reasoning_content"))
"""Of a message that is one text."""


class ChatReplay(Replay):
    """`chat.completion` and its chunks."""

    usage_on_request = True
    kinds = ("chat.completion", "chat.completion.chunk")

    def fold(self, stream: bytes, *, usage: bool = True) -> Json | None:
        """None for a stream that did not end, failed, or lacks a `usage` that has to be there."""
        base, choices, used, done = Json(), dict[int, Json](), None, False
        for event, _ in read_events(stream):
            done = event == DONE
            if done:
                continue
            chunk = _object(event)
            if chunk is None or chunk.get("error") is not None:
                return None
            used = chunk.get("usage") or used
            base = {**chunk, **{name: value for name, value in base.items() if value}}  # some begin with empty names
            for choice in chunk.get("choices") or ():
                if not self._add(choices, choice):
                    return None
        if not done or (usage and used is None):
            return None
        for choice in choices.values():
            self._finish(choice)
        base.pop("obfuscation", None)
        whole = {**base, "object": self.kinds[0], "usage": used}
        return {**whole, "choices": [choices[index] for index in sorted(choices)]}

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """One or two chunks for each choice, and one for the usage."""
        base = {name: value for name, value in whole.items() if name not in ("choices", "usage")}
        base["object"] = self.kinds[1]
        chunks = [
            {**base, "choices": [part]} for choice in whole.get("choices", ()) for part in self._chunks_of(choice)
        ]
        if usage:
            if whole.get("usage") is None:
                return None
            chunks = [*({**chunk, "usage": None} for chunk in chunks), {**base, "choices": [], "usage": whole["usage"]}]
        return [*map(data, chunks), b"data: " + DONE + b"\n\n"]

    def restream(self, stream: bytes, *, usage: bool) -> Sequence[bytes] | None:
        """Its own chunks, with the one of the usage or without it; None where it is wanted and not there."""
        written_again, has_usage = [], False
        for event, written in read_events(stream):
            chunk = _object(event) or {}
            is_usage = chunk.get("choices") == [] and chunk.get("usage") is not None
            has_usage |= is_usage
            if usage or not is_usage:
                written_again.append(written)
        return written_again if has_usage or not usage else None

    def ending(self, whole: Mapping[str, Any]) -> Ending | None:
        """The one of all choices that is least complete; None as well for an error, and where one is a refusal."""
        if any((choice.get("message") or {}).get("refusal") for choice in whole.get("choices", ())):
            return None
        reasons = {choice.get("finish_reason") for choice in whole.get("choices", ())}
        known = reasons and reasons <= {"stop", "tool_calls", "function_call", "length"}
        if whole.get("error") is not None or not known:
            return None
        return "length" if "length" in reasons else "stop" if reasons == {"stop"} else "tool_calls"

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """Of its only choice; what a model thought before it is not part of it."""
        (choice,) = whole["choices"]
        message = choice["message"]
        more = any(value for name, value in message.items() if name not in _TEXTS)
        return message["content"] if isinstance(message["content"], str) and not more else None

    def _add(self, choices: dict[int, Json], chunk: Json) -> bool:
        """False where it is not known what this adds."""
        index, message = chunk.get("index", 0), {"role": "assistant", "content": None}
        new = {"index": index, "message": message, "logprobs": None, "finish_reason": None}
        choice = choices.setdefault(index, new)
        _add(choice["message"], chunk.get("delta") or {})
        choice["finish_reason"] = chunk.get("finish_reason") or choice["finish_reason"]
        if (scored := chunk.get("logprobs")) is not None:
            before = choice["logprobs"] = choice["logprobs"] or {}
            for name, value in scored.items():
                before[name] = [*(before.get(name) or ()), *value] if value is not None else before.get(name)
        return True

    def _finish(self, choice: Json) -> None:
        message = choice["message"]
        if isinstance(calls := message.get("tool_calls"), dict):
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
            message["content"] = message["content"] or None
        message.setdefault("refusal", None)

    def _chunks_of(self, choice: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """One with the message, one with its end."""
        message, index = dict(choice.get("message") or {}), choice.get("index", 0)
        message["tool_calls"] = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls") or ())]
        delta = {name: value for name, value in message.items() if value is not None and value != []}
        return (
            {"index": index, "delta": delta, "logprobs": choice.get("logprobs"), "finish_reason": None},
            {"index": index, "delta": {}, "logprobs": None, "finish_reason": choice.get("finish_reason")},
        )


class CompletionReplay(ChatReplay):
    """`text_completion` and its chunks, which have one form. Its texts are no chat."""

    kinds = ("text_completion", "text_completion")

    def text(self, whole: Mapping[str, Any]) -> str | None:
        return None

    def _add(self, choices: dict[int, Json], chunk: Json) -> bool:
        if chunk.get("logprobs") is not None:
            return False
        index = chunk.get("index", 0)
        choice = choices.setdefault(index, {"index": index, "text": "", "logprobs": None, "finish_reason": None})
        choice["text"] += chunk.get("text") or ""
        choice["finish_reason"] = chunk.get("finish_reason") or choice["finish_reason"]
        return True

    def _finish(self, choice: Json) -> None:
        pass

    def _chunks_of(self, choice: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        return (choice,)


class EmbeddingReplay(Replay):
    """A list of vectors, which is never streamed."""

    def ending(self, whole: Mapping[str, Any]) -> Ending | None:
        """None for what has no vectors."""
        return "stop" if whole["data"] and all(one["embedding"] for one in whole["data"]) else None


def _add(message: Json, delta: Mapping[str, Any]) -> None:
    """Texts, lists and what is inside of objects are continued, calls are told apart by their numbers, and of
    everything else the last counts."""
    for name, value in delta.items():
        if not value and name in ("tool_calls", "function_call"):
            continue
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", {})
            for call in value:
                _add_call(calls.setdefault(call.get("index", 0), {}), call)
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


def _add_call(call: Json, delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        if isinstance(value, dict):
            _add_call(call.setdefault(name, {}), value)
        elif name in ("arguments", "input"):  # the latter of a custom tool
            call[name] = call.get(name, "") + (value or "")
        elif name != "index" and value is not None:
            call[name] = value


def _object(event: bytes) -> Json | None:
    try:
        value = orjson.loads(event)
    except orjson.JSONDecodeError:
        return None
    return value if type(value) is dict else None
