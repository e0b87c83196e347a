"""OpenAI chat completions as an upstream: POST /v1/chat/completions, also of compatible servers. Pure.

    max_tokens       for every model but OpenAI's own: Ollama passes over `max_completion_tokens` and writes on, Mistral
                     refuses it. OpenAI's own, told by name, get that: reasoning models refuse the older one
    results          right behind the calls that they answer, as this API has it
    tools            those that may be called. All, where one is forced or none may be: compatible servers know no
                     `allowed_tools`
    reasoning_effort left out for OpenAI's own models that do not think, and refuse it
    response_format  strict where OpenAI takes the schema as strict; else OpenAI, unlike vLLM, only tries to follow it
    media            of users alone: images, PDFs as bytes, WAV and MP3; a file of text is a text

Thoughts since the last message of a user go back in the fields that they came in, as DeepSeek and Gemini want them;
OpenAI has none.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Final

import orjson

from gateway.errors import UpstreamRefusedError
from gateway.types import (
    CallDelta,
    ChatPrompt,
    Constraint,
    Delta,
    Media,
    Request,
    ScoredToken,
    Spelled,
    TextDelta,
    ThinkingDelta,
    ToolUse,
)
from gateway.upstreams.translation.base import (
    AnswerReader,
    Field,
    Form,
    Table,
    Written,
    arguments_text,
    calls_of,
    chat_of,
    data_url,
    file_name,
    kind_of,
    lacks,
    lacks_media,
    media_of,
    text_in,
    text_of,
)
from gateway.upstreams.translation.openai_caching import OPENAI, Marks, marks_of, options_of, parts
from gateway.upstreams.translation.thoughts import Thoughts, effort_of, seal, thoughts_of

MAX_STOPS: Final = 4
MAX_ID: Final = 40
"""Characters of the id of a call."""
MAX_ERROR_CHARS: Final = 2_000
IMAGES: Final = ("image/jpeg", "image/png", "image/gif", "image/webp")

_API: Final = "OpenAI chat completions"
_MARKABLE: Final = ("system", "user", "assistant", "tool")
_THINKS: Final = re.compile(r"(openai/|ft:)?(o\d|codex-|gpt-([5-9]|\d\d)(?!.*-chat))")
"""Models of OpenAI that think."""
_SOUNDS: Final = {
    **dict.fromkeys(("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave"), "wav"),
    **dict.fromkeys(("audio/mpeg", "audio/mp3"), "mp3"),
}
_THOUGHTS: Final = ("reasoning_content", "reasoning")
"""Fields of a message that servers have for the text."""
_DETAILS: Final = "reasoning_details"
_OF_THOUGHTS: Final = frozenset((*_THOUGHTS, _DETAILS))
_EXTRA: Final = "extra_content"
_OBJECT: Final = {"type": "object", "properties": {}}
_NO_ARGUMENTS: Final = {**_OBJECT, "additionalProperties": False}
_NEVER_STRICT: Final = frozenset(("allOf", "oneOf", "not", "if", "then", "else", "patternProperties"))
_CUT: Final = ("length", "model_length")
_BROKEN: Final = ("error", "abort", "insufficient_system_resource")
"""Reasons of answers that compatible servers did not end."""
_DETAIL_TEXTS: Final = ("text", "summary", "data")
_STATUS: Final = {
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "invalid_prompt": 400,
    "rate_limit_exceeded": 429,
    "server_is_overloaded": 503,
}

Json = dict[str, Any]


class OpenAIChat(Form):
    dialect = "openai"
    name = "openai"
    title = _API
    table: ClassVar[Table] = {
        "system": Field("system"),
        "messages": Field("messages"),
        "calls": Field("tool_calls"),
        "results": Field("tool"),
        "names": Field("name"),
        "image": Field("image_url"),
        "image URL": Field("image_url"),
        "file": Field("file"),
        "audio": Field("input_audio"),
        "tools": Field("tools"),
        "tool_choice": Field("tool_choice"),
        "one call": Field("parallel_tool_calls"),
        "strict": Field("strict"),
        "json_object": Field("response_format"),
        "json_schema": Field("response_format"),
        "thinking": Field("reasoning_effort"),
        "max_tokens": Field("max_completion_tokens"),
        "stop": Field("stop", most=MAX_STOPS),
        "temperature": Field("temperature"),
        "top_p": Field("top_p"),
        "seed": Field("seed"),
        "presence_penalty": Field("presence_penalty"),
        "frequency_penalty": Field("frequency_penalty"),
        "logit_bias": Field("logit_bias"),
        "logprobs": Field("top_logprobs"),
        "breakpoints": Field("prompt_cache_breakpoint"),
    }

    def write(self, request: Request, model: str) -> Written:
        chat = chat_of(request, _API)
        fields = self.fields(request, chat)
        if "max_completion_tokens" in fields and not OPENAI.match(model):
            fields["max_tokens"] = fields.pop("max_completion_tokens")
        if "logit_bias" in fields:
            fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"]}
        optional = {
            "response_format": _format(request.constraint),
            "reasoning_effort": effort_of(request.thinking) if thinks(model) is not False else None,
            "logprobs": "top_logprobs" in fields,
            "top_logprobs": fields.pop("top_logprobs", None),
            "stream": request.stream,
            "stream_options": {"include_usage": True} if request.stream else None,
            **_tools(chat, request.tool_use),
            **options_of(request, chat, model, marks := marks_of(chat, model, _MARKABLE)),
        }
        thoughts = thoughts_of(chat, self.name, request.model)
        body: Json = {"model": model, "messages": _messages(chat, marks, thoughts), **fields}
        body |= {name: value for name, value in optional.items() if value}
        if request.tool_use is not None and not request.tool_use.parallel:
            body["parallel_tool_calls"] = False
        return Written("/v1/chat/completions", body)

    def reader(self, request: Request) -> AnswerReader:
        return _Reader(request)


def thinks(model: str) -> bool | None:
    """Whether a model thinks, as far as its name says."""
    return True if _THINKS.match(model) else False if OPENAI.match(model) else None


def results_first(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of the messages, in an order in which results come right behind the assistant's message before them."""
    turns = list(accumulate(message["role"] == "assistant" for message in messages))
    rank = {"assistant": 0, "tool": 1}
    return sorted(range(len(messages)), key=lambda at: (turns[at], rank.get(messages[at]["role"], 2)))


