"""A request as another API writes it, and that API's answer as events: what a form has to have. Pure.

    write   Request  -> the body that an upstream of this API is sent
    read    its answer, whole or event by event -> TextDelta, CallDelta, why it ended

The client's dialect parses the request and writes the answer, as for an engine (api/); stage.py sends it, counts its
tokens and says what an error means. A form knows neither.

What a request asks for and the API has no field for is an UnsupportedError that names the field; what changes nothing
in the answer (caching hints, priority) is left out. Values that mean "as usual" are left out as well: several models
refuse any temperature, even their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import orjson

from gateway.errors import UnsupportedError, UpstreamRefusedError
from gateway.types import CallDelta, ChatPrompt, FinishReason, Request, TextDelta

Delta = TextDelta | CallDelta


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


class Form(ABC):
    """One API. `dialect` and `name` as `dialect` and `form` in the settings of upstreams."""

    dialect: str
    name: str

    @abstractmethod
    def write(self, request: Request, model: str) -> Written:
        """`model`: its name at the upstream. Raises UnsupportedError for what this API has no field for."""

    @abstractmethod
    def reader(self, request: Request) -> AnswerReader:
        """For its answer."""


UNLIMITED: Final = 1 << 30
"""Tokens of an answer: a limit from here on says that there is none."""

MAX_ERROR_CHARS: Final = 2_000
"""Of what an upstream says is wrong, as clients are told."""

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


def check_sampling(request: Request, api: str, takes: frozenset[str]) -> None:
    """Raises UnsupportedError for the first parameter that would change the answer and is not among those that the API
    takes, by their names in Sampling."""
    for name, value in USUAL.items():
        if name not in takes and getattr(request.sampling, name) != value:
            raise lacks(api, f"parameter like `{name}`", name)


def without(request: Request, param: str | None) -> Request | None:
    """The request without what a form has refused; None for what must not be left out: then the answer would be no
    answer to it."""
    if param == "stop":
        return replace(request, stop=())
    usual = {**USUAL, "temperature": 1.0}
    if param is None or param not in usual or getattr(request.sampling, param) == usual[param]:
        return None
    return replace(request, sampling=replace(request.sampling, **{param: usual[param]}))


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


def call_id(call: Mapping[str, Any], message: int, number: int) -> str:
    """The id of a call, made up where the client's API knows none: the same in the call and in its result."""
    found = call.get("id")
    return found if isinstance(found, str) and found else f"call_{message}_{number}"


def results_of(messages: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, str]]:
    """Number of each message that is a result -> id and name of the call that it answers. One without an id answers the
    first open call of its name. Empty strings are what neither it nor a call says."""
    answered: dict[int, tuple[str, str]] = {}
    unanswered: dict[str, str] = {}  # ids of calls -> names of their tools
    for at, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or ()):
            unanswered[call_id(call, at, number)] = call["function"]["name"]
        if message["role"] == "tool":
            name = message.get("name") or ""
            of_name = (one for one, called in unanswered.items() if not name or called == name)
            one = message.get("tool_call_id") or next(of_name, "")
            answered[at] = one, unanswered.pop(one, name)
    return answered


def num_instructions(messages: Sequence[Mapping[str, Any]]) -> int:
    """System messages that come before all others. 0 where there are no others: then they are what is answered."""
    return next((at for at, message in enumerate(messages) if message["role"] != "system"), 0)


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(content)


def string_of(value: Any) -> str:
    """A value of an answer. Raises TypeError for what is no string."""
    if not isinstance(value, str):
        raise TypeError("no string")
    return value


def refusal(message: Any, status: int) -> UpstreamRefusedError:
    """What an upstream says in the place of an answer. Raises TypeError for what is no message."""
    return UpstreamRefusedError(string_of(message)[:MAX_ERROR_CHARS], status)
