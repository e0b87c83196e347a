"""The night's requests in every dialect, and what came back: whole, refused, or ended with an error. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from tests.chaos.night.conversations import Turn

DIALECTS: Final = ("chat", "completions", "responses", "messages", "gemini")
HOSTED: Final = {"chat": "up-1", "messages": "up-2", "gemini": "up-3"}
"""The model of the upstream that speaks a dialect."""

REFUSALS: Final = frozenset({429, 502, 503, 504, 507, 529})
"""What docs/http-api.md names for a request with nothing wrong in it; 500 is a bug of ours, but for this:"""
LOST: Final = re.compile(rb"engine \S+ (was lost|went away)|engines of this model went away")
"""Anthropic's API has no 502; the last engine died before the first token."""


@dataclass(frozen=True)
class Question:
    """`turns` end with one of the user."""

    dialect: str
    model: str
    system: str
    turns: Sequence[Turn]
    max_tokens: int
    streamed: bool

    def path(self) -> str:
        if self.dialect == "gemini":
            verb = "streamGenerateContent?alt=sse" if self.streamed else "generateContent"
            return f"/v1beta/models/{self.model}:{verb}"
        return {"chat": "/v1/chat/completions"}.get(self.dialect, f"/v1/{self.dialect}")

    def body(self) -> dict[str, Any]:
        turns = [{"role": role, "content": text} for role, text in self.turns]
        system = {"role": "system", "content": self.system}
        if self.dialect == "gemini":
            contents = [
                {"role": "model" if role == "assistant" else "user", "parts": [{"text": text}]}
                for role, text in self.turns
            ]
            sampling = {"maxOutputTokens": self.max_tokens, "temperature": 0}
            return {
                "systemInstruction": {"parts": [{"text": self.system}]},
                "contents": contents,
                "generationConfig": sampling,
            }
        body: dict[str, Any] = {"model": self.model, "temperature": 0}
        if self.streamed:
            body["stream"] = True
        if self.dialect == "completions":
            options = {"stream_options": {"include_usage": True}} if self.streamed else {}
            return body | {"prompt": self.rendered(), "max_tokens": self.max_tokens} | options
        if self.dialect == "responses":
            return body | {
                "instructions": self.system,
                "input": turns,
                "max_output_tokens": self.max_tokens,
                "store": False,
            }
        if self.dialect == "messages":
            return body | {"system": self.system, "messages": turns, "max_tokens": self.max_tokens}
        options = {"stream_options": {"include_usage": True}} if self.streamed else {}
        return body | {"messages": [system, *turns], "max_tokens": self.max_tokens} | options

    def rendered(self) -> str:
        """The prompt that the demo model gets."""
        if self.dialect == "completions":
            return self.system + "\n" + "\n".join(text for _, text in self.turns)
        turns = [("system", self.system), *self.turns]
        return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def headers(key: str, dialect: str) -> dict[str, str]:
    named = {"messages": {"x-api-key": key, "anthropic-version": "2023-06-01"}, "gemini": {"x-goog-api-key": key}}
    return named.get(dialect, {"Authorization": f"Bearer {key}"})


@dataclass(frozen=True)
class Answer:
    """A whole one. `cached` are of `prompt`."""

    text: str
    prompt: int
    completion: int
    cached: int


class FailedError(Exception):
    """It ended with an error, told in the dialect's own shape."""


class WrongError(Exception):
    """It ended in no way that a client understands."""


def refused(dialect: str, status: int, answer_headers: Any, body: bytes) -> str:
    """What is wrong with a refusal; nothing when it is honest."""
    try:
        said = orjson.loads(body)
        error = said["error"]
        wanted = {"messages": {"type", "message"}, "gemini": {"code", "message", "status"}}.get(
            dialect, {"message", "type", "param", "code"}
        )
        if not wanted <= set(error) or (dialect == "messages" and said["type"] != "error"):
            return f"a {status} in another shape: {body[:200]!r}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"a {status} in no shape: {body[:200]!r}"
    if status not in REFUSALS and not (status == 500 and dialect == "messages" and LOST.search(body)):
        return f"a {status}: {body[:300]!r}"
    if status in (429, 503, 529) and not {"retry-after", "x-should-retry"} & {name.lower() for name in answer_headers}:
        return f"a {status} that does not say when to come again"
    return ""


