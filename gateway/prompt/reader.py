"""Reads one answer: tokens and their log probabilities in, pieces of text and of tool calls out.

Puts together what decode.py, scores.py and tool_calls.py do. Implements stages.Reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from engine.protocol import TokenLogprobs
from gateway.prompt.tool_calls import CallParser, Piece
from gateway.types import CallDelta, ScoredToken, TextDelta


class TextDecoder(Protocol):
    """Tokens of one answer into text. Holds back unfinished characters and what may become a stop string."""

    met: str | None  # the stop string that was met; what follows is not part of the answer

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that became certain with these tokens, possibly empty."""
        ...

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        ...


class TokenScores(Protocol):
    """Log probabilities of one answer, held back for as long as the text that they belong to."""

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None: ...

    def release(self, text: str) -> tuple[ScoredToken, ...]:
        """Those of tokens that are complete with this piece of the answer; the pieces come in order."""
        ...

    def flush(self) -> tuple[ScoredToken, ...]:
        """All that are left, at the end of an answer that no stop string ended."""
        ...


class AnswerReader:
    """One answer. Log probabilities are told of what is text: a token that reaches into a call is left out."""

    def __init__(
        self, decoder: TextDecoder, scores: TokenScores | None = None, calls: CallParser | None = None
    ) -> None:
        """
        scores  None when nobody asks for log probabilities
        calls   looks for stop strings itself, so `decoder` has none; None when everything is text
        """
        self._decoder = decoder
        self._scores = scores
        self._calls = calls

    @property
    def met(self) -> str | None:
        """The stop string that was met; what follows is not part of the answer."""
        return self._decoder.met if self._calls is None else self._calls.met

    @property
    def ended(self) -> bool:
        """Whether the answer ends here: by a stop string, or with the only call that it may have."""
        return self._decoder.met is not None if self._calls is None else self._calls.ended

    @property
    def called(self) -> bool:
        """Whether there is a call in it, so far."""
        return self._calls is not None and self._calls.made > 0

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Sequence[TextDelta | CallDelta]:
        """What became certain with these tokens. Nothing more comes after `ended`."""
        if self._scores is not None:
            self._scores.feed(tokens, logprobs)
        text = self._decoder.feed(tokens)
        if self._calls is not None:
            return list(self._tell(self._calls.feed(text))) if text else ()
        if not text:
            return ()
        return (TextDelta(text) if self._scores is None else TextDelta(text, self._scores.release(text)),)

    def flush(self) -> Sequence[TextDelta | CallDelta]:
        """What was held back, at the end of the answer. A stop string may show up here, too."""
        events: list[TextDelta | CallDelta] = []
        if text := self._decoder.flush():
            pieces: Sequence[Piece] = ((text, TextDelta(text)),) if self._calls is None else self._calls.feed(text)
            events += self._tell(pieces)
        if self._calls is not None and not self._calls.ended:
            events += self._tell(self._calls.flush())
        if self._scores is not None and not self.ended and not self.called and (rest := self._scores.flush()):
            events.append(TextDelta("", rest))
        return events

    def _tell(self, pieces: Sequence[Piece]) -> Iterator[TextDelta | CallDelta]:
        for source, event in pieces:
            scored = () if self._scores is None else self._scores.release(source)
            if type(event) is TextDelta and scored:
                yield TextDelta(event.text, scored)
            elif event is not None:
                yield event
