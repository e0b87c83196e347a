"""JSON bodies of chats and completions of the OpenAI API into a Call. Pure."""

from __future__ import annotations

from array import array
from dataclasses import fields, replace
from typing import Any

from engine.protocol import Sampling
from gateway.api.cache_control import from_body
from gateway.api.call import MAX_PROMPTS, NEW_DOCUMENT, Call
from gateway.api.choices import Choices
from gateway.api.fields import array_too_long, empty_array, read, wrong_type
from gateway.api.openai.caching import NO_BREAKPOINTS, Caching, read_caching
from gateway.api.openai.parameters import CHAT, COMPLETION, TOKEN_ID_MAX
from gateway.api.openai.tools import read_chat_tools
from gateway.api.tiers import OPENAI_TIERS
from gateway.config import LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import ChatPrompt, Constraint, Prompt, PromptParam, TextPrompt, TokenPrompt, ToolUse

DEFAULT_COMPLETION_TOKENS = 16
_SAMPLING = tuple(one.name for one in fields(Sampling))
_CONSTRAINTS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def parse_chat(body: dict[str, Any], leases: LeaseSettings, max_answers: int = MAX_PROMPTS) -> Call:
    """Raises BadRequestError with the path of what is wrong, UnsupportedError for what is not carried out."""
    values = read(body, CHAT, required=("model", "messages"))
    if "max_tokens" in values and "max_completion_tokens" in values:
        raise BadRequestError(
            "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.",
            param="max_tokens",
            code="invalid_parameter_combination",
        )
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise BadRequestError(
            "Invalid value for 'top_logprobs': it is only allowed when 'logprobs' is true.",
            param="top_logprobs",
            code="invalid_value",
        )
    logprobs = values.get("top_logprobs", 0) if values.get("logprobs") else None
    max_tokens = values.get("max_completion_tokens", values.get("max_tokens", 0))
    caching = read_caching(body["messages"], values.get("prompt_cache_options"), leases)
    tools, use = read_chat_tools(values)
    if use is not None and use.mode == "required" and values.get("ignore_eos"):
        raise _together("tool_choice", "ignore_eos")
    prompt = ChatPrompt(values["messages"], markers=caching.markers, tools=tools)
    choices = _choices(values, 1, max_answers)
    return _call(values, (prompt,), "messages", max_tokens, logprobs, choices, tool_use=use, caching=caching)


def parse_completion(body: dict[str, Any], max_prompts: int = MAX_PROMPTS) -> Call:
    """As parse_chat. Prompts keep their order. `max_prompts` also limits the answers to all of them together."""
    values = read(body, COMPLETION, required=("model",))
    prompts = _prompts(values.get("prompt"), max_prompts)
    max_tokens = values.get("max_tokens", DEFAULT_COMPLETION_TOKENS)
    logprobs = values.get("logprobs")
    choices = _choices(values, len(prompts), max_prompts)
    call = _call(values, prompts, "prompt", max_tokens, logprobs, choices)
    if logprobs is not None and values.get("echo"):  # what is reused from the cache has no logits
        call = replace(call, sampling=replace(call.sampling, prompt_logprobs=logprobs), use_cache=False)
    return call


def _call(
    values: dict[str, Any],
    prompts: tuple[Prompt, ...],
    param: PromptParam,
    max_tokens: int,
    logprobs: int | None,
    choices: Choices,
    *,
    tool_use: ToolUse | None = None,
    caching: Caching = NO_BREAKPOINTS,
) -> Call:
    stream = values.get("stream", False)
    options = values.get("stream_options")
    if options is not None and not stream:
        raise BadRequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
            code="invalid_value",
        )
    check_min_tokens(values, max_tokens, unlimited=param != "prompt")
    sampling = read_sampling(values, max_tokens, logprobs)
    return Call(
        model=values["model"],
        prompts=prompts,
        prompt_param=param,
        sampling=sampling,
        stop=values.get("stop", ()),
        stream=stream,
        include_usage=bool(options and options.get("include_usage")),
        choices=choices,
        tool_use=tool_use,
        use_cache=caching.use_cache,
        only_leased=caching.only_leased,
        echo=values.get("echo", False),
        prewarm=param == "prompt" and max_tokens == 0,
        constraint=_constraint(values),
        cache_key=values.get("prompt_cache_key", ""),
        cache_salt=values.get("cache_salt", ""),
        tier=OPENAI_TIERS[values.get("service_tier", "auto")],
        priority=values.get("priority", 0),
        reuse=from_body(values.get("cache", {})),
    )


