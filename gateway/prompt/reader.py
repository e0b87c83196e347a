"""Reads one answer: tokens and their log probabilities in, chunks of text and of tool calls out.

Puts together what decode.py and tool_calls.py do, and releases log probabilities with their text. Implements
stages.Reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from engine.protocol import TokenLogprobs
from gateway.prompt.decode import Decoder, Decoding
from gateway.prompt.tool_calls import CallParser, Chunk
from gateway.types import CallDelta, ScoredToken, TextDelta


class Scores:
    """Log probabilities of one answer, held back for as long as the text that they belong to.

    A token is released when the last of its characters was sent, so that neither half a character nor a part of
    a stop string shows up here before it does in the text, or instead of it: a token that reaches into the stop string
    is left out.
    """

    def __init__(self, decoding: Decoding, keep: frozenset[str] = frozenset()) -> None:
        """`keep` as for the decoder of the answer's text."""
        self._spell = decoding.spell
        self._text = decoding.characters(keep)  # a second decoding, which no stop string ends
        self._chars = 0  # of all tokens so far
        self._sent = 0  # of the chunks that were released
        self._ends: deque[int] = deque()  # character behind each of the first waiting tokens; the others are unfinished
        self._waiting: deque[ScoredToken] = deque()

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """`logprobs` has one for each token. Tokens that became no character yet end where the next character does."""
        for token, found in zip(tokens, logprobs, strict=True):
            top = tuple((self._spell(other), logprob) for other, logprob in found.top)
            self._waiting.append(ScoredToken(self._spell(token), found.logprob, top, self._chars))
            if text := self._text.feed([token]):
                self._chars += len(text)
                self._ends.extend([self._chars] * (len(self._waiting) - len(self._ends)))

    def release(self, text: str) -> tuple[ScoredToken, ...]:
        """Those of tokens that are complete with this chunk of the answer; the chunks come in order."""
        self._sent += len(text)
        released = []
        while self._ends and self._ends[0] <= self._sent:
            self._ends.popleft()
            released.append(self._waiting.popleft())
        return tuple(released)

    def flush(self) -> tuple[ScoredToken, ...]:
        """All that are left, at the end of an answer that no stop string ended."""
        rest = tuple(self._waiting)
        self._waiting.clear()
        self._ends.clear()
        return rest


class AnswerReader:
    """One answer. Log probabilities are those of its text: a token that reaches into a call is left out."""

    def __init__(self, decoder: Decoder, scores: Scores | None = None, calls: CallParser | None = None) -> None:
        """
        scores  None without log probabilities
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
            return list(self._events_of(self._calls.feed(text))) if text else ()
        if not text:
            return ()
        return (TextDelta(text) if self._scores is None else TextDelta(text, self._scores.release(text)),)

    def flush(self) -> Sequence[TextDelta | CallDelta]:
        """What was held back, at the end of the answer. A stop string may show up here, too."""
        events: list[TextDelta | CallDelta] = []
        if text := self._decoder.flush():
            chunks: Sequence[Chunk] = ((text, TextDelta(text)),) if self._calls is None else self._calls.feed(text)
            events += self._events_of(chunks)
        if self._calls is not None and not self._calls.ended:
            events += self._events_of(self._calls.flush())
        if self._scores is not None and not self.ended and not self.called and (rest := self._scores.flush()):
            events.append(TextDelta("", rest))
        return events

    def _events_of(self, chunks: Sequence[Chunk]) -> Iterator[TextDelta | CallDelta]:
        for source, event in chunks:
            scored = () if self._scores is None else self._scores.release(source)
            if type(event) is TextDelta and scored:
                yield TextDelta(event.text, scored)
            elif event is not None:
                yield event
