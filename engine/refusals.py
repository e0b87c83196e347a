"""What a sequence may not be: why an engine could never run it, in words that say what would be right.

Pure. engine/scheduler.py asks before it queues a sequence; want of room at the moment is its own affair.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from engine.protocol import LANES, Breakpoint, Submit

MAX_BREAKPOINTS = 64
"""Of one prompt. Anthropic's API has 4; a gateway that caches conversations by itself may send one for each turn."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of every sequence of an engine.

    context_tokens  prompt and completion together, for the model
    room_tokens     the same, for the memory of one sequence that has the engine to itself
    vocab_size      token ids are below it
    lease_max_s     seconds that a breakpoint may ask for
    """

    context_tokens: int
    room_tokens: int
    vocab_size: int
    lease_max_s: float


def find_mistake(message: Submit, tokens: array[int], limits: Limits) -> str | None:
    """Why a sequence can never run, or None. `tokens` are those of the message, empty when its bytes are none."""
    prompt, most = len(tokens), message.sampling.max_tokens
    if not prompt:
        return "the prompt is empty" if not message.tokens else "the prompt's bytes are not whole token ids"
    if message.grammar is not None and message.sampling.ignore_eos:
        return "ignore_eos goes on where a grammar's text is complete; only one of them is possible"
    if message.lane not in LANES:
        return f"there is no lane {message.lane!r}; there are {' and '.join(LANES)}"
    if most < 0:
        return f"max_tokens is {most}; it must be at least 0"
    if prompt + most > limits.context_tokens:
        return (
            f"{prompt} prompt tokens and max_tokens {most} are {prompt + most} tokens together; "
            f"the model's context is {limits.context_tokens} tokens"
        )
    if prompt + most > limits.room_tokens:
        return (
            f"{prompt} prompt tokens and max_tokens {most} are {prompt + most} tokens together; "
            f"the engine has memory for {limits.room_tokens} tokens (kv_cache_bytes)"
        )
    if not message.sampling.repetition_penalty > 0:
        return f"repetition_penalty is {message.sampling.repetition_penalty}; it must be above 0"
    if message.sampling.prompt_logprobs is not None and message.use_cache:
        return "log probabilities of a prompt are those of tokens that are computed: use_cache must be off"
    if max(tokens) >= limits.vocab_size:
        return f"the prompt has token id {max(tokens)}; ids of this model are below {limits.vocab_size}"
    return find_bad_breakpoint(message.breakpoints, prompt, limits.lease_max_s)


def find_bad_breakpoint(breakpoints: tuple[Breakpoint, ...], num_tokens: int, max_s: float) -> str | None:
    """Why breakpoints of a prompt of so many tokens cannot be granted, or None."""
    if len(breakpoints) > MAX_BREAKPOINTS:
        return f"the prompt has {len(breakpoints)} breakpoints; it may have {MAX_BREAKPOINTS}"
    for point in breakpoints:
        if not 1 <= point.tokens <= num_tokens:
            return f"a breakpoint is at token {point.tokens}; it must be between 1 and the prompt's {num_tokens}"
        if not 0 < point.ttl_s < float("inf"):
            return f"a breakpoint's time to live is {point.ttl_s} s; it must be a number above 0"
        if point.ttl_s > max_s:
            return f"a breakpoint's time to live is {point.ttl_s:g} s; the most is {max_s:g} s (engine.lease_max_s)"
    return None
