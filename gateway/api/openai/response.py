"""Answers as the OpenAI dialect writes them: whole bodies, and SSE chunks from templates that are made once per answer,
so that a chunk of text costs one escape and one concatenation.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import orjson
import xxhash

from engine.protocol import Hello, Namespace
from gateway.api.call import Call
from gateway.api.openai.tools import custom_names, input_of, names_a_tool
from gateway.api.openai.wire import error_json
from gateway.api.replies import Answer, Stamp, ToldThought, ToolCall, data, json_line, json_text, new_id
from gateway.api.stream import Shape
from gateway.errors import KvasirError
from gateway.types import CallDelta, Finished, ScoredToken, Spelled, Started, TextDelta, ThinkingDelta, Tier, Usage

DONE = b"data: [DONE]\n\n"


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
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


class _ChoicesShape(Shape):
    """What chats and completions have in common. `kind` is `object` of a whole answer, `chunk_kind` of its chunks;
    `more` fields go into both."""

    def __init__(self, model: Hello, call: Call, prefix: str, kind: str, chunk_kind: str, **more: Any) -> None:
        self._prefix, self._kind, self._chunk_kind = prefix, kind, chunk_kind
        self._base: dict[str, Any] = {
            "id": f"{prefix}-{secrets.token_hex(16)}",
            "object": "",
            "created": int(time.time()),
            "model": model.model,
            **more,
            "system_fingerprint": _fingerprint(model.namespace),
        }
        self._stream, self._include_usage = call.stream, call.include_usage
        self._tail = b',"usage":null}\n\n' if call.include_usage else b"}\n\n"  # of a chunk, behind its choices

    @cached_property
    def _head(self) -> bytes:
        """What stands before the fields of a choice in every chunk."""
        return b"data: " + orjson.dumps({**self._base, "object": self._chunk_kind})[:-1] + b',"choices":[{'

    def stamp(self) -> Stamp:
        """What is new in each answer; ids of tool calls are not in it."""
        kind = self._chunk_kind if self._stream else self._kind

        def write(name: str, created: int) -> bytes:
            return orjson.dumps({"id": name, "object": kind, "created": created})[1:-1]

        written = write(self._base["id"], self._base["created"])
        return Stamp(written, lambda: write(f"{self._prefix}-{new_id()}", int(time.time())))

    def failure(self, error: KvasirError) -> bytes:
        return data(error_json(error))

    def ending(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        chunk = {**self._base, "object": self._chunk_kind, "choices": [], "usage": usage_json(usage)}
        return b"data: " + orjson.dumps(chunk) + b"\n\n" + DONE

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        choices = [{"index": index, **self._choice(answer)} for index, answer in enumerate(answers)]
        return orjson.dumps({**self._base, "object": self._kind, "choices": choices, "usage": usage_json(usage)})

    def _choice(self, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(self, index: int, content: bytes, reason: bytes = b"null", logprobs: bytes = b"null") -> bytes:
        head, tail = self._head, self._tail
        return b'%b"index":%d,%b,"logprobs":%b,"finish_reason":%b}]%b' % (head, index, content, logprobs, reason, tail)


class ChatShape(_ChoicesShape):
    """`chat.completion` and its chunks, of `n` choices."""

    def __init__(self, model: Hello, call: Call, body: Mapping[str, Any], tier: Tier) -> None:
        """`body` is the request's, which is valid; `tier` is the one served."""
        kinds = ("chatcmpl", "chat.completion", "chat.completion.chunk")
        super().__init__(model, call, *kinds, service_tier=tier)
        self._n = call.choices.n
        self._has_tools = call.tool_use is not None
        self._deprecated = bool(body.get("functions"))  # at most one call, which is no list
        self._named = names_a_tool(body)  # the call is then no reason to end
        self._custom = custom_names(body)
        self._signatures: dict[int, str] = {}  # by choice, of a thought that nothing came after yet
        self._details = Counter[int]()  # by choice, signatures that came before no call
        self._inputs: dict[int, tuple[int, list[str]]] = {}  # by choice, of a call of a custom tool: its arguments

    def prelude(self) -> bytes:
        """What goes out before everything: the role of each choice, in order, for SDKs that keep choices in a list."""
        content = b'""' if not self._has_tools else b"null"  # there may be none
        role = b'"delta":{"role":"assistant","content":%b}' % content
        return b"".join(self._chunk(index, role) for index in range(self._n))

    def text(self, index: int, delta: TextDelta) -> bytes:
        """A chunk of text, with the log probabilities of its tokens where they are requested."""
        written = json_text(delta.text)
        if not (delta.scored or delta.refusal or self._signatures):  # as nearly all are
            choice = b'%b"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]%b'
            return choice % (self._head, index, written, self._tail)
        logprobs = json_line(chat_logprobs(delta.scored)) if delta.scored else b"null"
        before = self._detail(index) if self._signatures else b""
        if delta.refusal:
            return before + self._chunk(index, b'"delta":{"refusal":%b}' % written)
        return before + self._chunk(index, b'"delta":{"content":%b}' % written, b"null", logprobs)

    def thinking(self, index: int, delta: ThinkingDelta) -> bytes:
        """Its text as other servers write it. A signature waits for what comes after it."""
        data = self._chunk(index, b'"delta":{"reasoning_content":%b}' % json_text(delta.text)) if delta.text else b""
        if delta.signature:
            data += self._detail(index)
            self._signatures[index] = delta.signature
        return data

    def _detail(self, index: int) -> bytes:
        """Of a signature that comes before no call, if there is one."""
        if (signature := self._signatures.pop(index, None)) is None:
            return b""
        self._details[index] += 1
        detail = _detail(signature, self._details[index] - 1)
        return self._chunk(index, b'"delta":{"reasoning_details":[%b]}' % json_line(detail))

    def call(self, index: int, delta: CallDelta) -> bytes:
        """Id, type and name once, with the first chunk of a call: SDKs join repeated fields. The input of a custom
        tool comes whole, at the end of its call."""
        before = self._input(index) if delta.name else b""
        if index in self._inputs:
            self._inputs[index][1].append(delta.arguments)
            return b""
        kind, inside = "function", {"name": delta.name, "arguments": delta.arguments}
        if delta.name in self._custom:
            self._inputs[index] = (delta.call, [delta.arguments])
            kind, inside = "custom", {"name": delta.name, "input": ""}
        if not delta.name:
            del inside["name"]
        if self._deprecated:
            return self._detail(index) + self._chunk(index, b'"delta":{"function_call":%b}' % json_line(inside))
        opened = {"id": new_call_id(), "type": kind} if delta.name else {}
        if delta.name and (signature := self._signatures.pop(index, None)) is not None:
            opened |= _extra(signature)
        return before + self._call(index, {"index": delta.call, **opened, kind: inside})

    def _input(self, index: int) -> bytes:
        """Of the call of a custom tool that ends here, if there is one."""
        if index not in self._inputs:
            return b""
        number, written = self._inputs.pop(index)
        return self._call(index, {"index": number, "custom": {"input": input_of("".join(written))}})

    def _call(self, index: int, fields: dict[str, Any]) -> bytes:
        return self._chunk(index, b'"delta":{"tool_calls":[%b]}' % json_line(fields))

    def closing(self, index: int, finished: Finished) -> bytes:
        before = self._input(index) + self._detail(index)
        return before + self._chunk(index, b'"delta":{}', b'"%b"' % self._reason(finished.reason).encode())

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {
            "message": self._message(answer),
            "logprobs": None if answer.scored is None else chat_logprobs(answer.scored),
            "finish_reason": self._reason(answer.reason),
        }

    def _message(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None, "annotations": []}
        if answer.calls or self._has_tools:
            message["content"] = answer.text or None
        if answer.calls and self._deprecated:
            message["function_call"] = {"name": answer.calls[0].name, "arguments": answer.calls[0].arguments}
        elif answer.calls:
            message["tool_calls"] = [self._whole_call(call.name, call.arguments) for call in answer.calls]
        if answer.refusal:
            message |= {"content": answer.text or None, "refusal": answer.refusal}
        if answer.thoughts:
            self._add_thoughts(answer, message)
        return message

    def _add_thoughts(self, answer: Answer, message: dict[str, Any]) -> None:
        """As in a stream: the signature right before a call is the call's."""
        calls = iter(message.get("tool_calls", ()))
        signature, alone = "", list[str]()
        for part in answer.in_order():
            if isinstance(part, ToolCall) and (call := next(calls, None)) is not None:
                call |= _extra(signature) if signature else {}
                signature = ""
            elif not isinstance(part, ToldThought) or part.signature:
                alone += [signature] if signature else []
                signature = part.signature if isinstance(part, ToldThought) else ""
        alone += [signature] if signature else []
        if text := "\n\n".join(thought.text for thought in answer.thoughts if thought.text):
            message["reasoning_content"] = text
        if alone:
            message["reasoning_details"] = [_detail(one, number) for number, one in enumerate(alone)]

    def _whole_call(self, name: str, arguments: str) -> dict[str, Any]:
        kind = "custom" if name in self._custom else "function"
        inside = {"input": input_of(arguments)} if kind == "custom" else {"arguments": arguments}
        return {"id": new_call_id(), "type": kind, kind: {"name": name, **inside}}

    def _reason(self, reason: str) -> str:
        if reason != "tool_calls":
            return "content_filter" if reason == "refusal" else reason
        if self._named:
            return "stop"
        return "function_call" if self._deprecated else reason


