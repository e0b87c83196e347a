"""The routes whose answers, when they come from an upstream, can be given again in both forms. A table: each API's own
converter is in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.api.anthropic.replay import MessageReplay
from gateway.api.gemini.replay import GenerateReplay
from gateway.api.openai.replay import ChatReplay, CompletionReplay, EmbeddingReplay
from gateway.api.openai.responses.replay import ResponseReplay
from gateway.types import Replay

REPLAYS: Final[Mapping[str, Replay]] = {
    "/v1/chat/completions": ChatReplay(),
    "/v1/completions": CompletionReplay(),
    "/v1/embeddings": EmbeddingReplay(),
    "/v1/responses": ResponseReplay(),
    "/v1/messages": MessageReplay(),
    ":generateContent": GenerateReplay(),
}
"""By route; the last one in every version of its API, streamed or not."""
