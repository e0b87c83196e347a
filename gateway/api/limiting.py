"""What a request needs of its tenant's limits, before anybody knows its tokens. limits/ decides; the record keeps what
was set aside until the request is over, and the middleware puts it right then.

A prompt is taken to have a token for every four bytes of the request, or characters of the prompt where those are more,
which a stored conversation makes them. Prompts that come as tokens are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from engine.protocol import TOKEN_BYTES
from gateway.api.call import Call
from gateway.api.record import Hold, Record
from gateway.types import ChatPrompt, LimitKind, Need, Prompt, Room, TextPrompt, TokenPrompt

BYTES_PER_TOKEN: Final = 4

ONLY_COUNTED: Final = Need(generates=False)
"""Of a request that has its tokens counted."""


class Limits(Protocol):
    """What tenants may ask for."""

    def has(self, tenant: str) -> bool:
        """Whether it has any limit."""
        ...

    def rooms(self, tenant: str) -> dict[LimitKind, Room]:
        """What it may still send, as far as this gateway knows; nothing for what has no limit."""
        ...

    async def set_aside(self, tenant: str, need: Need) -> Hold | None:
        """Raises RateLimitError, and nothing else."""
        ...


async def set_aside(limits: Limits, record: Record, need: Callable[[], Need]) -> None:
    """For a request of the online lane, once. Raises RateLimitError. Asks nobody for a tenant without limits."""
    tenant = record.tenant
    if record.hold is not None or tenant is None or record.lane == "batch" or not limits.has(tenant):
        return
    try:
        record.hold = await limits.set_aside(tenant, need())
    finally:
        if record.allowance is not None:
            record.allowance = record.allowance._replace(**limits.rooms(tenant))


def need_of(call: Call, body_bytes: int, context_tokens: int) -> Need:
    """`body_bytes` are those of the request, decoded."""
    tokens = min(call.sampling.max_tokens, context_tokens) or None
    answers = 0 if call.prewarm else len(call.prompts) * call.choices.best_of
    return Need(_prompt_tokens(call.prompts, body_bytes), tokens, answers)


def _prompt_tokens(prompts: tuple[Prompt, ...], body_bytes: int) -> int:
    chars = tokens = 0
    for prompt in prompts:
        match prompt:
            case TokenPrompt():
                tokens += len(prompt.tokens) // TOKEN_BYTES
            case TextPrompt():
                chars += len(prompt.text)
            case ChatPrompt():
                chars += sum(len(message["content"] or "") for message in prompt.messages)
    if tokens and not chars:
        return tokens
    return tokens + -(-max(chars, body_bytes) // BYTES_PER_TOKEN)
