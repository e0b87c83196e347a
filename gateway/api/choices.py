"""Several answers to each prompt: which requests they become, and which of them are told.

    n        answers that are told
    best_of  answers that are generated; the n whose tokens are likeliest on average are told

Requests of one prompt form a group, which goes to one engine: it computes their prompt once. Pure values; stream.py
runs the requests, the dialects write the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.protocol import Sampling
from engine.protocol.frozen import dataclass
from gateway.api.replies import Answer
from gateway.types import Group


@dataclass(frozen=True, slots=True)
class Choices:
    """best_of is not below n, which is at least 1."""

    n: int = 1
    best_of: int = 1

    @property
    def ranked(self) -> bool:
        """Whether some answers are generated and not told. They are known last, so such answers are not streamed."""
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
        """Of the answers to all prompts, in order, those that are told; with or without their log probabilities."""
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
