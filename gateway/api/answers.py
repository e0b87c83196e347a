"""Whole answers: what a dialect writes when nothing is streamed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.types import CallDelta, FinishReason, ScoredToken, Usage


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the text of a JSON object, unless the answer was cut in the middle of it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, complete."""

    text: str
    reason: FinishReason
    usage: Usage
    scored: tuple[ScoredToken, ...] | None = None  # when log probabilities were asked for
    echoed: int = 0  # characters of `text` that are the prompt
    prompt: tuple[ScoredToken, ...] = ()  # scored as well, when it is echoed with log probabilities
    calls: tuple[ToolCall, ...] = ()
    stop: str | None = None  # the stop string that ended it


def join_calls(pieces: Iterable[CallDelta]) -> tuple[ToolCall, ...]:
    """The calls that these pieces make, in order."""
    names: list[str] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if piece.call == len(names):
            names.append(piece.name)
            arguments.append([])
        arguments[piece.call].append(piece.arguments)
    return tuple(ToolCall(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True))
