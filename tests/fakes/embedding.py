"""A text model that computes when it is told to, for tests of the queue in front of it."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from pathlib import Path

from gateway.config import EmbeddingSettings
from gateway.responses.embedding.embedder import Embedder
from gateway.types import EmbeddingInput
from tests.fakes.tuned import tuned

LIMIT_S = 30.0


class FakeTextModel:
    """Its vector of a text is the text's own tokens. Notes every batch, and holds each back while it is `held`."""

    digest = "fake"
    dimensions = 4
    vocabulary = 1000

    def __init__(self, max_tokens: int = 16) -> None:
        self.max_tokens = max_tokens
        self.batches: list[list[tuple[int, ...]]] = []
        self.broken: set[int] = set()  # a batch with one of these tokens fails
        self.begun = threading.Semaphore(0)
        self._go = threading.Event()
        self._go.set()

    def hold(self) -> None:
        self._go.clear()

    def go_on(self) -> None:
        self._go.set()

    def tokens(self, text: str) -> list[int]:
        return [1, *map(ord, text), 2]

    def completed(self, ids: Sequence[int]) -> Sequence[int]:
        return [1, *ids, 2]

    def vectors(self, wanted: Sequence[EmbeddingInput]) -> list[bytes]:
        self.batches.append([tuple(one.tokens) for one in wanted])
        self.begun.release()
        assert self._go.wait(LIMIT_S)
        if self.broken.intersection(token for one in wanted for token in one.tokens):
            raise RuntimeError("this text cannot be computed")
        return [array("f", one.tokens[: one.dimensions]).tobytes() for one in wanted]


def no_embedder() -> Embedder:
    """That of a gateway without the extra."""
    return Embedder(EmbeddingSettings(), find_folder=lambda configured: None)


def fake_embedder(model: FakeTextModel, **settings: object) -> Embedder:
    """An embedder whose loaded model is `model`."""
    return Embedder(
        tuned(EmbeddingSettings, **settings),
        load=lambda folder: model,  # type: ignore[arg-type, return-value]
        find_folder=lambda configured: Path("fake"),
    )