def _messages(chat: ChatPrompt, marks: Marks, thoughts: Thoughts) -> list[Json]:
    known, media = calls_of(chat.messages, MAX_ID), media_of(chat)
    results = known.results
    asked = max((at for at, message in enumerate(chat.messages) if message["role"] == "user"), default=-1)
    written = []
    for at in results_first(chat.messages):
        message, own = chat.messages[at], media.get(at, ())
        text = text_of(message)
        content = parts(text, own, marks.get(at, {}), _part) if own or at in marks else text
        one: Json = {"role": message["role"], "content": content}
        if at in results:
            one["tool_call_id"] = results[at][0]
        elif message.get("name"):
            one["name"] = message["name"]
        if calls := message.get("tool_calls"):
            one["content"] = one["content"] or None
            one["tool_calls"] = [
                {
                    "id": known.ids[at, number],
                    "type": "function",
                    "function": {"name": call["function"]["name"], "arguments": arguments_text(call) or "{}"},
                }
                for number, call in enumerate(calls)
            ]
            for number in range(-1, len(calls)) if thoughts and at > asked else ():
                for thought in thoughts.get((at, number), ()):
                    _add_thought(one, max(number, 0), thought)
        written.append(one)
    return written


def _add_thought(message: Json, call: int, content: Json) -> None:
    """The fields that it came in: of the message, or of a call."""
    message |= {name: text for name in _THOUGHTS if isinstance(text := content.get(name), str)}
    if isinstance(details := content.get(_DETAILS), list):
        message[_DETAILS] = details
    if isinstance(extra := content.get(_EXTRA), dict):
        message["tool_calls"][call][_EXTRA] = extra


def _part(part: str | Media) -> Json:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.kind == "image":
        detail = {"detail": part.detail} if part.detail else {}
        return {"type": "image_url", "image_url": {"url": image_url(part, _API), **detail}}
    if part.data and part.mime_type == "application/pdf":
        return {"type": "file", "file": {"filename": file_name(part), "file_data": data_url(part)}}
    if part.data and part.mime_type in _SOUNDS:
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": _SOUNDS[part.mime_type]}}
    if (text := text_in(part)) is not None:
        return {"type": "text", "text": text}
    raise lacks_media(_API, part)


def image_url(image: Media, api: str) -> str:
    """Raises UnsupportedError for a type that OpenAI does not take, and for an uploaded file."""
    if image.mime_type in IMAGES or (image.url and not image.mime_type):
        return image.url or data_url(image)
    raise lacks_media(api, image)


def _tools(chat: ChatPrompt, use: ToolUse | None) -> Json:
    if not chat.tools:
        return {}
    mode, name = choice_of(use)
    return {
        "tools": [{"type": "function", "function": one} for one in functions_of(chat, use)],
        "tool_choice": {"type": "function", "function": {"name": name}} if name else mode,
    }


