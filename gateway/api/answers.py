"""Whole answers: what a dialect writes when nothing is streamed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.types import CallDelta, FinishReason, ScoredToken, TextDelta, Usage


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the text of a JSON object, unless the answer was cut in the middle of it. `offset` counts the
    characters of the answer's text before it."""

    name: str
    arguments: str
    offset: int = 0


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


def join_calls(pieces: Iterable[TextDelta | CallDelta]) -> tuple[ToolCall, ...]:
    """The calls among the pieces of an answer, in order."""
    calls: list[tuple[str, int, list[str]]] = []
    chars = 0
    for piece in pieces:
        if isinstance(piece, TextDelta):
            chars += len(piece.text)
        else:
            if piece.call == len(calls):
                calls.append((piece.name, chars, []))
            calls[piece.call][2].append(piece.arguments)
    return tuple(ToolCall(name, "".join(arguments), offset) for name, offset, arguments in calls)
