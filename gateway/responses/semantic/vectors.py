"""Texts as vectors, for the semantic cache: of a question within the time that a look-up has, of two answers that are
compared when there is time. An embedder that fails is in the log once until it works. And which texts have none: only a
chat's last text may differ, and has to be a question whose answer depends on its text alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from gateway.config import SemanticCacheSettings
from gateway.errors import KvasirError
from gateway.responses.semantic.lexicon import MOMENTS
from gateway.types import EmbeddingInput

if TYPE_CHECKING:
    from gateway.responses.embedding.embedder import Embedder

log = logging.getLogger(__name__)

JUDGE_TIMEOUT_S: Final = 30.0
"""Seconds that two answers wait to be embedded; no request waits for them."""


def find_unfit(text: str, *, max_chars: int) -> str | None:
    """Why a text is not compared with others, as one word for metrics; None where it is.

    length  there is none, or too much
    text    it is not Unicode
    moment  its answer is a matter of when it is asked
    """
    if not text or len(text) > max_chars:
        return "length"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "text"
    return None if MOMENTS.isdisjoint(_words(text)) else "moment"


def _words(text: str) -> set[str]:
    return {word.strip(".,;:!?\"'()[]") for word in text.lower().split()}


class Vectors:
    """Little-endian float32 of length 1.

    encoder  digest of the one that makes them; empty before it is there
    """

    encoder = ""

    def __init__(self, embedder: Embedder, settings: SemanticCacheSettings, events: Counter[str]) -> None:
        """`events` counts questions that have none (`embedder_failures`)."""
        self._embedder = embedder
        self._settings = settings
        self._events = events
        self._failed = False

    async def load(self) -> None:
        """Returns when the encoder is there, or cannot be."""
        try:
            self.encoder = (await self._embedder.model()).digest
        except KvasirError as error:
            self._warn(error)

    async def of_question(self, text: str, tenant: str) -> bytes | None:
        """None for one that is longer than one may be, and when there is no vector within the time of a look-up."""
        settings = self._settings
        deadline_s = time.monotonic() + settings.lookup_timeout_s
        try:
            async with asyncio.timeout(settings.lookup_timeout_s):
                model = await self._embedder.model()
                self.encoder = model.digest
                (tokens,) = await self._embedder.tokens([text])
                if len(tokens) > min(settings.max_text_tokens, model.max_tokens):
                    return None
                found = await self._embedder.embed(
                    [EmbeddingInput(tokens, model.dimensions)], deadline_s, tenant=tenant
                )
        except (KvasirError, TimeoutError) as error:
            self._events["embedder_failures"] += 1
            self._warn(error)
            return None
        self._failed = False
        return found[0]

    async def of_answers(self, one: str, other: str, tenant: str) -> tuple[bytes, bytes]:
        """Of their beginnings, as far as the model reads. Raises what the embedder raises."""
        model = await self._embedder.model()
        tokens = await self._embedder.tokens([one, other])
        inputs = [EmbeddingInput(some[: model.max_tokens], model.dimensions) for some in tokens]
        deadline_s = time.monotonic() + JUDGE_TIMEOUT_S
        here, there = await self._embedder.embed(inputs, deadline_s, tenant=tenant)
        return here, there

    def _warn(self, error: KvasirError | TimeoutError) -> None:
        """Once for each time that it begins to fail."""
        if not self._failed:
            self._failed = True
            log.warning("the semantic cache has no vectors, exact answers are found: %s", error or "too slow")
