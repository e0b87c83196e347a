"""A Call: what one POST asks for, whatever its dialect, checked, before any model is known; and the requests for the
pipeline that it becomes.

Pure. What depends on the model (vocabulary, context) is checked by `settle` and by the pipeline.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from engine.protocol import Hello, Sampling
from engine.protocol.frozen import dataclass
from gateway.api.choices import ONE_CHOICE, Choices
from gateway.api.record import Record
from gateway.errors import BadRequestError
from gateway.tasks import work_of
from gateway.types import (
    PLAIN_REUSE,
    ChatPrompt,
    Constraint,
    Prompt,
    PromptParam,
    Request,
    Reuse,
    Scope,
    Tenant,
    TextPrompt,
    Tier,
    TokenPrompt,
    ToolUse,
    Trace,
)

MAX_PROMPTS: Final = 256
"""Of one request, and answers to all of them: each is a request of the pipeline."""

NEW_DOCUMENT = TokenPrompt(b"")  # stands for "no prompt" until the model, and so its end-of-text token, is known


@dataclass(frozen=True, slots=True)
class Call:
    """One POST. `prewarm` computes the prompts and generates nothing; with `fit`, tokens that were asked for and do not
    fit into the context are not generated, instead of being refused."""

    model: str
    prompts: tuple[Prompt, ...]
    prompt_param: PromptParam
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    choices: Choices = ONE_CHOICE
    echo: bool = False
    prewarm: bool = False
    fit: bool = False
    constraint: Constraint | None = None
    tool_use: ToolUse | None = None
    use_cache: bool = True
    only_leased: bool = False
    cache_key: str = ""
    cache_salt: str = ""
    tier: Tier = "default"  # that is asked for; tiers.grant says which it is
    priority: int = 0  # as in Request
    reuse: Reuse = PLAIN_REUSE  # what the body says of the response cache


def settle(call: Call, model: Hello) -> tuple[Prompt, ...]:
    """The prompts for this model. Raises BadRequestError for token ids that are not in its vocabulary."""
    size = model.vocab_size
    for token, _ in call.sampling.logit_bias:
        if token >= size:
            raise _outside("logit_bias", token, size)
    for index, token in enumerate(call.sampling.stop_ids):
        if token >= size:
            raise _outside(f"stop_token_ids[{index}]", token, size)
    for prompt in call.prompts:
        if isinstance(prompt, TokenPrompt) and prompt.tokens:
            tokens = array("I", prompt.tokens)
            if (largest := max(tokens)) >= size:
                raise _outside("prompt", largest, size)
    return tuple(_begin(model) if prompt is NEW_DOCUMENT else prompt for prompt in call.prompts)


def requests_of(
    call: Call,
    prompts: Sequence[Prompt],
    record: Record,
    tenant: Tenant,
    *,
    scope: Scope,
    affinity: str,
    reuse: Reuse,
    deadline_s: float,
) -> list[Request]:
    """One for each answer to each prompt, which `settle` made. `reuse` is what body and headers say together."""
    return [
        Request(
            request_id=record.request_id,
            tenant=tenant,
            model=call.model,
            prompt=prompt,
            sampling=sampling,
            received_s=record.received_s,
            deadline_s=deadline_s,
            lane=record.lane,
            tier=record.tier,
            priority=call.priority,
            stop=call.stop,
            prompt_param=call.prompt_param,
            scope=scope,
            affinity=affinity,
            use_cache=call.use_cache,
            only_leased=call.only_leased,
            prewarm=call.prewarm,
            fit=call.fit,
            constraint=call.constraint,
            tool_use=call.tool_use,
            group=group,
            number=number,
            trace=Trace(fork=number > 0),
            work=work,
            stream=call.stream,
            reuse=reuse,
        )
        for prompt, work in [(prompt, max(record.work, _work_of(prompt))) for prompt in prompts]
        for number, group, sampling in call.choices.samplings(call.sampling)
    ]


def _work_of(prompt: Prompt) -> int:
    """Of its texts; what was stored is not in the request's body."""
    match prompt:
        case ChatPrompt(messages=messages):
            return work_of(sum([len(message.get("content") or "") for message in messages]), len(messages))
        case TextPrompt(text):
            return work_of(len(text))
        case TokenPrompt(tokens):
            return work_of(len(tokens))


def _begin(model: Hello) -> Prompt:
    """A model that is given nothing begins as after the end of another document."""
    return TokenPrompt(array("I", model.eos_ids[:1]).tobytes()) if model.eos_ids else TextPrompt("")


def _outside(path: str, token: int, vocab_size: int) -> BadRequestError:
    return BadRequestError(
        f"Invalid '{path}': token id {token} is not in the model's vocabulary of {vocab_size} tokens.",
        param=path,
        code="invalid_value",
    )
