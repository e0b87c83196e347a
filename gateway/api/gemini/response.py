"""Answers as the Gemini API writes them: GenerateContentResponses, one or a stream of them, and models.

A stream is server-sent events without names and without an end, or, as this API does without `alt=sse`, one JSON array
that is written element by element. A function call is written when it is complete: the arguments are an object.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from engine.protocol import Hello
from gateway.api.gemini.wire import error_json
from gateway.api.replies import Answer, Stamp, ToldThought, ToolCall, data, json_line
from gateway.api.stream import Shape
from gateway.errors import KvasirError
from gateway.types import CallDelta, Finished, FinishReason, ScoredToken, TextDelta, ThinkingDelta, Usage

METHODS = ("generateContent", "countTokens", "createCachedContent")


def usage_json(usage: Usage) -> dict[str, Any]:
    """promptTokenCount is the whole prompt, what was cached included."""
    thoughts = usage.reasoning_tokens
    fields: dict[str, Any] = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - thoughts,
    }
    fields |= {"thoughtsTokenCount": thoughts} if thoughts else {}
    fields["totalTokenCount"] = usage.total_tokens
    fields["promptTokensDetails"] = _text_tokens(usage.prompt_tokens)
    if usage.cached_tokens:
        fields["cachedContentTokenCount"] = usage.cached_tokens
        fields["cacheTokensDetails"] = _text_tokens(usage.cached_tokens)
    return fields


def _text_tokens(count: int) -> list[dict[str, Any]]:
    return [{"modality": "TEXT", "tokenCount": count}]


class GeminiShape(Shape):
    """A GenerateContentResponse of `n` candidates, whole or in chunks. `array`: a stream is a JSON array."""

    def __init__(self, model: Hello, n: int, *, array: bool = False) -> None:
        self._n = n
        self._base = {"modelVersion": model.model, "responseId": _new_id()}
        self._array = array
        self._begun = False
        self._calls = [_Calls() for _ in range(n)]
        self._closed = 0
        self._signatures: dict[int, str] = {}  # by candidate, of a thought that nothing came after yet
        self._last: dict[str, Any] = {}  # the last candidate's end, which goes out with the usage

    def stamp(self) -> Stamp:
        """What is new in each answer."""
        return Stamp(self._base["responseId"].encode(), lambda: _new_id().encode())

    def ping(self) -> bytes:
        """An empty line: the Python SDK takes a comment for the beginning of an error."""
        return b"\n"

    def prelude(self) -> bytes:
        """The beginning of an array."""
        return b"[" if self._array else b""

    def text(self, index: int, delta: TextDelta) -> bytes:
        """A chunk of text, with the log probabilities of its tokens where they are requested."""
        signed = _signed(self._signatures.pop(index, "")) if self._signatures else {}
        return self._chunk(_candidate(index, [{"text": delta.text, **signed}], delta.scored or None))

    def thinking(self, index: int, delta: ThinkingDelta) -> bytes:
        """Its text. A signature waits for what comes after it, which has it in this API."""
        parts = [part] if (part := self._calls[index].take()) else []
        if delta.text:
            parts.append({"text": delta.text, "thought": True})
        if delta.signature:
            parts += _alone(self._signatures.pop(index, ""))
            self._signatures[index] = delta.signature
        return self._chunk(_candidate(index, parts)) if parts else b""

    def call(self, index: int, delta: CallDelta) -> bytes:
        """The call before, when another begins: only then is it known to be complete."""
        part = self._calls[index].feed(delta, self._signatures.pop(index, "") if delta.name else "")
        return self._chunk(_candidate(index, [part])) if part else b""

    def closing(self, index: int, finished: Finished) -> bytes:
        """The reason, and the last call. Of the last candidate it waits for the usage."""
        calls = self._calls[index]
        parts = [part] if (part := calls.end()) else []
        if not parts or index in self._signatures:
            parts.append({"text": "", **_signed(self._signatures.pop(index, ""))})
        candidate = _candidate(index, parts) | _reason(finished.reason, broken=calls.broken)
        self._closed += 1
        if self._closed < self._n:
            return self._chunk(candidate)
        self._last = candidate
        return b""

    def ending(self, usage: Usage) -> bytes:
        """The end of the last candidate, with the usage of all."""
        return self._chunk(self._last, usage) + (b"]" if self._array else b"")

    def failure(self, error: KvasirError) -> bytes:
        """An error in place of the next chunk."""
        if not self._array:
            return data(error_json(error))
        return self._element(error_json(error)) + b"]"

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        candidates = [_whole(index, answer) for index, answer in enumerate(answers)]
        return orjson.dumps({"candidates": candidates, "usageMetadata": usage_json(usage), **self._base})

    def _chunk(self, candidate: dict[str, Any], usage: Usage | None = None) -> bytes:
        fields: dict[str, Any] = {"candidates": [candidate]}
        if usage is not None:
            fields["usageMetadata"] = usage_json(usage)
        return self._element({**fields, **self._base}) if self._array else data({**fields, **self._base})

    def _element(self, value: Any) -> bytes:
        before, self._begun = b",\n" if self._begun else b"", True
        return before + json_line(value)


def _new_id() -> str:
    return secrets.token_urlsafe(16)


class _Calls:
    """The calls of one candidate, one after another."""

    def __init__(self) -> None:
        self._number, self._name, self._chunks, self._signature = -1, "", [""], ""
        self.broken = False  # one of them could not be read

    def feed(self, delta: CallDelta, signature: str) -> dict[str, Any] | None:
        """The part that this chunk completes. `signature` of a call that begins."""
        if delta.call == self._number:
            self._chunks.append(delta.arguments)
            return None
        part = self.end()
        self._number, self._name, self._chunks = delta.call, delta.name, [delta.arguments]
        self._signature = signature
        return part

    def take(self) -> dict[str, Any] | None:
        """The part of the last call, which no chunk follows."""
        part, self._number = self.end(), -1
        return part

    def end(self) -> dict[str, Any] | None:
        """The part of the last call."""
        if self._number < 0:
            return None
        part = _call_part(ToolCall(self._name, "".join(self._chunks)))
        self.broken |= part is None
        return None if part is None else part | _signed(self._signature)


def _call_part(call: ToolCall) -> dict[str, Any] | None:
    """None when its arguments are no object: it was cut, or the model made a mistake."""
    try:
        args = orjson.loads(call.arguments or "{}")
    except orjson.JSONDecodeError:
        return None
    return {"functionCall": {"name": call.name, "args": args}} if type(args) is dict else None


def _signed(signature: str) -> dict[str, Any]:
    return {"thoughtSignature": signature} if signature else {}


def _alone(signature: str) -> list[dict[str, Any]]:
    """A part for a signature that nothing comes after but another."""
    return [{"text": "", "thought": True, "thoughtSignature": signature}] if signature else []


def _reason(reason: FinishReason, *, broken: bool) -> dict[str, Any]:
    """Why a candidate ended. `broken`: a call could not be read, and was left out."""
    if reason == "length":
        return {"finishReason": "MAX_TOKENS"}
    if reason == "refusal":
        return {"finishReason": "SAFETY"}
    if broken:
        message = "The arguments of a function call are no JSON object."
        return {"finishReason": "MALFORMED_FUNCTION_CALL", "finishMessage": message}
    return {"finishReason": "STOP"}


def _whole(index: int, answer: Answer) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    signature, broken = "", False
    for part in answer.in_order():
        if isinstance(part, ToldThought):
            parts += [{"text": part.text, "thought": True}] if part.text else []
            if part.signature:
                parts += _alone(signature)
                signature = part.signature
            continue
        written = {"text": part} if isinstance(part, str) else _call_part(part)
        broken |= written is None
        if written is not None:
            parts.append(written | _signed(signature))
            signature = ""
    if signature or all(part.get("thought") for part in parts):
        parts.append({"text": "", **_signed(signature)})
    return _candidate(index, parts, answer.scored) | _reason(answer.reason, broken=broken)


def _candidate(
    index: int, parts: Sequence[dict[str, Any]], scored: Sequence[ScoredToken] | None = None
) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": index}
    if scored is not None:
        total = sum(one.logprob for one in scored)
        fields["avgLogprobs"] = total / len(scored) if scored else 0.0
        fields["logprobsResult"] = _logprobs(scored, total)
    return fields


def _logprobs(scored: Sequence[ScoredToken], total: float) -> dict[str, Any]:
    """Without token ids, which only the tokeniser knows."""
    return {
        "topCandidates": [
            {"candidates": [{"token": token.text, "logProbability": logprob} for token, logprob in one.top]}
            for one in scored
        ],
        "chosenCandidates": [{"token": one.token.text, "logProbability": one.logprob} for one in scored],
        "logProbabilitySum": total,
    }


def model_json(name: str, model: Hello | None) -> dict[str, Any]:
    """A model. Its limits are known while one of its engines is connected."""
    fields: dict[str, Any] = {
        "name": f"models/{name}",
        "baseModelId": name,
        "version": "001",
        "displayName": name,
        "supportedGenerationMethods": METHODS,
        "temperature": 1.0,
        "maxTemperature": 2.0,
        "topP": 1.0,
    }
    if model is not None:
        fields |= {"inputTokenLimit": model.context_tokens, "outputTokenLimit": model.context_tokens}
    return fields