def functions_of(chat: ChatPrompt, use: ToolUse | None) -> list[Json]:
    """The tools that may be called; all, where one is forced or none may be."""
    some = chat.tools if use is None or choice_of(use)[1] else use.callable
    return [
        {"name": tool.name, "parameters": _NO_ARGUMENTS if tool.parameters is None else {**_OBJECT, **tool.parameters}}
        | ({"description": tool.description} if tool.description else {})
        | ({"strict": True} if tool.strict else {})
        for tool in some
    ]


def choice_of(use: ToolUse | None) -> tuple[str | None, str | None]:
    """The mode, None for "auto", and the name of a tool that is forced."""
    if use is None:
        return "none", None
    if use.mode == "auto":
        return None, None
    return "required", use.callable[0].name if len(use.callable) == 1 else None


def _format(constraint: Constraint | None) -> Json | None:
    if constraint is None:
        return None
    if kind_of(constraint) == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": schema_of(constraint, _API)}


def schema_of(constraint: Constraint, api: str) -> Json:
    """Name, schema and whether it is strict. Raises UnsupportedError for a grammar that is no schema of an object."""
    schema = orjson.loads(constraint.grammar.text)
    if not isinstance(schema, dict):
        raise lacks(api, "such structured output: it takes a JSON Schema that is an object", constraint.param)
    return {"name": "answer", "schema": schema} | ({"strict": True} if _is_strict(schema) else {})


def _is_strict(schema: Json) -> bool:
    """Whether OpenAI takes it as strict: objects all the way down that are closed, and whose properties all have to be
    there."""
    if schema.get("type") != "object" or "anyOf" in schema:
        return False
    left: list[Any] = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            if _NEVER_STRICT & set(one) or not _is_closed(one):
                return False
            left += one.values()
    return True


def _is_closed(schema: Json) -> bool:
    kind, properties, required = schema.get("type"), schema.get("properties", {}), schema.get("required", [])
    if kind != "object" and "properties" not in schema and not (isinstance(kind, list) and "object" in kind):
        return True
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return schema.get("additionalProperties") is False and all(name in required for name in properties)


class _Reader(AnswerReader):
    """Answers behind the first are passed over."""

    def __init__(self, request: Request) -> None:
        self._stops, self._scores = request.stop, Scores(request)
        self._model = request.model
        self._thought: dict[str, list[str]] = {}  # by field
        self._details: list[Json] = []
        self._refused = False
        self._calls = -1  # number of the last call
        self._seen = set[tuple[int, str]]()  # indexes and ids of the calls
        self._index, self._id = -1, ""  # of the last call
        self._has_arguments = True  # the last call, or there is none

    def event(self, event: Mapping[str, Any]) -> Iterator[Delta]:
        for choice in _choices(event):
            yield from self._message(choice, choice.get("delta") or {})
            yield from self._end(choice)

    def whole(self, answer: Mapping[str, Any]) -> Iterator[Delta]:
        for choice in _choices(answer):
            yield from self._message(choice, choice["message"])
            yield from self._end(choice)

    def _message(self, choice: Mapping[str, Any], message: Mapping[str, Any]) -> Iterator[Delta]:
        text, refused = plain_text(message.get("content")), plain_text(message.get("refusal"))
        if not _OF_THOUGHTS.isdisjoint(message):
            yield from self._think(message)
        calls = message.get("tool_calls") or ()
        scores = {} if calls else choice.get("logprobs") or {}
        scored = self._scores.read([*(scores.get("content") or ()), *(scores.get("refusal") or ())])
        if text or (scored and not refused):
            yield TextDelta(text, scored)
        if refused:
            self._refused = True
            yield TextDelta(refused, () if text else scored, refusal=True)
        for position, call in enumerate(calls):
            yield from self._call(call, position)

    def _think(self, message: Mapping[str, Any]) -> Iterator[Delta]:
        for name in _THOUGHTS:
            if thought := plain_text(message.get(name)):
                self._thought.setdefault(name, []).append(thought)
                yield ThinkingDelta(thought)
                break
        for detail in message.get(_DETAILS) or ():
            last = self._details[-1] if self._details else {}
            if not last or any(last.get(name) != detail.get(name) for name in ("type", "index")):
                self._details.append(last := {})
            for name, value in detail.items():
                if name in _DETAIL_TEXTS:
                    last.setdefault(name, []).append(plain_text(value))
                elif value is not None:
                    last[name] = value

    def _sealed(self, call: Mapping[str, Any]) -> Iterator[Delta]:
        """What a call that begins is to have with it in the next turn; without one nothing is."""
        content: Json = {name: "".join(texts) for name, texts in self._thought.items()}
        if self._details:
            content[_DETAILS] = [
                {name: "".join(value) if name in _DETAIL_TEXTS else value for name, value in detail.items()}
                for detail in self._details
            ]
        content |= {_EXTRA: call[_EXTRA]} if call.get(_EXTRA) else {}
        self._thought, self._details = {}, []
        if content:
            yield ThinkingDelta(signature=seal(OpenAIChat.name, self._model, content))

    def _call(self, call: Mapping[str, Any], position: int) -> Iterator[Delta]:
        """Servers differ in what they repeat with each chunk: the id, a new id, the name, or nothing. A call begins
        with a name, and another index or id."""
        index, function = call.get("index"), call.get("function") or {}
        index = position if index is None else index
        name, given_id = function.get("name") or "", call.get("id") or ""
        written = function.get("arguments") or ""
        if isinstance(written, dict):
            written = orjson.dumps(written).decode()
        if type(index) is not int or not all(isinstance(one, str) for one in (name, given_id, written)):
            raise TypeError("a call of other types")
        if name and (index != self._index or (given_id and given_id != self._id)):
            if (index, given_id) in self._seen:
                raise ValueError("a call that has ended goes on")
            yield from self._close()
            yield from self._sealed(call)
            self._seen.add((index, given_id))
            self._index, self._id, self._calls, self._has_arguments = index, given_id, self._calls + 1, bool(written)
            yield CallDelta(self._calls, name, written)
        elif index != self._index:
            raise ValueError("a call without a name, or one that has ended")
        elif written:
            self._has_arguments = True
            yield CallDelta(self._calls, arguments=written)

    def _close(self) -> Iterator[Delta]:
        """A call whose arguments are no text has none."""
        if not self._has_arguments:
            self._has_arguments = True
            yield CallDelta(self._calls, arguments="{}")

    def _end(self, choice: Mapping[str, Any]) -> Iterator[Delta]:
        why = choice.get("finish_reason")
        if not why or why in _BROKEN:
            return
        yield from self._close()
        self.reason = "length" if why in _CUT else "tool_calls" if self._calls >= 0 else "stop"
        if why == "content_filter" or self._refused:
            self.reason = "refusal"
        if (stop := choice.get("stop_reason")) in self._stops:  # vLLM and SGLang say it
            self.stop = stop


