"""Log probabilities of an answer's tokens, released with the text that the tokens became.

A client is told of a token when the last of its characters was sent, so that neither half a character nor a part of a
stop string shows up here before it does in the text, or instead of it: a token that reaches into the stop string is
left out. Implements reader.TokenScores; gateway/prompt/decode.py knows what a token's bytes are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.protocol import TokenLogprobs
from gateway.prompt.decode import Decoding
from gateway.types import ScoredToken


class Scores:
    """One answer. See reader.TokenScores."""

    def __init__(self, decoding: Decoding, keep: frozenset[str] = frozenset()) -> None:
        """`keep` as for the decoder of the answer's text."""
        self._spell = decoding.spell
        self._text = decoding.characters(keep)  # a second decoding, which no stop string ends
        self._chars = 0  # of all tokens so far
        self._sent = 0  # of the pieces that were released
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
        self._sent += len(text)
        released = []
        while self._ends and self._ends[0] <= self._sent:
            self._ends.popleft()
            released.append(self._waiting.popleft())
        return tuple(released)

    def flush(self) -> tuple[ScoredToken, ...]:
        rest = tuple(self._waiting)
        self._waiting.clear()
        self._ends.clear()
        return rest