def read_sampling(values: dict[str, Any], max_tokens: int, logprobs: int | None) -> Sampling:
    """`values` as parameters.py has checked them."""
    sampling = {name: values[name] for name in _SAMPLING if name in values}
    return Sampling(
        **sampling
        | {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "top_k": max(values.get("top_k", 0), 0),
            "stop_ids": values.get("stop_token_ids", ()),
        }
    )


def check_min_tokens(values: dict[str, Any], max_tokens: int, *, unlimited: bool) -> None:
    """Raises BadRequestError. `unlimited`: no max_tokens is no limit."""
    min_tokens = values.get("min_tokens", 0)
    if (max_tokens or not unlimited) and min_tokens > max_tokens:
        raise BadRequestError(
            f"Invalid 'min_tokens': {min_tokens} is more than the {max_tokens} tokens that are generated at most.",
            param="min_tokens",
            code="invalid_value",
        )


def _constraint(values: dict[str, Any]) -> Constraint | None:
    """What the text has to be. At most one parameter may ask for something, and not for more than that."""
    asked = [name for name in _CONSTRAINTS if values.get(name) is not None]
    if len(asked) > 1:
        raise _together(asked[0], asked[1])
    if asked and values.get("ignore_eos"):
        raise _together(asked[0], "ignore_eos")
    constraint: Constraint | None = values[asked[0]] if asked else None
    return constraint


def _together(one: str, other: str) -> BadRequestError:
    return BadRequestError(
        f"Setting '{one}' and '{other}' at the same time is not supported.",
        param=other,
        code="invalid_parameter_combination",
    )


def _choices(values: dict[str, Any], num_prompts: int, max_answers: int) -> Choices:
    n = values.get("n", 1)
    choices = Choices(n, values.get("best_of", n))
    if choices.best_of < n:
        raise BadRequestError(
            f"Invalid 'best_of': {choices.best_of} answers are fewer than 'n', which is {n}.",
            param="best_of",
            code="invalid_value",
        )
    if choices.ranked and values.get("stream"):
        raise BadRequestError(
            "Invalid 'best_of': more answers than 'n' cannot be streamed.", param="best_of", code="invalid_value"
        )
    if num_prompts * choices.best_of > max_answers:
        raise BadRequestError(
            f"Invalid 'n': {choices.best_of} answers to {num_prompts} prompts are more than the {max_answers} answers "
            "that one request may ask for.",
            param="n",
            code="integer_above_max_value",
        )
    return choices


def _prompts(value: Any, max_prompts: int) -> tuple[Prompt, ...]:
    if value is None or value == "":
        return (NEW_DOCUMENT,)
    if type(value) is str:
        return (TextPrompt(value),)
    if type(value) is not list:
        raise wrong_type("prompt", "a string or an array", value)
    if not value:
        raise empty_array("prompt")
    if type(value[0]) in (int, float):
        return (_tokens(value, "prompt"),)
    if len(value) > max_prompts:
        raise array_too_long("prompt", max_prompts, len(value))
    if type(value[0]) is str:
        return tuple(_text(item, f"prompt[{index}]") for index, item in enumerate(value))
    return tuple(_tokens(item, f"prompt[{index}]") for index, item in enumerate(value))


def _text(item: Any, path: str) -> Prompt:
    if type(item) is not str:
        raise wrong_type(path, "a string", item)
    return TextPrompt(item) if item else NEW_DOCUMENT


def _tokens(value: Any, path: str) -> TokenPrompt:
    if type(value) is not list:
        raise wrong_type(path, "a string or an array of token ids", value)
    if not value:
        raise empty_array(path)
    if set(map(type, value)) != {int}:
        index = next(index for index, item in enumerate(value) if type(item) is not int)
        raise wrong_type(f"{path}[{index}]", "an integer", value[index])
    if min(value) < 0 or max(value) > TOKEN_ID_MAX:
        raise BadRequestError(
            f"Invalid '{path}': token ids are integers from 0 to the size of the model's vocabulary.",
            param=path,
            code="invalid_value",
        )
    return TokenPrompt(array("I", value).tobytes())
