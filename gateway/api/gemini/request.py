"""JSON bodies of the Gemini API into a Call. Pure."""

from __future__ import annotations

from typing import Any

from engine.protocol import Sampling
from gateway.api.call import Call
from gateway.api.choices import Choices
from gateway.api.gemini.contents import to_messages
from gateway.api.gemini.formats import wanted
from gateway.api.gemini.parameters import COUNT, GENERATE, MAX_CANDIDATES
from gateway.api.gemini.proto import read, under
from gateway.api.gemini.tools import strict, tool_use
from gateway.errors import BadRequestError, NotFoundError
from gateway.types import ChatPrompt


def model_name(written: str) -> str:
    """The name of a model as everybody else knows it: `models/x` is x. Raises NotFoundError for tuned models."""
    if written.startswith("tunedModels/"):
        raise NotFoundError(f"{written[:200]} is not found: there are no tuned models here.")
    return written.removeprefix("models/")


def parse_generate(model: str, body: dict[str, Any], *, stream: bool, max_answers: int) -> Call:
    """generateContent and streamGenerateContent. Raises BadRequestError with the path of what is wrong,
    UnsupportedError for what is not carried out."""
    return _call(model, read(body, GENERATE), stream=stream, max_answers=max_answers)


def parse_count(model: str, body: dict[str, Any]) -> Call:
    """countTokens: contents, or a whole request; never both."""
    values = read(body, COUNT)
    whole = values.pop("generateContentRequest", None)
    if whole is None:
        return _call(model, values, stream=False, max_answers=1)
    if values:
        raise BadRequestError("Either 'contents' or 'generateContentRequest' is expected, not both.", param="contents")
    return _call(model, whole, "generateContentRequest", stream=False, max_answers=MAX_CANDIDATES)


def _call(model: str, values: dict[str, Any], at: str = "", *, stream: bool, max_answers: int) -> Call:
    """`at` is the path of the checked values in the body."""
    if not values.get("contents"):
        where = under(at, "contents")
        raise BadRequestError(f"'{where}' is not specified.", param=where, code="missing_required_parameter")
    config, calling = values.get("generationConfig", {}), values.get("toolConfig", {})
    config_path = under(at, "generationConfig")
    declared = strict(values.get("tools", ()), calling)
    constraint, use = wanted(config, config_path), tool_use(declared, calling, under(at, "toolConfig"))
    if constraint is not None and use is not None:
        raise BadRequestError(
            "Function calling together with a responseMimeType that is not text/plain is not supported.",
            param=f"{config_path}.responseMimeType",
        )
    prompt = ChatPrompt(to_messages(values.get("systemInstruction"), values["contents"]), tools=declared)
    return Call(
        model=model,
        prompts=(prompt,),
        prompt_param="contents",
        sampling=_sampling(config, config_path),
        stop=tuple(config.get("stopSequences", ())),
        stream=stream,
        choices=_choices(config, config_path, max_answers),
        constraint=constraint,
        tool_use=use,
    )


def _sampling(config: dict[str, Any], path: str) -> Sampling:
    if "logprobs" in config and not config.get("responseLogprobs"):
        where = f"{path}.logprobs"
        raise BadRequestError(f"'{where}' is only allowed when responseLogprobs is true.", param=where)
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


def _choices(config: dict[str, Any], path: str, max_answers: int) -> Choices:
    n = config.get("candidateCount", 1)
    if n > max_answers:
        where = f"{path}.candidateCount"
        raise BadRequestError(
            f"'{where}': {n} are more than the {max_answers} answers that one request may ask for "
            "(server.max_prompts).",
            param=where,
        )
    return Choices(n, n)
