"""The engine's HTTP: its paths, the header that opens them, and the one answer that is a value of its own."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

import xxhash

STREAM_PATH: Final = "/v1/stream"  # WebSocket
TOKENIZER_PATH: Final = "/v1/tokenizer"  # GET -> JSON, see TokenizerFiles
HEALTH_PATH: Final = "/health"  # GET -> 200 when ready, 503 while draining
STATS_PATH: Final = "/v1/stats"  # GET -> JSON, the engine's own counters
PURGE_PATH: Final = "/v1/purge"  # POST {"salt_prefix": ...} -> JSON, see docs/engine.md
SECRET_HEADER: Final = "x-kvasir-secret"  # noqa: S105 - the name of a header


MOST_PREFIX_CHARS: Final = 4096
"""Of `salt_prefix`; longer than the longest name of a tenant or namespace."""

PURGE_LIMIT_S: Final = 60.0
"""An engine answers a purge after so long at the latest, and says what it has done by then."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a gateway needs to render and tokenise for a model, without having its files."""

    tokenizer_json: str  # the file of the tokenizers library
    chat_template: str | None
    special_tokens: dict[str, str]  # names a template may use ("bos_token", "eos_token", ...) -> text
    add_bos: bool  # a plain completion prompt starts with the tokeniser's own prefix

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TokenizerFiles:
        return cls(**data)

    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json(), sort_keys=True).encode())
