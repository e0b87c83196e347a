"""A Call: a checked POST that generates, in no dialect, before its model is known.

Pure. What depends on the model (vocabulary, context) is checked by `settle` and by the pipeline.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from engine.protocol import Hello, Sampling
from engine.protocol.frozen import dataclass
from gateway.api.replies import Answer
from gateway.errors import BadRequestError
from gateway.tasks import work_of
from gateway.types import (
    PLAIN_REUSE,
    ChatPrompt,
    Constraint,
    Group,
    Prompt,
    PromptParam,
    Reuse,
    TextPrompt,
    Thinking,
    Thought,
    Tier,
    TokenPrompt,
    ToolUse,
)

MAX_PROMPTS: Final = 256
"""Of one request, and answers to all of them: each is a request of the pipeline."""

NEW_DOCUMENT = TokenPrompt(b"")  # stands for "no prompt" until the model, and so its end-of-text token, is known


@dataclass(frozen=True, slots=True)
class Choices:
    """Several answers to each prompt. Their requests form a group, which goes to one engine: the prompt is computed
    once.

    n        answers that are returned
    best_of  answers that are generated, at least n; the n whose tokens are likeliest on average are returned
    """

    n: int = 1
    best_of: int = 1

    @property
    def ranked(self) -> bool:
        """Whether some answers are generated and not returned. Which is known last, so they are not streamed."""
        return self.best_of > self.n

    def samplings(self, sampling: Sampling) -> Iterator[tuple[int, Group | None, Sampling]]:
        """Number, group and sampling of each answer to one prompt. Seeds count up from the one that is given."""
        group = Group(self.best_of) if self.best_of > 1 else None
        if self.ranked and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        for number in range(self.best_of):
            seed = None if sampling.seed is None else sampling.seed + number
            yield number, group, replace(sampling, seed=seed) if number else sampling

    def best(self, answers: Sequence[Answer], *, logprobs: bool) -> list[Answer]:
        """Those of the answers to all prompts, in order, that are returned; with or without log probabilities."""
        if not self.ranked:
            return list(answers)
        best: list[Answer] = []
        for start in range(0, len(answers), self.best_of):
            best += sorted(answers[start : start + self.best_of], key=_mean_logprob, reverse=True)[: self.n]
        return best if logprobs else [replace(answer, scored=None) for answer in best]


ONE_CHOICE = Choices()


def _mean_logprob(answer: Answer) -> float:
    """An answer without tokens comes last."""
    logprobs = [one.logprob for one in answer.scored or ()]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


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
    thinking: Thinking | None = None
    use_cache: bool = True
    only_leased: bool = False
    cache_key: str = ""
    cache_salt: str = ""
    tier: Tier = "default"  # that is asked for; tiers.grant says which it is
    priority: int = 0  # as in Request
    reuse: Reuse = PLAIN_REUSE  # what the body says of the response cache


def take_thoughts(messages: Sequence[dict[str, Any]]) -> tuple[Thought, ...]:
    """Out of the messages, where a dialect has put them beside what a template reads: pairs of the number of the call
    that they come before, and signature."""
    return tuple(
        Thought(number, call, signature)
        for number, message in enumerate(messages)
        for call, signature in message.pop("thoughts", ())
    )


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


def work_of_prompt(prompt: Prompt) -> int:
    """Work on its texts (tasks.work_of), stored ones included, which are not in the request's body."""
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
