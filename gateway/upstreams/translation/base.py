"""A request as another API writes it, and that API's answer as events: what a form has to have. Pure.

    write   Request  -> the body that an upstream of this API is sent
    read    its answer, whole or event by event -> TextDelta, CallDelta, ThinkingDelta, why it ended

The client's dialect parses the request and writes the answer, as for an engine (api/); stage.py sends it, counts its
tokens and says what an error means. A form knows neither.

What a request asks for and the API has no field for is an UnsupportedError that names the field; what changes nothing
in the answer (caching hints, priority) is left out. Values that mean "as usual" are left out as well: several models
refuse any temperature, even their own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from mimetypes import MimeTypes
from typing import Any, ClassVar, Final, NamedTuple

import orjson

from engine.protocol import GrammarKind
from gateway.errors import UnsupportedError, UpstreamRefusedError
from gateway.types import (
    CachePrefix,
    ChatPrompt,
    Constraint,
    Delta,
    FinishReason,
    Media,
    Request,
    Tool,
    ToolUse,
)


class Written(NamedTuple):
    """A request to an upstream. `{model}` in the path stands for its name there; a body has it in `model`, if at all.

    query  of the URL, without `?`
    """

    path: str
    body: dict[str, Any]
    query: str = ""


class AnswerReader(ABC):
    """Reads one answer. `reason` and `stop` (the stop string that ended it) are there once it says so.

    Raises LookupError, TypeError, ValueError or AttributeError for what is no answer of this API, and
    UpstreamRefusedError for an error in the place of one.
    """

    reason: FinishReason | None = None
    stop: str | None = None

    @abstractmethod
    def event(self, event: Mapping[str, Any]) -> Iterator[Delta]:
        """The data of one event of a stream, parsed. `[DONE]` is none."""

    @abstractmethod
    def whole(self, answer: Mapping[str, Any]) -> Iterator[Delta]:
        """An answer that was not streamed."""


class Field(NamedTuple):
    """How an API writes what a request asks for.

    name         of its field, or the value that stands for it; empty: it is left out, as it changes nothing there
    least, most  bounds of a number, or of how many strings there may be
    """

    name: str
    least: float = -inf
    most: float = inf


LEFT_OUT: Final = Field("")

Table = Mapping[str, Field]
"""By the names of FIELDS. What is not in the table of an API is refused."""


class Form(ABC):
    """One API. `dialect` and `name` as `dialect` and `form` in the settings of upstreams; `title` in errors."""

    dialect: str
    name: str
    title: str
    table: ClassVar[Table]

    @abstractmethod
    def write(self, request: Request, model: str) -> Written:
        """`model`: its name at the upstream. Raises UnsupportedError for what this API has no field for."""

    @abstractmethod
    def reader(self, request: Request) -> AnswerReader:
        """For its answer."""

    def prefix(self, request: Request) -> CachePrefix | None:
        """Of what `write` makes of it, where the API has prefixes as resources of their own."""
        return None

    def fields(self, request: Request, chat: ChatPrompt) -> dict[str, Any]:
        """The fields that are written as they are, by their names in this API. Raises UnsupportedError for the first
        that it lacks, and for a value out of its bounds."""
        written: dict[str, Any] = {}
        for name, value, param in _asked(request, chat):
            field = self.table.get(name)
            if field is None:
                raise lacks(self.title, FIELDS[name] or f"parameter like `{name}`", param)
            number = value if isinstance(value, int | float) else len(value)
            if not field.least <= number <= field.most:
                raise lacks(self.title, _bound(field, number, name), param)
            if name in _PLAIN and field.name:
                written[field.name] = list(value) if name == "stop" else value
        return written


UNLIMITED: Final = 1 << 30
"""Tokens of an answer: a limit from here on says that there is none."""

MAX_ERROR_CHARS: Final = 2_000
"""Of what an upstream says is wrong, as clients are told."""

_TYPES: Final = MimeTypes()
MAX_ID: Final = 1024
"""Characters of the id of a call, where an API does not say."""

_MAX_DEPTH: Final = 64
"""Of objects inside of a request; parsers of several APIs stop at a hundred levels."""


def chat_of(request: Request, api: str) -> ChatPrompt:
    """Its prompt. Raises UnsupportedError for one that is no chat."""
    if not isinstance(request.prompt, ChatPrompt):
        raise lacks(api, "text that is continued as it is; send a chat", request.prompt_param)
    return request.prompt


def lacks(api: str, what: str, param: str | None) -> UnsupportedError:
    return UnsupportedError(f"This model is served by an API ({api}) that has no {what}.", param=param)


USUAL: Final[Mapping[str, Any]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": (),
    "stop_ids": (),
    "ignore_eos": False,
    "min_tokens": 0,
    "prompt_logprobs": None,
    "logprobs": None,
}
"""Of Sampling: values that change nothing."""

FIELDS: Final[Mapping[str, str]] = {
    "system": "",
    "messages": "",
    "calls": "",
    "results": "",
    "names": "",
    "image": "images",
    "image URL": "images by URL",
    "file": "files",
    "file URL": "files by URL",
    "audio": "sounds",
    "video": "films",
    "result image": "images and files in results of tools",
    "tools": "tools",
    "tool_choice": "choice of tools",
    "one call": "limit of one call",
    "strict": "strict tools",
    "json_object": "JSON mode without a schema",
    "json_schema": "such structured output",
    "grammar": "such structured output: it takes a JSON Schema",
    "thinking": "",
    "max_tokens": "",
    "stop": "stop strings",
    **dict.fromkeys(USUAL, ""),
    "prewarm": "way to compute a prompt without an answer",
    "prefill": "way to go on with a message of the assistant",
    "breakpoints": "",
}
"""All that a request may have, in the order of docs/translation.md -> what an API without it has not. The first five
are there in every API."""

_ANY_OBJECT: Final = frozenset(("true", "{}", '{"anyOf":[{"type":"object"},{"type":"array"}]}'))
"""Schemas without a form; the last is what clients of Gemini ask for without one."""

_PLAIN: Final = frozenset((*USUAL, "stop", "max_tokens"))
DROPPED: Final = frozenset((*USUAL, "stop"))
"""Without these an answer is still one to the request: `lossy = "drop"` leaves them out."""


def _asked(request: Request, chat: ChatPrompt) -> Iterator[tuple[str, Any, str | None]]:
    """What a request asks for besides its conversation: name in FIELDS, value, and what asked for it."""
    sampling, constraint = request.sampling, request.constraint
    if request.prewarm:
        yield "prewarm", True, "max_tokens"
    if request.thinking is not None:
        yield "thinking", True, "thinking"
    if not request.prewarm and 0 < sampling.max_tokens < UNLIMITED:
        yield "max_tokens", sampling.max_tokens, "max_tokens"
    for name, usual in USUAL.items():
        if (value := getattr(sampling, name)) != usual:
            yield name, value, name
    if request.stop:
        yield "stop", request.stop, "stop"
    if chat.continues:
        yield "prefill", True, request.prompt_param
    if chat.tools:
        yield from _asked_of_tools(chat.tools, request.tool_use)
    if constraint is not None:
        kind = kind_of(constraint)
        yield kind if kind in FIELDS else "grammar", True, constraint.param
    if chat.markers:
        yield "breakpoints", True, None
    for media in chat.media:
        yield from _asked_of_media(media, chat.messages[media.message])


def kind_of(constraint: Constraint) -> GrammarKind:
    """A schema that any object validates against is JSON mode, which the APIs have a field for."""
    grammar = constraint.grammar
    return "json_object" if grammar.kind == "json_schema" and grammar.text in _ANY_OBJECT else grammar.kind


def _asked_of_media(media: Media, message: Mapping[str, Any]) -> Iterator[tuple[str, Any, str | None]]:
    if message["role"] == "tool":
        yield "result image", True, media.path
    yield f"{media.kind} URL" if media.url and media.kind in ("image", "file") else media.kind, True, media.path


def _asked_of_tools(tools: Sequence[Tool], use: ToolUse | None) -> Iterator[tuple[str, Any, str | None]]:
    yield "tools", tools, "tools"
    if use is None or use.mode != "auto" or len(use.callable) < len(tools):
        yield "tool_choice", True, "tool_choice"
    if use is not None and not use.parallel:
        yield "one call", True, "tool_choice"
    if any(tool.strict for tool in tools):
        yield "strict", True, "tools"


def _bound(field: Field, number: float, name: str) -> str:
    if name == "stop":
        return f"more than {field.most} stop strings"
    return f"{name} below {field.least}" if number < field.least else f"{name} above {field.most}"


def without(request: Request, param: str | None) -> Request | None:
    """The request without what a form has refused; None for what must not be left out: then the answer would be no
    answer to it."""
    if param == "stop":
        return replace(request, stop=())
    if param is None or param not in DROPPED or getattr(request.sampling, param) == USUAL[param]:
        return None
    return replace(request, sampling=replace(request.sampling, **{param: USUAL[param]}))


def object_of(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is. None for any other, and for one nested too deeply to be written again."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inside = (inner for one in level for inner in (one.values() if isinstance(one, dict) else one))
        level = [inner for inner in inside if isinstance(inner, dict | list)]
    return None if level else value


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call in a message of a ChatPrompt. Empty for what is no object."""
    written = call["function"].get("arguments")
    if isinstance(written, str):
        written = object_of(written)
    return written if isinstance(written, dict) else {}