class CompletionShape(_ChoicesShape):
    """`text_completion`, whole and in chunks. Choices are numbered by prompt, and by answer within each."""

    def __init__(self, model: Hello, call: Call) -> None:
        super().__init__(model, call, "cmpl", "text_completion", "text_completion")
        self._echoed: dict[int, int] = {}  # characters of the prompt in front of a choice

    def opening(self, index: int, echo: str, started: Started) -> bytes:
        """The prompt, when it is echoed; else nothing."""
        self._echoed[index] = len(echo)
        if not echo and not started.scored:
            return b""
        return self._text(index, echo, completion_logprobs((), 0, started.scored) if started.scored else None)

    def text(self, index: int, delta: TextDelta) -> bytes:
        """A chunk of text, with the log probabilities of its tokens where they are requested."""
        scored = completion_logprobs(delta.scored, self._echoed[index]) if delta.scored else None
        return self._text(index, delta.text, scored)

    def call(self, index: int, delta: CallDelta) -> bytes:
        """Completions have no tools."""
        return b""

    def closing(self, index: int, finished: Finished) -> bytes:
        return self._chunk(index, b'"text":""', b'"%b"' % finished.reason.encode())

    def _text(self, index: int, text: str, logprobs: dict[str, Any] | None) -> bytes:
        scored = b"null" if logprobs is None else json_line(logprobs)
        return self._chunk(index, b'"text":%b' % json_text(text), b"null", scored)

    def _choice(self, answer: Answer) -> dict[str, Any]:
        scored = answer.scored
        return {
            "text": answer.text,
            "logprobs": None if scored is None else completion_logprobs(scored, answer.echoed, answer.prompt),
            "finish_reason": answer.reason,
        }


