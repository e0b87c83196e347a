"""What an answer has to pass under the policy `cascade`, before the client gets any of it. Pure.

    schema   JSON of the schema that the request asks for, and calls of its own tools with arguments of theirs
    refusal  it is not empty, not marked as refused, and does not begin like a refusal in English
    logprob  the mean log probability of its tokens; without any it does not pass

Of JSON Schema what structured outputs are made of is checked: types, properties, items, enum, const, anyOf, allOf and
references inside of the schema. Other keywords say nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from gateway.api.facts import config_of
from gateway.api.replies import data, join_calls
from gateway.config import AliasSettings, CheckName
from gateway.errors import CheckFailedError
from gateway.types import CallDelta, Event, Replay, Request, TextDelta

_ODD: Final = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What reading an answer of others may raise."""

_REFUSAL: Final = re.compile(
    r"\W*(?:(?:(?:i['’]?m |i am )?(?:very |so |really )?sorry|unfortunately|as an ai[^.,]{0,60}),? (?:but )?)?"
    r"(?:i|we) (?:can(?:no|['’])?t|can not|am unable to|['’]?m unable to|am not able to|won['’]t|will not) "
    r"(?:help|assist|provide|comply|fulfill|answer|do that|discuss|create|generate|continue|support|share|engage)",
    re.IGNORECASE,
)

_REFUSED: Final = frozenset(
    ("refusal", "content_filter", "SAFETY", "RECITATION", "PROHIBITED_CONTENT", "BLOCKLIST", "SPII")
)
"""Why an answer ended that was refused, in all APIs."""

_MAX_DEPTH: Final = 64
"""Of a schema and its references; what is deeper passes."""


@dataclass(slots=True)
class Said:
    """What one answer, or several to one prompt, came to. Arguments of calls are text or objects."""

    texts: list[str] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    refused: bool = False
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Check:
    """The checks of an alias, for one request. `replay` reads what an upstream answers on its route."""

    alias: AliasSettings
    values: Mapping[str, Any]
    replay: Replay | None

    @property
    def reads_logprobs(self) -> bool:
        return "logprob" in self.alias.checks

    def asked(self, request: Request) -> Request:
        """The request, so that its answer can be checked."""
        sampling = request.sampling
        if self.reads_logprobs and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        return replace(request, sampling=sampling, check=None)

    def passed(self, events: Sequence[Event], request: Request) -> list[Event]:
        """The events of an answer to `asked(request)`, as the request wants them. Raises CheckFailedError."""
        deltas = [event for event in events if isinstance(event, TextDelta | CallDelta)]
        texts = [delta for delta in deltas if isinstance(delta, TextDelta)]
        said = Said(["".join(delta.text for delta in texts)])
        said.calls = [(call.name, call.arguments) for call in join_calls(deltas)]
        said.logprobs = [one.logprob for delta in texts for one in delta.scored]
        self._judge(said)
        if request.sampling.logprobs is not None:
            return list(events)
        plain = (replace(event, scored=()) if isinstance(event, TextDelta) else event for event in events)
        return [event for event in plain if not isinstance(event, TextDelta) or event.text]

    def check_body(self, body: bytes, *, is_stream: bool) -> None:
        """An upstream's answer as it came. Raises CheckFailedError, also for one that cannot be read."""
        try:
            if self.replay is None:
                raise TypeError("no answer to a chat")
            whole = self.replay.fold(body, usage=False) if is_stream else orjson.loads(body)
            if isinstance(whole, list):  # a stream of the Gemini API, without `alt=sse`
                whole = self.replay.fold(b"".join(map(data, whole)), usage=False)
            said = said_in(whole or {})
        except _ODD:
            raise CheckFailedError("unreadable") from None
        self._judge(said)

    def _judge(self, said: Said) -> None:
        for name in self.alias.checks:
            if not self._passes(name, said):
                raise CheckFailedError(name)

    def _passes(self, name: CheckName, said: Said) -> bool:
        match name:
            case "schema":
                return _has_form(said, wanted_form(self.values), tools_of(self.values))
            case "refusal":
                texts = [text for text in said.texts if text.strip()]
                return not said.refused and bool(texts or said.calls) and not any(map(_REFUSAL.match, texts))
            case "logprob":
                most = self.alias.min_mean_logprob or 0.0
                return bool(said.logprobs) and sum(said.logprobs) / len(said.logprobs) >= most


# -- answers ----------------------------------------------------------------------------------------------------------


def said_in(whole: Mapping[str, Any]) -> Said:
    """What a whole answer of any API says. Raises LookupError, TypeError or AttributeError for another value."""
    said = Said()
    if "choices" in whole:
        for choice in whole["choices"]:
            _read_choice(said, choice)
    elif "candidates" in whole or "promptFeedback" in whole:
        said.refused = bool((whole.get("promptFeedback") or {}).get("blockReason"))
        for candidate in whole.get("candidates") or ():
            said.refused |= candidate.get("finishReason") in _REFUSED
            _read_parts(said, (candidate.get("content") or {}).get("parts") or ())
    elif "output" in whole:
        said.refused = (whole.get("incomplete_details") or {}).get("reason") in _REFUSED
        for item in whole["output"]:
            _read_item(said, item)
    else:
        said.refused = whole.get("stop_reason") in _REFUSED
        _read_parts(said, whole["content"])
    return said


