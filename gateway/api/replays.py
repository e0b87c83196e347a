"""The routes whose answers, when they come from an upstream, can be given again in both forms. A table: each API's own
converter is in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from gateway.api.anthropic.replay import MessageReplay
from gateway.api.gemini.replay import GenerateReplay
from gateway.api.openai.replay import ChatReplay, CompletionReplay, EmbeddingReplay
from gateway.api.openai.responses.replay import ResponseReplay


class Replay(Protocol):
    """How one route writes an answer in its two forms. Pure; None for what cannot be told."""

    @property
    def usage_on_request(self) -> bool:
        """Whether a stream tells its usage to those alone who ask for it."""
        ...

    def fold(self, stream: bytes, *, usage: bool = True) -> dict[str, Any] | None:
        """The whole answer that a complete stream tells. `usage`: only one that tells its usage, where whole answers of
        this route do."""
        ...

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """A stream that tells a whole answer, in pieces."""
        ...

    def restream(self, stream: bytes, *, usage: bool) -> Sequence[bytes] | None:
        """A stream in its own pieces, with or without the usage that was asked for."""
        ...

    def ending(self, whole: Mapping[str, Any]) -> Literal["stop", "tool_calls", "length"] | None:
        """How it ended; None for an answer that is not complete, or not one."""
        ...

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """Of an answer to a chat that is one text and nothing else."""
        ...


REPLAYS: Final[Mapping[str, Replay]] = {
    "/v1/chat/completions": ChatReplay(),
    "/v1/completions": CompletionReplay(),
    "/v1/embeddings": EmbeddingReplay(),
    "/v1/responses": ResponseReplay(),
    "/v1/messages": MessageReplay(),
    ":generateContent": GenerateReplay(),
}
"""By route; the last one in every version of its API, streamed or not."""