def _detail(signature: str, number: int) -> dict[str, Any]:
    """As OpenRouter writes one."""
    return {"type": "reasoning.encrypted", "data": signature, "index": number}


def _extra(signature: str) -> dict[str, Any]:
    """Of a tool call, as Gemini's own chats have it."""
    return {"extra_content": {"google": {"thought_signature": signature}}}


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def model_json(model: str, created: int, hello: Hello | None) -> dict[str, Any]:
    """`parent`, as vLLM has it: the model that a LoRA adapter is of."""
    card = {"id": model, "object": "model", "created": created, "owned_by": "kvasir"}
    return card | ({"parent": hello.parent} if hello is not None and hello.parent else {})


@lru_cache(maxsize=64)
def _fingerprint(namespace: Namespace) -> str:
    """Changes when the weights or what they are computed in change."""
    return f"fp_{xxhash.xxh3_64_hexdigest(namespace.root())[:10]}"


def chat_logprobs(scored: Sequence[ScoredToken]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: `token` is for reading, `bytes` is exact."""
    content = [
        {**_entry(one.token, one.logprob), "top_logprobs": [_entry(token, logprob) for token, logprob in one.top]}
        for one in scored
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    scored: Sequence[ScoredToken], before: int, prompt: Sequence[ScoredToken] = ()
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. `before` is how many characters of the choice's text are not the answer's.

    The chosen token is among `top_logprobs`, also where it was not among the likeliest. Tokens of the prompt come
    first, and the first of them has null for both: nothing comes before it.
    """
    if prompt:
        scores = completion_logprobs(prompt, 0)
        scores["token_logprobs"][0] = scores["top_logprobs"][0] = None
        answer = completion_logprobs(scored, before)
        return {key: values + answer[key] for key, values in scores.items()}
    return {
        "tokens": [_name(one.token) for one in scored],
        "token_logprobs": [one.logprob for one in scored],
        "top_logprobs": [
            {_name(token): logprob for token, logprob in (*one.top, (one.token, one.logprob))} for one in scored
        ],
        "text_offset": [before + one.offset for one in scored],
    }


def _entry(token: Spelled, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": logprob, "bytes": None if token.bytes is None else list(token.bytes)}


def _name(token: Spelled) -> str:
    """Its text; the bytes of a token that is not valid UTF-8 by itself, in the form of the legacy API."""
    if token.bytes is None or token.bytes == token.text.encode():
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
