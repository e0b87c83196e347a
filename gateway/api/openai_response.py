"""Answers as the OpenAI dialect writes them: whole bodies, and SSE chunks from templates that are made once per answer,
so that a piece of text costs one escape and one concatenation.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson
import xxhash

from engine.protocol import Hello, Namespace
from gateway.api.openai_logprobs import chat_logprobs, completion_logprobs
from gateway.api.wire import json_line, json_text
from gateway.types import ScoredToken, TextDelta, Usage

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, complete."""

    text: str
    reason: str
    usage: Usage
    scored: tuple[ScoredToken, ...] | None = None  # when log probabilities were asked for
    echoed: int = 0  # characters of `text` that are the prompt
    prompt: tuple[ScoredToken, ...] = ()  # scored as well, when it is echoed with log probabilities


def usage_json(usage: Usage) -> dict[str, Any]:
    """prompt_tokens is the whole prompt, cached and written tokens included.

    `cache_lease` is ours, and there only when the request has breakpoints.
    """
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
            "audio_tokens": 0,
            **({"cache_lease": usage.lease} if usage.lease else {}),
        },
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


class ChatShape:
    """`chat.completion` and its chunks, of `n` choices."""

    def __init__(self, model: Hello, n: int, *, include_usage: bool) -> None:
        self._n = n
        self._base: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model.model,
            "service_tier": "default",
            "system_fingerprint": _fingerprint(model.namespace),
        }
        self._include_usage = include_usage
        self._head, self._tail = _frame(self._base, "chat.completion.chunk", include_usage)

    def prelude(self) -> bytes:
        """What goes out before everything: the role of each choice, in order, for SDKs that keep choices in a list."""
        role = b'"delta":{"role":"assistant","content":""}'
        return b"".join(self._chunk(index, role, b"null") for index in range(self._n))

    def opening(self, index: int, echo: str, prompt: tuple[ScoredToken, ...]) -> bytes:
        """Nothing more before a choice's first text."""
        return b""

    def piece(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the JSON string of a piece of text."""
        head = b'%b"index":%d,"delta":{"content":' % (self._head, index)
        return head, b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def scored(self, index: int, echoed: int, delta: TextDelta) -> bytes:
        """A piece of text with the log probabilities of its tokens."""
        return b'%b"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}]%b' % (
            self._head,
            index,
            json_text(delta.text),
            json_line(chat_logprobs(delta.scored)),
            self._tail,
        )

    def closing(self, index: int, reason: str) -> bytes:
        return self._chunk(index, b'"delta":{}', b'"%b"' % reason.encode())

    def ending(self, usage: Usage) -> bytes:
        return _ending(self._base, "chat.completion.chunk", usage if self._include_usage else None)

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None, "annotations": []},
                "logprobs": None if answer.scored is None else chat_logprobs(answer.scored),
                "finish_reason": answer.reason,
            }
            for index, answer in enumerate(answers)
        ]
        return _body(self._base, "chat.completion", choices, usage)

    def _chunk(self, index: int, delta: bytes, reason: bytes) -> bytes:
        head, tail = self._head, self._tail
        return b'%b"index":%d,%b,"logprobs":null,"finish_reason":%b}]%b' % (head, index, delta, reason, tail)


class CompletionShape:
    """`text_completion`, whole and in chunks. Choices are numbered by prompt, and by answer within each."""

    def __init__(self, model: Hello, *, include_usage: bool) -> None:
        self._base: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.model,
            "system_fingerprint": _fingerprint(model.namespace),
        }
        self._include_usage = include_usage
        self._head, self._tail = _frame(self._base, "text_completion", include_usage)

    def prelude(self) -> bytes:
        """Nothing goes out before the first choice's own."""
        return b""

    def opening(self, index: int, echo: str, prompt: tuple[ScoredToken, ...]) -> bytes:
        """The prompt, when it is echoed; else nothing."""
        if prompt:
            told = json_line(completion_logprobs((), 0, prompt))
            return b'%b"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}]%b' % (
                self._head,
                index,
                json_text(echo),
                told,
                self._tail,
            )
        before, after = self.piece(index)
        return before + json_text(echo) + after if echo else b""

    def piece(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the JSON string of a piece of text."""
        head = b'%b"index":%d,"text":' % (self._head, index)
        return head, b',"logprobs":null,"finish_reason":null}]' + self._tail

    def scored(self, index: int, echoed: int, delta: TextDelta) -> bytes:
        """A piece of text with the log probabilities of its tokens, behind `echoed` characters of the prompt."""
        return b'%b"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}]%b' % (
            self._head,
            index,
            json_text(delta.text),
            json_line(completion_logprobs(delta.scored, echoed)),
            self._tail,
        )

    def closing(self, index: int, reason: str) -> bytes:
        head, tail = self._head, self._tail
        return b'%b"index":%d,"text":"","logprobs":null,"finish_reason":"%b"}]%b' % (head, index, reason.encode(), tail)

    def ending(self, usage: Usage) -> bytes:
        return _ending(self._base, "text_completion", usage if self._include_usage else None)

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        choices = [
            {
                "index": index,
                "text": answer.text,
                "logprobs": None if answer.scored is None else _logprobs(answer),
                "finish_reason": answer.reason,
            }
            for index, answer in enumerate(answers)
        ]
        return _body(self._base, "text_completion", choices, usage)


def _logprobs(answer: Answer) -> dict[str, Any]:
    return completion_logprobs(answer.scored or (), answer.echoed, answer.prompt)


def model_json(model: str, created: int) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": created, "owned_by": "kvasir"}


def _body(base: dict[str, Any], kind: str, choices: list[dict[str, Any]], usage: Usage) -> bytes:
    return orjson.dumps({**base, "object": kind, "choices": choices, "usage": usage_json(usage)})


def _frame(base: dict[str, Any], kind: str, include_usage: bool) -> tuple[bytes, bytes]:
    """What stands before the fields of a choice in every chunk, and after its closing bracket."""
    head = b"data: " + orjson.dumps({**base, "object": kind})[:-1] + b',"choices":[{'
    return head, b',"usage":null}\n\n' if include_usage else b"}\n\n"


def _ending(base: dict[str, Any], kind: str, usage: Usage | None) -> bytes:
    if usage is None:
        return DONE
    chunk = {**base, "object": kind, "choices": [], "usage": usage_json(usage)}
    return b"data: " + orjson.dumps(chunk) + b"\n\n" + DONE


@lru_cache(maxsize=64)
def _fingerprint(namespace: Namespace) -> str:
    """Changes when the weights or what they are computed in change."""
    return f"fp_{xxhash.xxh3_64_hexdigest(namespace.root())[:10]}"
