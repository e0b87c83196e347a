"""JSON bodies of the Gemini API into a Call. Pure."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from engine.protocol import Sampling
from gateway.api.call import MAX_PROMPTS, Call, Choices, take_thoughts
from gateway.api.constraints import constraint, json_schema
from gateway.api.fields import an_object, invalid, missing
from gateway.api.gemini.contents import to_messages
from gateway.api.gemini.parameters import COUNT, GENERATE
from gateway.api.gemini.proto import read
from gateway.api.gemini.tools import strict, tool_use
from gateway.errors import NotFoundError
from gateway.types import ChatPrompt, Constraint, Effort, Marker, Thinking


def model_name(written: str) -> str:
    """The name of a model without its collection: `models/x` is x. Raises NotFoundError for tuned models."""
    if written.startswith("tunedModels/"):
        raise NotFoundError(f"{written[:200]} is not found: there are no tuned models here.")
    return written.removeprefix("models/")


class CachedPrefix(NamedTuple):
    """A cached content that a request names: its checked values, and the breakpoint at its end."""

    values: dict[str, Any]
    marker: Marker


def parse_generate(body: dict[str, Any]) -> dict[str, Any]:
    """The checked values of generateContent and streamGenerateContent. Raises BadRequestError with the path of what is
    wrong, UnsupportedError for what is not carried out."""
    return _with_contents(read(body, GENERATE))


def parse_count(body: dict[str, Any]) -> dict[str, Any]:
    """The same of countTokens: contents, or a whole request; never both."""
    values = read(body, COUNT)
    whole = values.pop("generateContentRequest", None)
    if whole is not None and values:
        raise invalid("contents", "it is there besides 'generateContentRequest'")
    return _with_contents(values if whole is None else whole)


def _with_contents(values: dict[str, Any]) -> dict[str, Any]:
    if not values.get("contents"):
        raise missing("contents")
    return values


def to_call(
    model: str,
    values: dict[str, Any],
    cached: CachedPrefix | None = None,
    *,
    stream: bool = False,
    max_answers: int = MAX_PROMPTS,
) -> Call:
    """Of checked values. Raises BadRequestError for what makes no sense together."""
    if cached is not None:
        values = _behind(cached.values, values)
    config, calling = values.get("generationConfig", {}), values.get("toolConfig", {})
    declared = strict(values.get("tools", ()), calling)
    constraint, use = wanted(config, "generationConfig"), tool_use(declared, calling, "toolConfig")
    if constraint is not None and use is not None:
        raise invalid("generationConfig.responseMimeType", "together with function calling only text/plain is possible")
    if (n := config.get("candidateCount", 1)) > max_answers:
        raise invalid("generationConfig.candidateCount", f"one request may ask for {max_answers} answers")
    messages, media = to_messages(values.get("systemInstruction"), values["contents"])
    markers = () if cached is None else (cached.marker,)
    thoughts = take_thoughts(messages)
    prompt = ChatPrompt(messages, markers=markers, tools=declared, media=tuple(media), thoughts=thoughts)
    return Call(
        model=model,
        prompts=(prompt,),
        prompt_param="contents",
        sampling=_sampling(config),
        stop=tuple(config.get("stopSequences", ())),
        stream=stream,
        choices=Choices(n, n),
        constraint=constraint,
        tool_use=use,
        thinking=_thinking(config.get("thinkingConfig")),
    )


def _behind(cached: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A request behind a cached content. Raises BadRequestError for what only the cached content may have."""
    for name in ("systemInstruction", "tools", "toolConfig"):
        if name in values:
            why = "CachedContent can not be used with a request that sets systemInstruction, tools or toolConfig"
            raise invalid(name, f"{why}: they belong into the cached content")
    return {**values, **cached, "contents": [*cached.get("contents", ()), *values["contents"]]}


def _sampling(config: dict[str, Any]) -> Sampling:
    if "logprobs" in config and not config.get("responseLogprobs"):
        raise invalid("generationConfig.logprobs", "it is only allowed when responseLogprobs is true")
    return Sampling(
        max_tokens=config.get("maxOutputTokens", 0),
        temperature=config.get("temperature", 1.0),
        top_p=config.get("topP", 1.0),
        top_k=config.get("topK", 0),
        seed=config.get("seed"),
        presence_penalty=config.get("presencePenalty", 0.0),
        frequency_penalty=config.get("frequencyPenalty", 0.0),
        logprobs=config.get("logprobs", 0) if config.get("responseLogprobs") else None,
    )


_LEVELS: Final[dict[str, Effort]] = {
    "MINIMAL": "minimal",
    "LOW": "low",
    "MEDIUM": "medium",
    "HIGH": "high",
    "XHIGH": "xhigh",
}


def _thinking(config: dict[str, Any] | None) -> Thinking | None:
    """A budget of -1, or a level that is not known, leaves it to the model."""
    if config is None:
        return None
    budget, shown = config.get("thinkingBudget", -1), config.get("includeThoughts", False)
    if budget == 0:
        return Thinking("none", shown=False)
    return Thinking(_LEVELS.get(config.get("thinkingLevel", "").upper()), budget if budget > 0 else None, shown=shown)


_ANY_JSON: Final = {"anyOf": [{"type": "object"}, {"type": "array"}]}


def wanted(config: dict[str, Any], path: str) -> Constraint | None:
    """None for plain text. `config` is a checked generationConfig. Raises BadRequestError for a schema without the
    type of answer that it belongs to."""
    kind = config.get("responseMimeType", "text/plain")
    schemas = [name for name in ("responseSchema", "responseJsonSchema") if name in config]
    if len(schemas) > 1:
        raise invalid(f"{path}.responseJsonSchema", "it is there besides 'responseSchema'")
    if kind == "text/plain":
        if schemas:
            raise invalid(f"{path}.responseMimeType", f"application/json is expected for a {schemas[0]}")
        return None
    if kind == "text/x.enum":
        return _one_of(config, path)
    if not schemas:
        return json_schema(_ANY_JSON, f"{path}.responseMimeType")
    where = f"{path}.{schemas[0]}"
    return json_schema(an_object(config[schemas[0]], where), where)


def _one_of(config: dict[str, Any], path: str) -> Constraint:
    """One of the values of an enum, as plain text."""
    name = "responseJsonSchema" if "responseJsonSchema" in config else "responseSchema"
    found, where = config.get(name), f"{path}.{name}"
    values = found.get("enum") if type(found) is dict else None
    if type(values) is not list or not values or any(type(value) is not str for value in values):
        raise invalid(where, "an enum of strings is expected for text/x.enum")
    return constraint("regex", "|".join(re.escape(value) for value in values), where)