def read(question: Question, body: bytes) -> Answer:
    """Raises FailedError, or WrongError."""
    try:
        whole = orjson.loads(body) if not question.streamed else list(_events(body))
    except orjson.JSONDecodeError as error:
        raise WrongError(f"no JSON: {body[-200:]!r}") from error
    try:
        return _READ[question.dialect](whole, question.streamed)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise WrongError(f"{type(error).__name__} {error} in {body[-300:]!r}") from error


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.replace(b"\r\n", b"\n").split(b"\n"):
        if line == b"data: [DONE]":
            yield {"done": True}
        elif line.startswith(b"data: "):
            yield orjson.loads(line[6:])


def _chat(whole: Any, streamed: bool) -> Answer:
    """Chats and completions."""
    if not streamed:
        choice, usage = whole["choices"][0], whole["usage"]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert_ended(choice["finish_reason"])
    else:
        text, usage, why = "", None, None
        for event in whole:
            _raise_error(event)
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                why = choice["finish_reason"] or why
        if not whole or "done" not in whole[-1]:
            raise WrongError("a stream without [DONE]")
        assert_ended(why)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(text or "", usage["prompt_tokens"], usage["completion_tokens"], cached)


def _responses(whole: Any, streamed: bool) -> Answer:
    if streamed:
        for event in whole:
            if event["type"] in ("error", "response.failed"):
                raise FailedError(str(event)[:300])
        if not whole or whole[-1]["type"] not in ("response.completed", "response.incomplete"):
            raise WrongError("a stream without its last event")
        whole = whole[-1]["response"]
    if whole["status"] == "failed":
        raise FailedError(str(whole["error"]))
    usage = whole["usage"]
    texts = [part["text"] for item in whole["output"] for part in item.get("content", ())]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Answer("".join(texts), usage["input_tokens"], usage["output_tokens"], cached)


def _messages(whole: Any, streamed: bool) -> Answer:
    if not streamed:
        assert_ended(whole["stop_reason"])
        text, usage = "".join(block["text"] for block in whole["content"]), whole["usage"]
    else:
        text, usage, why = "", {}, None
        for event in whole:
            if event["type"] == "error":
                raise FailedError(str(event)[:300])
            if event["type"] == "message_start":
                usage = dict(event["message"]["usage"])
            elif event["type"] == "content_block_delta":
                text += event["delta"]["text"]
            elif event["type"] == "message_delta":
                usage |= {name: count for name, count in event["usage"].items() if count is not None}
                why = event["delta"]["stop_reason"]
        if not whole or whole[-1]["type"] != "message_stop":
            raise WrongError("a stream without message_stop")
        assert_ended(why)
    cached = usage.get("cache_read_input_tokens") or 0
    prompt = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
    return Answer(text, prompt, usage["output_tokens"], cached)


def _gemini(whole: Any, streamed: bool) -> Answer:
    text, usage, why = "", None, None
    for event in whole if streamed else [whole]:
        _raise_error(event)
        usage = event.get("usageMetadata") or usage
        for candidate in event.get("candidates", ()):
            text += "".join(part.get("text", "") for part in candidate.get("content", {}).get("parts", ()))
            why = candidate.get("finishReason") or why
    assert_ended(why)
    assert usage is not None
    return Answer(
        text,
        usage["promptTokenCount"],
        usage.get("candidatesTokenCount") or 0,
        usage.get("cachedContentTokenCount") or 0,
    )


_READ = {"chat": _chat, "completions": _chat, "responses": _responses, "messages": _messages, "gemini": _gemini}


def _raise_error(event: dict[str, Any]) -> None:
    if "error" in event:
        raise FailedError(str(event)[:300])


def assert_ended(why: str | None) -> None:
    if not why:
        raise WrongError("no reason why it ended")
