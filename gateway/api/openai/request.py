"""JSON bodies of chats and completions of the OpenAI API into a Call. Pure."""

from __future__ import annotations

from array import array
from dataclasses import fields, replace
from typing import Any

from engine.protocol import Sampling
from gateway.api.cache_control import from_body
from gateway.api.call import MAX_PROMPTS, NEW_DOCUMENT, Call, Choices, take_thoughts
from gateway.api.fields import invalid, read
from gateway.api.openai.caching import NO_BREAKPOINTS, Caching, join_messages, place_markers
from gateway.api.openai.parameters import CHAT, COMPLETION
from gateway.api.openai.tools import read_chat_tools
from gateway.api.tiers import OPENAI_TIERS
from gateway.config import LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import ChatPrompt, Constraint, Prompt, PromptParam, TextPrompt, Thinking, TokenPrompt, ToolUse

DEFAULT_COMPLETION_TOKENS = 16
_SAMPLING = tuple(one.name for one in fields(Sampling))
_CONSTRAINTS = (
    "text",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def parse_chat(body: dict[str, Any], leases: LeaseSettings) -> Call:
    """Raises BadRequestError with the path of what is wrong, UnsupportedError for what is not carried out."""
    values = read(body, CHAT, required=("model", "messages"))
    if "max_tokens" in values and "max_completion_tokens" in values:
        raise _together("max_completion_tokens", "max_tokens")
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise invalid("top_logprobs", "it is only allowed when 'logprobs' is true")
    messages: list[dict[str, Any]] = values["messages"]
    found = join_messages(messages)
    caching = place_markers(messages, found, values.get("prompt_cache_options", {}), leases)
    tools, use = read_chat_tools(values)
    thoughts = take_thoughts(messages)
    return read_call(
        values,
        (ChatPrompt(messages, markers=caching.markers, tools=tools, media=tuple(found.media), thoughts=thoughts),),
        "messages",
        max_tokens=values.get("max_completion_tokens", values.get("max_tokens", 0)),
        logprobs=values.get("top_logprobs", 0) if values.get("logprobs") else None,
        caching=caching,
        tool_use=use,
    )


def parse_completion(body: dict[str, Any]) -> Call:
    """As parse_chat. Prompts keep their order."""
    values = read(body, COMPLETION, required=("model",))
    max_tokens, logprobs = values.get("max_tokens", DEFAULT_COMPLETION_TOKENS), values.get("logprobs")
    inputs = values.get("prompt", {"prompt": ""})
    prompts = tuple(_prompt(one) for one in inputs.values())
    call = read_call(values, prompts, "prompt", max_tokens=max_tokens, logprobs=logprobs)
    if logprobs is not None and values.get("echo"):  # what is reused from the cache has no logits
        call = replace(call, sampling=replace(call.sampling, prompt_logprobs=logprobs), use_cache=False)
    return call


def _prompt(value: str | list[int]) -> Prompt:
    if type(value) is str:
        return TextPrompt(value) if value else NEW_DOCUMENT
    return TokenPrompt(array("I", value).tobytes())


def read_call(
    values: dict[str, Any],
    prompts: tuple[Prompt, ...],
    param: PromptParam,
    *,
    max_tokens: int,
    logprobs: int | None,
    caching: Caching = NO_BREAKPOINTS,
    tool_use: ToolUse | None = None,
) -> Call:
    """What chats, completions and responses say alike. `values` are checked; `max_tokens` 0 is no limit, but for
    completions. Raises BadRequestError for what does not go together."""
    stream, options = values.get("stream", False), values.get("stream_options")
    if options is not None and not stream:
        raise invalid("stream_options", "it is only allowed when 'stream' is enabled")
    min_tokens = values.get("min_tokens", 0)
    if (max_tokens or param == "prompt") and min_tokens > max_tokens:
        raise invalid("min_tokens", f"{min_tokens} is more than the {max_tokens} tokens that are generated at most")
    if tool_use is not None and tool_use.mode == "required" and values.get("ignore_eos"):
        raise _together("tool_choice", "ignore_eos")
    return Call(
        model=values["model"],
        prompts=prompts,
        prompt_param=param,
        sampling=_sampling(values, max_tokens, logprobs),
        stop=values.get("stop", ()),
        stream=stream,
        include_usage=bool(options and options.get("include_usage")),
        choices=_choices(values, len(prompts)),
        echo=values.get("echo", False),
        prewarm=param == "prompt" and max_tokens == 0,
        constraint=_constraint(values),
        tool_use=tool_use,
        thinking=_thinking(values),
        use_cache=caching.use_cache,
        only_leased=caching.only_leased,
        cache_key=values.get("prompt_cache_key", ""),
        cache_salt=values.get("cache_salt", ""),
        tier=OPENAI_TIERS[values.get("service_tier", "auto")],
        priority=values.get("priority", 0),
        reuse=from_body(values.get("cache", {})),
    )


def _sampling(values: dict[str, Any], max_tokens: int, logprobs: int | None) -> Sampling:
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


def _thinking(values: dict[str, Any]) -> Thinking | None:
    """Chats show thoughts that are asked for; responses their summary, if they ask for that."""
    if reasoning := values.get("reasoning"):
        shown = any(name in reasoning for name in ("summary", "generate_summary"))
        return Thinking(reasoning.get("effort"), shown=shown)
    effort = values.get("reasoning_effort")
    return None if effort is None else Thinking(effort, shown=effort != "none")


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


def _choices(values: dict[str, Any], num_prompts: int) -> Choices:
    n = values.get("n", 1)
    choices = Choices(n, values.get("best_of", n))
    if choices.best_of < n:
        raise invalid("best_of", f"{choices.best_of} answers are fewer than 'n', which is {n}")
    if choices.ranked and values.get("stream"):
        raise invalid("best_of", "more answers than 'n' cannot be streamed")
    if num_prompts * choices.best_of > MAX_PROMPTS:
        why = f"{choices.best_of} answers to {num_prompts} prompts are more than the {MAX_PROMPTS} of one request"
        raise invalid("n", why, code="integer_above_max_value")
    return choices
