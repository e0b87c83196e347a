"""OpenAI's Responses API as an upstream: POST /v1/responses. Pure.

    instructions  the system message that comes first, where others follow and it is not marked for caching; all others
                  are items of the input
    input         messages, and calls and results as items of their own, results right behind their calls
    strict        is always said of a tool: this API takes one that does not say it as strict
    store         false: the upstream keeps nothing
    media         images, and files of all kinds, by URL as well; of users and results of tools
    prewarm       computes the prompt and answers nothing, as the request's own does

Names of messages are left out. Thoughts of earlier turns are items of their own, as the API has encrypted them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final

from gateway.types import (
    CallDelta,
    ChatPrompt,
    Constraint,
    Delta,
    Media,
    Request,
    TextDelta,
    Thinking,
    ThinkingDelta,
    ToolUse,
)
from gateway.upstreams.translation.base import (
    LEFT_OUT,
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
    lacks_media,
    media_of,
    num_instructions,
    text_of,
)
from gateway.upstreams.translation.openai_caching import Marks, marks_of, options_of, parts
from gateway.upstreams.translation.openai_chat import (
    Scores,
    choice_of,
    functions_of,
    image_url,
    plain_text,
    refusal,
    results_first,
    schema_of,
    thinks,
)
from gateway.upstreams.translation.thoughts import Thoughts, effort_of, seal, thoughts_of

MAX_ID: Final = 64
"""Characters of the id of a call."""
MIN_TOKENS: Final = 16
"""The least limit of an answer."""

_API: Final = "OpenAI responses"
_MARKABLE: Final = ("system", "user", "tool")
_LOGPROBS: Final = "message.output_text.logprobs"
_THOUGHTS: Final = "reasoning.encrypted_content"
_FILES: Final = re.compile(r"text/.+|application/(pdf|json|rtf|xml|x-.+|msword|javascript|typescript|vnd\..+)")

Json = dict[str, Any]


class OpenAIResponses(Form):
    dialect = "openai"
    name = "openai-responses"
    title = _API
    table: ClassVar[Table] = {
        "system": Field("instructions"),
        "messages": Field("input"),
        "calls": Field("function_call"),
        "results": Field("function_call_output"),
        "names": LEFT_OUT,
        "image": Field("input_image"),
        "image URL": Field("input_image"),
        "file": Field("input_file"),
        "file URL": Field("file_url"),
        "result image": Field("input_image"),
        "tools": Field("tools"),
        "tool_choice": Field("tool_choice"),
        "one call": Field("parallel_tool_calls"),
        "strict": Field("strict"),
        "json_object": Field("text"),
        "json_schema": Field("text"),
        "thinking": Field("reasoning"),
        "max_tokens": Field("max_output_tokens", least=MIN_TOKENS),
        "temperature": Field("temperature"),
        "top_p": Field("top_p"),
        "logprobs": Field("top_logprobs"),
        "prewarm": Field("prewarm"),
        "breakpoints": Field("prompt_cache_breakpoint"),
    }

    def write(self, request: Request, model: str) -> Written:
        chat, use = chat_of(request, _API), request.tool_use
        fields = self.fields(request, chat)
        marks = marks_of(chat, model, _MARKABLE)
        instructions = num_instructions(chat.messages) > 0 and 0 not in marks
        first = 1 if instructions else 0
        optional = {
            "instructions": text_of(chat.messages[0]) if instructions else None,
            "text": _format(request.constraint),
            "include": _include(request, model),
            "reasoning": _reasoning(request.thinking) if thinks(model) is not False else None,
            "top_logprobs": fields.pop("top_logprobs", None),
            "stream": request.stream,
            **options_of(request, chat, model, marks),
            **_tools(chat, use),
        }
        body: Json = {
            "model": model,
            "store": False,
            "input": _items(chat, first, marks, thoughts_of(chat, self.name, request.model)),
            **fields,
        }
        body |= {name: value for name, value in optional.items() if value}
        if use is not None and not use.parallel:
            body["parallel_tool_calls"] = False
        return Written("/v1/responses", body)

    def reader(self, request: Request) -> AnswerReader:
        return _Reader(request)


def _include(request: Request, model: str) -> list[str]:
    """Thoughts are included for models that think, and where they are asked for."""
    thinking = request.thinking
    thoughts = thinks(model) if thinking is None else thinking.is_on and thinks(model) is not False
    asked = {_LOGPROBS: request.sampling.logprobs is not None, _THOUGHTS: thoughts}
    return [name for name, is_asked in asked.items() if is_asked]


def _reasoning(thinking: Thinking | None) -> Json:
    if thinking is None:
        return {}
    optional = {"effort": effort_of(thinking), "summary": "auto" if thinking.shown and thinking.is_on else None}
    return {name: value for name, value in optional.items() if value}


def _items(chat: ChatPrompt, first: int, marks: Marks, thoughts: Thoughts) -> list[Json]:
    """From this message on."""
    known, media = calls_of(chat.messages, MAX_ID), media_of(chat)
    results = known.results
    items: list[Json] = []
    for at in results_first(chat.messages)[first:]:
        message = chat.messages[at]
        text, calls = text_of(message), message.get("tool_calls") or ()
        own = media.get(at, ())
        content = parts(text, own, marks.get(at, {}), _part) if own or at in marks else text
        if content or calls:
            items += _thoughts(thoughts.get((at, -1), ()))
        if at in results:
            items.append({"type": "function_call_output", "call_id": results[at][0], "output": content})
        elif content or not calls:
            items.append({"role": message["role"], "content": content})
        for number, call in enumerate(calls):
            items += _thoughts(thoughts.get((at, number), ()))
            called = {"name": call["function"]["name"], "arguments": arguments_text(call) or "{}"}
            items.append({"type": "function_call", "call_id": known.ids[at, number], **called})
    return items


def _thoughts(own: Iterable[Json]) -> Iterator[Json]:
    for content in own:
        match content:
            case {"id": str(given_id), "summary": list(summary), "encrypted_content": str(encrypted)}:
                yield {"type": "reasoning", "id": given_id, "summary": summary, "encrypted_content": encrypted}


def _part(part: str | Media) -> Json:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    if part.kind == "image":
        return {"type": "input_image", "detail": part.detail or "auto", "image_url": image_url(part, _API)}
    if part.kind == "file" and part.url and (not part.mime_type or _FILES.fullmatch(part.mime_type)):
        return {"type": "input_file", "file_url": part.url}
    if part.kind == "file" and part.data and _FILES.fullmatch(part.mime_type):
        return {"type": "input_file", "filename": file_name(part), "file_data": data_url(part)}
    raise lacks_media(_API, part)


def _tools(chat: ChatPrompt, use: ToolUse | None) -> Json:
    if not chat.tools:
        return {}
    mode, name = choice_of(use)
    return {
        "tools": [{"type": "function", "strict": False, **one} for one in functions_of(chat, use)],
        "tool_choice": {"type": "function", "name": name} if name else mode,
    }


def _format(constraint: Constraint | None) -> Json | None:
    if constraint is None:
        return None
    if kind_of(constraint) == "json_object":
        return {"format": {"type": "json_object"}}
    return {"format": {"type": "json_schema", **schema_of(constraint, _API)}}


class _Reader(AnswerReader):
    """Items other than messages, calls and thoughts are passed over: tools that the upstream runs itself."""

    def __init__(self, request: Request) -> None:
        self._model = request.model
        self._refused = False
        self._has_thought = False  # some text of the thoughts is there
        self._scores = Scores(request)
        self._calls: dict[int, int] = {}  # number of an item -> of its call
        self._open: int | None = None  # item of the last call
        self._has_arguments = True  # the last call, or there is none

    def event(self, event: Mapping[str, Any]) -> Iterator[Delta]:
        kind = event.get("type")
        if kind == "error" or event.get("error"):
            raise refusal(event.get("error") or event)
        match kind:
            case "response.output_text.delta":
                yield from self._text(event["delta"], event.get("logprobs"))
            case "response.refusal.delta":
                yield from self._refuse(event["delta"])
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                yield from self._think(event["delta"])
            case "response.reasoning_summary_part.added" if self._has_thought:
                yield ThinkingDelta("\n\n")
            case "response.output_item.added":
                yield from self._begin(event["output_index"], event["item"])
            case "response.function_call_arguments.delta":
                yield from self._arguments(event["output_index"], event["delta"])
            case "response.output_item.done":
                yield from self._whole_call(event["output_index"], event["item"])
                yield from self._sealed(event["item"])
            case "response.completed" | "response.incomplete" | "response.failed":
                yield from self._end(event["response"])

    def whole(self, answer: Mapping[str, Any]) -> Iterator[Delta]:
        for index, item in enumerate(answer.get("output") or ()):
            if item["type"] == "message":
                for part in item["content"]:
                    if part["type"] == "output_text":
                        yield from self._text(part.get("text"), part.get("logprobs"))
                    elif part["type"] == "refusal":
                        yield from self._refuse(part["refusal"])
            elif item["type"] == "reasoning":
                texts = [part["text"] for part in item.get("summary") or item.get("content") or ()]
                yield from self._think("\n\n".join(texts))
                yield from self._sealed(item)
            yield from self._whole_call(index, item)
        yield from self._end(answer)

    def _text(self, given: Any, scores: Any) -> Iterator[Delta]:
        text, scored = plain_text(given), self._scores.read(scores or ())
        if text or scored:
            yield TextDelta(text, scored)

    def _refuse(self, given: Any) -> Iterator[Delta]:
        if text := plain_text(given):
            self._refused = True
            yield TextDelta(text, refusal=True)

    def _think(self, text: Any) -> Iterator[Delta]:
        if plain_text(text):
            self._has_thought = True
            yield ThinkingDelta(text)

    def _sealed(self, item: Mapping[str, Any]) -> Iterator[Delta]:
        """The end of a thought that the API takes back."""
        if item["type"] == "reasoning" and (encrypted := plain_text(item.get("encrypted_content"))):
            self._has_thought = False
            content = {"id": item["id"], "summary": item.get("summary") or [], "encrypted_content": encrypted}
            yield ThinkingDelta(signature=seal(OpenAIResponses.name, self._model, content))

    def _begin(self, index: Any, item: Mapping[str, Any]) -> Iterator[Delta]:
        if item["type"] != "function_call":
            return
        name = item["name"]
        if type(index) is not int or index in self._calls or not isinstance(name, str) or not name:
            raise ValueError("a call without a number or a name of its own")
        yield from self._close()
        self._open, self._calls[index], self._has_arguments = index, len(self._calls), False
        yield CallDelta(self._calls[index], name)
        yield from self._arguments(index, item.get("arguments"))

    def _arguments(self, index: Any, given: Any) -> Iterator[Delta]:
        if index != self._open:
            raise ValueError("arguments of a call that is not open")
        if written := plain_text(given):
            self._has_arguments = True
            yield CallDelta(self._calls[index], arguments=written)

    def _whole_call(self, index: Any, item: Mapping[str, Any]) -> Iterator[Delta]:
        """One that is complete: it may have begun, and its arguments may have come."""
        if index not in self._calls:
            yield from self._begin(index, item)
        elif index == self._open and not self._has_arguments:
            yield from self._arguments(index, item.get("arguments"))
        if index == self._open:
            yield from self._close()

    def _close(self) -> Iterator[Delta]:
        """A call whose arguments are no text has none."""
        if self._open is not None and not self._has_arguments:
            yield CallDelta(self._calls[self._open], arguments="{}")
        self._open, self._has_arguments = None, True

    def _end(self, response: Mapping[str, Any]) -> Iterator[Delta]:
        if response.get("error"):
            raise refusal(response["error"])
        status, why = response["status"], (response.get("incomplete_details") or {}).get("reason")
        if status not in ("completed", "incomplete"):
            return
        yield from self._close()
        if self._refused or why == "content_filter":
            self.reason = "refusal"
        else:
            self.reason = "length" if status == "incomplete" else "tool_calls" if self._calls else "stop"