def _read_choice(said: Said, choice: Mapping[str, Any]) -> None:
    """Of the OpenAI API."""
    message = choice["message"]
    said.refused |= bool(message.get("refusal")) or choice.get("finish_reason") in _REFUSED
    said.texts.append(message.get("content") or "")
    for call in message.get("tool_calls") or ():
        if (function := call.get("function")) is not None:
            said.calls.append((function["name"], function["arguments"]))
    for one in (choice.get("logprobs") or {}).get("content") or ():
        said.logprobs.append(float(one["logprob"]))


def _read_item(said: Said, item: Mapping[str, Any]) -> None:
    """Of the Responses API."""
    if item["type"] == "function_call":
        said.calls.append((item["name"], item["arguments"]))
    for part in item["content"] if item["type"] == "message" else ():
        said.refused |= part["type"] == "refusal"
        said.texts.append(part.get("text") or "")
        said.logprobs += [float(one["logprob"]) for one in part.get("logprobs") or ()]


def _read_parts(said: Said, parts: Sequence[Mapping[str, Any]]) -> None:
    """Of the Anthropic and Gemini APIs: all texts are one."""
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str) and not part.get("thought")]
    said.texts.append("".join(texts))
    for part in parts:
        if part.get("type") == "tool_use":
            said.calls.append((part["name"], part["input"]))
        elif (call := part.get("functionCall")) is not None:
            said.calls.append((call["name"], call.get("args") or {}))


# -- schemas ----------------------------------------------------------------------------------------------------------


def wanted_form(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema that a request wants its answer to have, in any dialect; empty for any JSON, None for text."""
    config, text = config_of(values), values.get("text")
    output = values.get("output_config")
    formats = (values.get("response_format"), _in(text, "format"), _in(output, "format"), values.get("output_format"))
    for wanted in formats:
        if isinstance(wanted, dict) and wanted.get("type") in ("json_schema", "json_object"):
            schema = (wanted.get("json_schema") or wanted).get("schema")
            return schema if isinstance(schema, dict) else {}
    for name in ("responseJsonSchema", "response_json_schema", "responseSchema", "response_schema"):
        if isinstance(config.get(name), dict):
            return dict(config[name])
    is_json = "application/json" in (config.get("responseMimeType"), config.get("response_mime_type"))
    return {} if is_json else None


def tools_of(values: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Name -> schema of the arguments of each function that a request has, in any dialect."""
    tools = values.get("tools")
    return dict(_functions(tools)) if isinstance(tools, list) else {}


def _functions(tools: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for tool in tools:
        if not isinstance(tool, dict):
            continue
        declared = tool.get("functionDeclarations", tool.get("function_declarations"))
        for one in declared if isinstance(declared, list) else (_in(tool, "function") or tool,):
            if isinstance(one, dict) and isinstance(one.get("name"), str):
                names = ("parameters", "input_schema", "parametersJsonSchema", "parameters_json_schema")
                schemas = [one[name] for name in names if isinstance(one.get(name), dict)]
                yield one["name"], schemas[0] if schemas else {}


def _in(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _has_form(said: Said, form: Mapping[str, Any] | None, tools: Mapping[str, Mapping[str, Any]]) -> bool:
    try:
        for name, arguments in said.calls:
            value = orjson.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            schema = tools.get(name)
            if schema is None or not isinstance(value, dict) or not matches(value, schema):
                return False
        if form is None or said.calls:
            return True
        return bool(said.texts) and all(matches(orjson.loads(text), form) for text in said.texts)
    except _ODD:
        return False


def matches(value: Any, schema: Any, root: Any = None, depth: int = 0) -> bool:
    """Whether a value has a schema, as far as its keywords are known here."""
    root = schema if root is None else root
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return schema is not False
    if isinstance(ref := schema.get("$ref"), str) and not matches(value, _referred(root, ref), root, depth + 1):
        return False
    if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
        return False
    if not _has_type(value, schema) or not all(matches(value, one, root, depth + 1) for one in schema.get("allOf", ())):
        return False
    others = schema.get("anyOf", schema.get("oneOf"))
    if others is not None and not any(matches(value, one, root, depth + 1) for one in others):
        return False
    if isinstance(value, list):
        items = True if "prefixItems" in schema else schema.get("items", True)
        return all(matches(item, items, root, depth + 1) for item in value)
    return not isinstance(value, dict) or _has_members(value, schema, root, depth)


def _has_members(value: Mapping[str, Any], schema: Mapping[str, Any], root: Any, depth: int) -> bool:
    known = schema.get("properties") or {}
    others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    if any(name not in value for name in schema.get("required") or ()):
        return False
    return all(matches(item, known.get(name, others), root, depth + 1) for name, item in value.items())


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def _has_type(value: Any, schema: Mapping[str, Any]) -> bool:
    """Types of the Gemini API are in capitals, and `nullable` there."""
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else kinds or ()
    if not names or (value is None and schema.get("nullable")):
        return True
    return any(_is(value, str(name).lower()) for name in names)


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, _TYPES.get(name, (object,))) and not (
        name == "integer" and isinstance(value, float) and not value.is_integer()
    )


def _referred(root: Any, ref: str) -> Any:
    """What a reference inside of the schema is to; anything, for another."""
    found = root
    for part in ref.removeprefix("#").strip("/").split("/") if ref.startswith("#") else ():
        if part:
            found = found.get(part.replace("~1", "/").replace("~0", "~"), True) if isinstance(found, dict) else True
    return found if ref.startswith("#") else True
