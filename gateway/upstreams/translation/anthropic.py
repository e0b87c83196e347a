"""Anthropic messages as an upstream: POST /v1/messages. Pure.

    system           the system messages that come before all others; later ones are text of the user's turn, because
                     older models refuse the role in a conversation
    turns            messages of one side that follow each other are one turn, a user's with its tool results first;
                     texts of blanks alone, which this API refuses, are left out
    max_tokens       is required: DEFAULT_MAX_TOKENS where no limit was asked for
    thinking         adaptive, with an effort; older models, and others that speak this API, get a budget that leaves a
                     quarter of the limit to the answer. Left out where the API does not take it: with a forced tool,
                     behind calls that were made without a thought, and where less than MIN_BUDGET is left
    cache_control    from the breakpoints, 5 minutes or an hour; at most 4, and none of an hour behind one of 5 minutes
    media            images, PDFs, and files of text as bytes; names are titles. How closely to look cannot be said

Thoughts of earlier turns are there where this model is to think again, and had made them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import orjson

from engine.protocol import Sampling
from gateway.errors import BadRequestError, UpstreamRefusedError
from gateway.types import (
    MAX_BREAKPOINTS,
    CallDelta,
    ChatPrompt,
    Constraint,
    Delta,
    Marker,
    Media,
    Request,
    TextDelta,
    ThinkingDelta,
    ToolUse,
)
from gateway.upstreams.translation.base import (
    LEFT_OUT,
    AnswerReader,
    Calls,
    Field,
    Form,
    Table,
    Written,
    arguments_of,
    calls_of,
    chat_of,
    lacks,
    lacks_media,
    media_of,
    num_instructions,
    refusal,
    string_of,
    text_in,
    text_of,
)
from gateway.upstreams.translation.thoughts import BUDGETS, Thoughts, budget_of, effort_of, seal, thoughts_of

DEFAULT_MAX_TOKENS: Final = 4096
"""Every model of this API can write as many."""

MIN_BUDGET: Final = 1024
MIN_TOP_P: Final = 0.95
"""Of a model that thinks, which takes no temperature and no top_k either."""

_API: Final = "Anthropic messages"
_HOUR_FROM_S: Final = (300 + 3600) / 2
"""Times to live from here on are nearer to an hour than to 5 minutes."""
_ADAPTIVE: Final = re.compile(r"(.*/)?claude-(?!\d|instant|(opus|sonnet|haiku)-4(-[0-5])?(-\d{8}|-latest)?$)")
"""Models that take no budget of thoughts, or would rather have none: version 4.6 and later."""
_ODD_IN_IDS: Final = re.compile(r"[^a-zA-Z0-9_-]")
_STATUS: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
}
_IMAGES: Final = ("image/jpeg", "image/png", "image/gif", "image/webp")
_PDF: Final = "application/pdf"
_THOUGHTS: Final = ("thinking", "redacted_thinking")
_CUT: Final = ("max_tokens", "model_context_window_exceeded")

Block = dict[str, Any]


class AnthropicMessages(Form):
    dialect = "anthropic"
    name = "anthropic"
    title = _API
    table: ClassVar[Table] = {
        "system": Field("system"),
        "messages": Field("messages"),
        "calls": Field("tool_use"),
        "results": Field("tool_result"),
        "names": LEFT_OUT,
        "image": Field("image"),
        "image URL": Field("image"),
        "file": Field("document"),
        "file URL": Field("document"),
        "result image": Field("image"),
        "tools": Field("tools"),
        "tool_choice": Field("tool_choice"),
        "one call": Field("disable_parallel_tool_use"),
        "strict": Field("strict"),
        "json_schema": Field("output_config"),
        "thinking": Field("thinking"),
        "max_tokens": Field("max_tokens"),
        "stop": Field("stop_sequences"),
        "temperature": Field("temperature", most=1),
        "top_p": Field("top_p"),
        "top_k": Field("top_k"),
        "prewarm": Field("max_tokens"),
        "prefill": Field("messages"),
        "breakpoints": Field("cache_control"),
    }

    def write(self, request: Request, model: str) -> Written:
        chat, use = chat_of(request, _API), request.tool_use
        limit, asked = 0 if request.prewarm else DEFAULT_MAX_TOKENS, self.fields(request, chat)
        body: dict[str, Any] = {"model": model, "max_tokens": limit, **asked}
        if not all(map(str.strip, request.stop)):
            raise lacks(_API, "stop string of blanks alone", "stop")
        thinking, effort = _thinking(request, chat, model, limit=body["max_tokens"] if "max_tokens" in asked else None)
        own: Thoughts = {}
        if thinking is not None and thinking["type"] != "disabled":
            _check_thinking(request.sampling)
            own = thoughts_of(chat, self.name, request.model)
            if "max_tokens" not in asked:
                body["max_tokens"] += thinking.get("budget_tokens", MIN_BUDGET)
        tools = _tools(chat, use)
        system, turns = _conversation(chat, own)
        if not turns:
            raise BadRequestError(f"{_API} take no conversation without any text.", param=request.prompt_param)
        _settle([*tools, *system, *(block for turn in turns for block in turn["content"])])
        optional = {
            "system": system,
            "tools": tools,
            "tool_choice": None if not tools or request.prewarm else _choice(use),
            "thinking": thinking,
            "output_config": _output(request.constraint) | ({"effort": effort} if effort else {}),
            "stream": request.stream and not request.prewarm,
        }
        body |= {name: value for name, value in optional.items() if value}
        return Written("/v1/messages", {**body, "messages": turns})

    def reader(self, request: Request) -> AnswerReader:
        return _Reader(request.model)


def _conversation(chat: ChatPrompt, thoughts: Thoughts) -> tuple[list[Block], list[Block]]:
    """The blocks of `system`, and the turns."""
    instructions, calls = num_instructions(chat.messages), calls_of(chat.messages, odd=_ODD_IN_IDS)
    results = calls.results
    in_messages, media = [marker for marker in chat.markers if marker.tool is None], media_of(chat)
    system: list[Block] = []
    turns: list[Block] = []
    for at, message in enumerate(chat.messages):
        text, marked = text_of(message), [one for one in in_messages if one.message == at]
        if at in results:
            content = _content(text, media[at], ()) if at in media else text
            block = {"type": "tool_result", "tool_use_id": results[at][0], "content": content}
            blocks = [block | _control(marked)]
        else:
            blocks = [*_thoughts(thoughts.get((at, -1), ())), *_content(text, media.get(at, ()), marked)]
            if "tool_calls" in message:
                blocks += _uses(message, at, calls, marked, thoughts)
            while blocks and blocks[-1]["type"] in _THOUGHTS:  # none may end a turn
                blocks.pop()
        if at < instructions:
            system += blocks
        elif blocks:
            role = "assistant" if message["role"] == "assistant" else "user"
            if not turns or turns[-1]["role"] != role:
                turns.append({"role": role, "content": []})
            turns[-1]["content"] += blocks
    for turn in turns if results else ():
        turn["content"].sort(key=lambda block: block["type"] != "tool_result")
    return system, turns


def _content(text: str, media: Sequence[Media], marked: Sequence[Marker]) -> list[Block]:
    """Texts and media in their order. A mark is on what it is behind."""
    blocks, start = list[Block](), 0
    for number in range(len(media) + 1):
        end = media[number].chars if number < len(media) else len(text)
        here = [one for one in marked if one.call is None and one.media == number] if media else marked
        if number:
            blocks.append(_medium(media[number - 1]) | _control([one for one in here if one.chars == start]))
        in_text = [replace(one, chars=one.chars - start) for one in here if one.chars > start] if start else here
        blocks += _texts(text[start:end], in_text)
        start = end
    return blocks


def _medium(media: Media) -> Block:
    title = {"title": media.name} if media.name else {}
    if media.kind == "image" and (media.mime_type in _IMAGES or (media.url and not media.mime_type)):
        return {"type": "image", "source": _source(media)}
    if media.kind == "file" and media.mime_type in (_PDF, "") and (media.data or media.url):
        return {"type": "document", "source": _source(media), **title}
    if (text := text_in(media)) is not None and text.strip():
        return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}, **title}
    raise lacks_media(_API, media)


def _source(media: Media) -> Block:
    if media.url:
        return {"type": "url", "url": media.url}
    return {"type": "base64", "media_type": media.mime_type, "data": media.data}


def _texts(text: str, marked: Sequence[Marker]) -> list[Block]:
    """A text in blocks that end where it is marked, none of them blank."""
    blocks: list[Block] = []
    start = 0
    for marker in sorted(marked, key=lambda one: one.chars) if marked else ():
        end = marker.chars if text[marker.chars :].strip() else len(text)
        if marker.call is None and text[start:end].strip():
            blocks.append({"type": "text", "text": text[start:end], **_control([marker])})
            start = end
    if (rest := text[start:]) and not rest.isspace():
        blocks.append({"type": "text", "text": rest})
    return blocks


def _thoughts(own: Iterable[Block]) -> Iterator[Block]:
    for content in own:
        match content:
            case {"thinking": str(text), "signature": str(signature)}:
                yield {"type": "thinking", "thinking": text, "signature": signature}
            case {"data": str(data)}:
                yield {"type": "redacted_thinking", "data": data}


def _uses(
    message: Mapping[str, Any], at: int, calls: Calls, marked: Sequence[Marker], thoughts: Thoughts
) -> Iterator[Block]:
    for number, call in enumerate(message.get("tool_calls") or ()):
        yield from _thoughts(thoughts.get((at, number), ()))
        block = {"type": "tool_use", "id": calls.ids[at, number], "name": call["function"]["name"]}
        yield {**block, "input": arguments_of(call), **_control([one for one in marked if one.call == number])}


def _tools(chat: ChatPrompt, use: ToolUse | None) -> list[Block]:
    """Those that may be called; all, where none may. A marker behind one that is left out is behind the one before."""
    callable_names = {tool.name for tool in (chat.tools if use is None else use.callable)}
    tools: list[Block] = []
    for number, tool in enumerate(chat.tools):
        if tool.name in callable_names:
            schema = {"type": "object", "properties": {}, **(tool.parameters or {})}
            tools.append({"name": tool.name, "input_schema": schema})
            tools[-1] |= {"description": tool.description} if tool.description else {}
            tools[-1] |= {"strict": True} if tool.strict else {}
        if tools:
            tools[-1] |= _control([marker for marker in chat.markers if marker.tool == number])
    return tools


def _choice(use: ToolUse | None) -> Block | None:
    if use is None:
        return {"type": "none"}
    if use.mode == "auto":
        choice: Block = {"type": "auto"}
    elif len(use.callable) == 1:
        choice = {"type": "tool", "name": use.callable[0].name}
    else:
        choice = {"type": "any"}
    if not use.parallel:
        choice["disable_parallel_tool_use"] = True
    return None if choice == {"type": "auto"} else choice


def _thinking(request: Request, chat: ChatPrompt, model: str, limit: int | None) -> tuple[Block | None, str | None]:
    """How the model is to think, and with which effort it works. `limit` of tokens, if there is one."""
    thinking, use = request.thinking, request.tool_use
    if thinking is None or request.prewarm:
        return None, None
    is_adaptive, effort = _ADAPTIVE.match(model) is not None, effort_of(thinking)
    if not thinking.is_on:
        return ({"type": "disabled"} if is_adaptive else None), None
    if use is not None and use.mode == "required":
        return None, None
    if is_adaptive:
        display = "summarized" if thinking.shown else "omitted"
        return {"type": "adaptive", "display": display}, "low" if effort == "minimal" else effort
    budget = max(budget_of(thinking) or BUDGETS["medium"], MIN_BUDGET)
    if limit is not None and budget >= limit:
        budget = limit * 3 // 4
    if budget < MIN_BUDGET or _calls_without_thought(chat, request.model):
        return None, None
    return {"type": "enabled", "budget_tokens": budget}, None


def _check_thinking(sampling: Sampling) -> None:
    """Raises UnsupportedError for what a model that thinks does not take."""
    for name, taken in (
        ("temperature", sampling.temperature == 1),
        ("top_p", sampling.top_p >= MIN_TOP_P),
        ("top_k", not sampling.top_k),
    ):
        if not taken:
            raise lacks(_API, f"such `{name}` together with thoughts", name)


def _calls_without_thought(chat: ChatPrompt, model: str) -> bool:
    """Whether the turn that goes on here has begun with something else than a thought of this model."""
    users = (at for at, message in enumerate(chat.messages) if message["role"] not in ("assistant", "tool"))
    begin = max(users, default=-1) + 1
    calls = [at for at in range(begin, len(chat.messages)) if chat.messages[at].get("tool_calls")]
    if not calls:
        return False
    at, own = calls[0], thoughts_of(chat, AnthropicMessages.name, model)
    return (at, -1) not in own and ((at, 0) not in own or bool(text_of(chat.messages[at])))


def _output(constraint: Constraint | None) -> Block:
    if constraint is None:
        return {}
    schema = orjson.loads(constraint.grammar.text)
    if not isinstance(schema, dict):
        raise lacks(_API, "such structured output: it takes a JSON Schema that is an object", constraint.param)
    return {"format": {"type": "json_schema", "schema": schema}}


def _control(marked: Sequence[Marker]) -> Block:
    """For a block that ends at these."""
    if not marked:
        return {}
    hour = max(marker.ttl_s for marker in marked) >= _HOUR_FROM_S
    return {"cache_control": {"type": "ephemeral", "ttl": "1h"} if hour else {"type": "ephemeral"}}


def _settle(blocks: Sequence[Block]) -> None:
    """Keeps the last 4 marks. One of 5 minutes before one of an hour is of an hour as well, which costs no more: all
    before a mark is written for its time."""
    marked = [block for block in blocks if "cache_control" in block]
    for block in marked[:-MAX_BREAKPOINTS]:
        del block["cache_control"]
    kept = [block["cache_control"] for block in marked[-MAX_BREAKPOINTS:]]
    hours = [number for number, control in enumerate(kept) if "ttl" in control]
    for control in kept[: hours[-1] if hours else 0]:
        control["ttl"] = "1h"


class _Reader(AnswerReader):
    """Blocks other than texts, calls and thoughts are passed over: tools that the upstream runs itself."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._thought: dict[str, list[str]] | None = None  # fields of the block of a thought that is open
        self._calls: dict[int, int] = {}  # number of a block -> of its call
        self._open: int | None = None  # block of the call whose arguments come
        self._input: Mapping[str, Any] | None = None  # its arguments, as long as no text of them came
        self._has_text = False

    def event(self, event: Mapping[str, Any]) -> Iterator[Delta]:
        if event.get("type") == "content_block_delta":  # as nearly all are
            return self._delta(event["index"], event["delta"])
        return self._event(event)

    def _event(self, event: Mapping[str, Any]) -> Iterator[Delta]:
        match event.get("type"):
            case "content_block_start":
                yield from self._close()
                yield from self._begin(event["index"], event["content_block"])
            case "content_block_stop" if self._thought is not None or event["index"] == self._open:
                yield from self._close()
            case "message_delta":
                yield from self._close()
                yield from self._end(event["delta"])
            case "error":
                raise _refusal(event)

    def whole(self, answer: Mapping[str, Any]) -> Iterator[Delta]:
        if answer.get("type") == "error":
            raise _refusal(answer)
        for index, block in enumerate(answer["content"]):
            yield from self._begin(index, block)
            yield from self._close()
        yield from self._end(answer)

    def _begin(self, index: int, block: Mapping[str, Any]) -> Iterator[Delta]:
        if block["type"] == "text":
            yield from self._text(block["text"])
        elif block["type"] == "thinking":
            self._thought = {"thinking": [], "signature": []}
            yield from self._think("thinking", block.get("thinking"))
            yield from self._think("signature", block.get("signature"))
        elif block["type"] == "redacted_thinking":
            yield self._sealed({"data": string_of(block["data"])})
        elif block["type"] == "tool_use":
            if type(index) is not int or index in self._calls:
                raise ValueError("a block without a number of its own")
            self._open, self._input = index, block.get("input") or {}
            self._calls[index] = len(self._calls)
            if not isinstance(self._input, dict) or not block["name"]:
                raise TypeError("a call without a name, or with arguments that are no object")
            yield CallDelta(self._calls[index], string_of(block["name"]))

    def _delta(self, index: int, delta: Mapping[str, Any]) -> Iterator[Delta]:
        if delta["type"] == "text_delta":
            if text := string_of(delta["text"]):
                self._has_text = True
                yield TextDelta(text)
        elif delta["type"] in ("thinking_delta", "signature_delta") and self._thought is not None:
            name = delta["type"].removesuffix("_delta")
            yield from self._think(name, delta[name])
        elif delta["type"] == "input_json_delta" and index in self._calls:
            if index != self._open:
                raise ValueError("arguments of a call that has ended")
            if written := string_of(delta["partial_json"]):
                self._input = None
                yield CallDelta(self._calls[index], arguments=written)

    def _text(self, text: Any) -> Iterator[Delta]:
        if string_of(text):
            self._has_text = True
            yield TextDelta(text)

    def _think(self, name: str, text: Any) -> Iterator[Delta]:
        """A chunk of a thought, or of its signature."""
        if text and self._thought is not None:
            self._thought[name].append(string_of(text))
            if name == "thinking":
                yield ThinkingDelta(text)

    def _sealed(self, content: Block) -> ThinkingDelta:
        return ThinkingDelta(signature=seal(AnthropicMessages.name, self._model, content))

    def _close(self) -> Iterator[Delta]:
        """Ends the call that is open: without any text of its arguments, they are those that it began with. Ends a
        thought; one without a signature does not come back."""
        if self._thought is not None:
            content = {name: "".join(texts) for name, texts in self._thought.items()}
            self._thought = None
            if content["signature"]:
                yield self._sealed(content)
        if self._open is not None and self._input is not None:
            yield CallDelta(self._calls[self._open], arguments=orjson.dumps(self._input).decode())
        self._open = None

    def _end(self, message: Mapping[str, Any]) -> Iterator[Delta]:
        """A refusal says why, where it has begun with nothing else."""
        if (why := message.get("stop_reason")) is None:
            return
        explained = (message.get("stop_details") or {}).get("explanation")
        if why == "refusal" and explained and not self._has_text:
            yield TextDelta(string_of(explained), refusal=True)
        if why == "stop_sequence" and isinstance(stop := message.get("stop_sequence"), str):
            self.stop = stop
        called = self._calls and why != "stop_sequence"
        self.reason = "length" if why in _CUT else "tool_calls" if called else "stop"
        if why == "refusal":
            self.reason = "refusal"


def _refusal(event: Mapping[str, Any]) -> UpstreamRefusedError:
    error = event["error"]
    return refusal(error["message"], _STATUS.get(error.get("type"), 500))