def arguments_text(call: Mapping[str, Any]) -> str:
    """The same as JSON text, as it was written where it was text."""
    written = call["function"].get("arguments")
    return written if isinstance(written, str) else orjson.dumps(written or {}).decode()


class Calls(NamedTuple):
    """The calls of a conversation under ids that an API takes, no two of them alike.

    ids      message and number of a call in it -> its id, made up where the client's API knows none
    results  number of each message that is a result -> id and name of the call that it answers; empty strings are what
             neither it nor a call says
    """

    ids: dict[tuple[int, int], str]
    results: dict[int, tuple[str, str]]


def calls_of(messages: Sequence[Mapping[str, Any]], most: int = MAX_ID, odd: re.Pattern[str] | None = None) -> Calls:
    """`most` characters of an id, none of them `odd`. A result without an id answers the first open call of its
    name."""
    calls = Calls({}, {})
    taken = set[str]()
    unanswered: list[tuple[str, str, str]] = []  # ids of the client and of the API, and names of their tools
    for at, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or ()):
            found, name = call.get("id"), call["function"]["name"]
            own = found if isinstance(found, str) and found else f"call_{at}_{number}"
            one = _id(own, most, odd)
            if one in taken:
                one = _id(f"{own} {at} {number}", 0, odd)
            taken.add(one)
            calls.ids[at, number] = one
            unanswered.append((own, one, name))
        if message["role"] == "tool":
            own, name = message.get("tool_call_id") or "", message.get("name") or ""
            answers = (one for one in unanswered if (one[0] == own if own else not name or one[2] == name))
            answered = next(answers, None)
            if answered is not None:
                unanswered.remove(answered)
            calls.results[at] = (_id(own, most, odd), name) if answered is None else answered[1:]
    return calls


