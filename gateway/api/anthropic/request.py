"""JSON bodies of /v1/messages and /v1/messages/count_tokens into a Call and its breakpoints. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.protocol import Sampling
from engine.protocol.frozen import dataclass
from gateway.api.anthropic.accounting import DiagnosisRequest
from gateway.api.anthropic.caching import Caching, read_caching
from gateway.api.anthropic.fingerprint import PromptPart, json_text
from gateway.api.anthropic.messages import Block, converse
from gateway.api.anthropic.parameters import COUNT, MESSAGES, SAMPLING
from gateway.api.anthropic.tools import DefinedTool, tool_use
from gateway.api.anthropic.wire import Version
from gateway.api.cache_control import from_body
from gateway.api.call import Call, take_thoughts
from gateway.api.fields import invalid, read, unsupported
from gateway.api.tiers import ANTHROPIC_TIERS
from gateway.config import AnthropicSettings, LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import ChatPrompt, Constraint, Thinking


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A parsed message request: the call, its breakpoints, and its request for diagnostics."""

    call: Call
    caching: Caching
    diagnosis: DiagnosisRequest | None


def parse_message(
    body: dict[str, Any], version: Version, settings: AnthropicSettings, leases: LeaseSettings
) -> MessageRequest:
    """Raises BadRequestError with the path of what is wrong, UnsupportedError for what is not carried out."""
    if version != "2023-06-01":
        for name in SAMPLING:
            if name in body:
                raise BadRequestError(
                    f"Invalid '{name}': version {version} has no sampling parameters; 2023-06-01 has.",
                    param=name,
                    code="unknown_parameter",
                    reason=f"Extra inputs are not permitted: version {version} of the API has no sampling parameters, "
                    "which `anthropic-version: 2023-06-01` has",
                )
    values = read(body, MESSAGES, required=("model", "max_tokens", "messages"))
    max_tokens, stream = values["max_tokens"], values.get("stream", False)
    if not max_tokens:
        _check_prewarm(values)
    elif (budget := values.get("thinking", {}).get("budget_tokens", 0)) >= max_tokens:
        raise invalid("thinking.budget_tokens", "`max_tokens` must be greater than `thinking.budget_tokens`")
    elif budget and _forced(values):
        raise invalid("thinking", "thinking may not be enabled when `tool_choice` forces tool use")
    if values["messages"][-1].role == "assistant" and (_forced(values) or _format(values) is not None):
        raise invalid(
            "messages", "an answer that goes on with the last message is text, and nothing else can be forced"
        )
    constraint = _format(values)
    use = tool_use(values.get("tools", ()), values.get("tool_choice"))
    prompt, caching = _prompt(values, settings, leases)
    call = Call(
        model=values["model"],
        prompts=(prompt,),
        prompt_param="messages",
        sampling=Sampling(
            max_tokens=max_tokens,
            temperature=values.get("temperature", 1.0),
            top_p=values.get("top_p", 1.0),
            top_k=values.get("top_k", 0),
        ),
        stop=values.get("stop_sequences", ()),
        stream=stream,
        prewarm=not max_tokens,
        fit=True,
        constraint=constraint,
        tool_use=use,
        thinking=_thinking(values),
        tier=ANTHROPIC_TIERS[values.get("service_tier", "auto")],
        reuse=from_body(values.get("cache", {})),
    )
    diagnosis = DiagnosisRequest(_prompt_parts(values), values["diagnostics"]) if "diagnostics" in values else None
    return MessageRequest(call, caching, diagnosis)


def check_line(body: dict[str, Any]) -> None:
    """Raises UnsupportedError for fields of a message that a line of a batch may not have."""
    for name, message, why in (
        ("stream", body.get("stream"), "a batch does not stream"),
        ("max_tokens", body.get("max_tokens") == 0, "a batch generates at least one token for each request"),
        ("speed", body.get("speed") is not None, "a batch has one speed"),
    ):
        if message:
            raise unsupported(name, why)


def parse_count(body: dict[str, Any], settings: AnthropicSettings, leases: LeaseSettings) -> Call:
    """As parse_message, for a request that is only counted."""
    values = read(body, COUNT, required=("model", "messages"))
    return Call(
        model=values["model"],
        prompts=(replace(_prompt(values, settings, leases)[0], markers=()),),
        prompt_param="messages",
        sampling=Sampling(max_tokens=0),
        prewarm=True,
        tool_use=tool_use(values.get("tools", ()), values.get("tool_choice")),
    )


def _prompt(values: dict[str, Any], settings: AnthropicSettings, leases: LeaseSettings) -> tuple[ChatPrompt, Caching]:
    defined: list[DefinedTool] = values.get("tools", [])
    conversation = converse(values.get("system", ()), values["messages"])
    blocks = [Block("tool", tool.path, tool.control, 0, number, number) for number, tool in enumerate(defined)]
    blocks += conversation.blocks
    caching = read_caching(blocks, values.get("cache_control"), settings.lookback_blocks, leases.ttls)
    prompt = ChatPrompt(
        conversation.messages,
        markers=caching.markers,
        tools=tuple(tool.tool for tool in defined),
        min_breakpoint_tokens=settings.min_cache_tokens,
        continues=conversation.continues,
        media=tuple(conversation.media),
        thoughts=take_thoughts(conversation.messages),
    )
    return prompt, caching


def _prompt_parts(values: dict[str, Any]) -> list[PromptPart]:
    """The parts of the prompt, for comparing it with another, without breakpoints."""
    parts = [
        PromptPart(
            "tools", defined.path, "", json_text([defined.tool.name, defined.tool.description, defined.tool.parameters])
        )
        for defined in values.get("tools", ())
    ]
    parts += [PromptPart("system", part.path, "", part.text) for part in values.get("system", ())]
    for turn in values["messages"]:
        for part in turn.parts:
            kind = f"{turn.role} {part.kind} {part.call_id}"
            content = part.text if part.call is None else json_text(part.call["function"])
            content += "".join(f"\n{one.url or one.data}" for one in part.media)
            parts.append(PromptPart("messages", part.path, kind, content))
    return parts


def _forced(values: dict[str, Any]) -> bool:
    return values.get("tool_choice", {}).get("type") in ("any", "tool")


def _format(values: dict[str, Any]) -> Constraint | None:
    """The structured output format, in its newer or older field."""
    constraint: Constraint | None = values.get("output_config", {}).get("format", values.get("output_format"))
    return constraint


def _thinking(values: dict[str, Any]) -> Thinking | None:
    """An effort alone says how much, and does not ask to see it."""
    asked, effort = values.get("thinking", {}), values.get("output_config", {}).get("effort")
    if not asked:
        return None if effort is None else Thinking(effort, shown=False)
    if asked["type"] == "disabled":
        return Thinking("none", shown=False)
    return Thinking(effort, asked.get("budget_tokens"), shown=asked.get("display") != "omitted")


def _check_prewarm(values: dict[str, Any]) -> None:
    """Refuses what makes no sense without generated tokens."""
    refused = {
        "stream": values.get("stream", False),
        "thinking": values.get("thinking", {}).get("type") in ("enabled", "adaptive", "between_tools"),
        "tool_choice": _forced(values),
        "output_config.format": _format(values) is not None,
    }
    for path, there in refused.items():
        if there:
            raise invalid(path, "it is not possible together with `max_tokens` 0")