def _choices(answer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The first, where there is one."""
    if answer.get("error"):
        raise refusal(answer["error"])
    return (choice for choice in answer.get("choices") or () if not choice.get("index"))


class Scores:
    """Reads the log probabilities of an answer's tokens, where they were asked for."""

    def __init__(self, request: Request) -> None:
        self._top = request.sampling.logprobs
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0  # of the tokens so far

    def read(self, entries: Iterable[Mapping[str, Any]]) -> tuple[ScoredToken, ...]:
        return () if self._top is None else tuple(self._token(one, self._top) for one in entries)

    def _token(self, entry: Mapping[str, Any], top: int) -> ScoredToken:
        token, offset = _spelled(entry), self._chars
        self._chars += len(self._decoder.decode(token.bytes or b""))
        others = [(_spelled(one), _number(one["logprob"])) for one in entry.get("top_logprobs") or ()]
        others.sort(key=lambda one: -one[1])
        return ScoredToken(token, _number(entry["logprob"]), tuple(others[:top]), offset)


def _spelled(entry: Mapping[str, Any]) -> Spelled:
    """Servers that know no bytes of tokens leave them out; null are those of a special token."""
    text = plain_text(entry["token"])
    given = entry.get("bytes", list(text.encode()))
    if given is not None and not isinstance(given, list):
        raise TypeError("no bytes")
    return Spelled(text, None if given is None else bytes(given))


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError("no number")
    return float(value)


def plain_text(content: Any) -> str:
    """Empty for null. Of parts, as Mistral's reasoning models write them, those that are text."""
    if isinstance(content, list):
        return "".join(plain_text(part["text"]) for part in content if part.get("type") == "text")
    if content is not None and not isinstance(content, str):
        raise TypeError("no text")
    return content or ""


def refusal(error: Any) -> UpstreamRefusedError:
    """Of `error`, which is an object or the message alone. Its code may be a status."""
    fields = error if isinstance(error, dict) else {"message": error}
    code = fields.get("code")
    if type(code) is not int or not 400 <= code < 600:
        code = next((_STATUS[one] for one in (code, fields.get("type")) if one in _STATUS), 500)
    return UpstreamRefusedError(plain_text(fields["message"])[:MAX_ERROR_CHARS], code)