def _id(own: str, most: int, odd: re.Pattern[str] | None) -> str:
    """As it is where an API takes it; else a hash of it, the same in a call and its result."""
    if len(own) <= most and (odd is None or not odd.search(own)):
        return own
    return f"call_{hashlib.sha256(own.encode(errors='surrogatepass')).hexdigest()[:24]}"


def num_instructions(messages: Sequence[Mapping[str, Any]]) -> int:
    """System messages that come before all others. 0 where there are no others: then they are what is answered."""
    return next((at for at, message in enumerate(messages) if message["role"] != "system"), 0)


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(content)


Place = tuple[int, int]
"""In a message: characters of its text, and how many of its media come before."""


def media_of(chat: ChatPrompt) -> dict[int, list[Media]]:
    """Number of each message that has some -> what it has, in order."""
    found: dict[int, list[Media]] = {}
    for one in chat.media:
        found.setdefault(one.message, []).append(one)
    return found


def pieces(text: str, media: Sequence[Media], cuts: Collection[Place] = ()) -> Iterator[tuple[str | Media, Place]]:
    """The content of a message in order, and where each piece of it ends. Texts are cut at these places, too; none of
    them is empty."""
    start = 0
    for number in range(len(media) + 1):
        end = media[number].chars if number < len(media) else len(text)
        for chars in [*sorted(chars for chars, before in cuts if before == number and start < chars < end), end]:
            if chars > start:
                yield text[start:chars], (chars, number)
            start = chars
        if number < len(media):
            yield media[number], (end, number + 1)


def data_url(media: Media) -> str:
    return f"data:{media.mime_type};base64,{media.data}"


def file_name(media: Media) -> str:
    """One that tells its type, where it has none."""
    return media.name or f"file{_TYPES.guess_extension(media.mime_type) or ''}"


def text_in(media: Media) -> str | None:
    """The text that a file is; None for any other."""
    if not media.data or not media.mime_type.startswith("text/"):
        return None
    try:
        return base64.b64decode(media.data).decode()
    except UnicodeDecodeError:
        return None


def lacks_media(api: str, media: Media, *, in_result: bool = False) -> UnsupportedError:
    """Of a type, or in a form, that the API does not have."""
    if not media.data and not media.url:
        return lacks(api, "file of this id: send its bytes", media.path)
    what = f"{media.kind} of type {media.mime_type}" if media.mime_type else media.kind
    form = f"{what} by URL" if media.url else what
    return lacks(api, f"{form}{' in results of tools' if in_result else ''}", media.path)


def string_of(value: Any) -> str:
    """A value of an answer. Raises TypeError for what is no string."""
    if not isinstance(value, str):
        raise TypeError("no string")
    return value


def refusal(message: Any, status: int) -> UpstreamRefusedError:
    """What an upstream says in the place of an answer. Raises TypeError for what is no message."""
    return UpstreamRefusedError(string_of(message)[:MAX_ERROR_CHARS], status)
