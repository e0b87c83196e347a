"""Answers of generateContent in their two forms: chunks into one, and back. Pure.

A chunk has the form of an answer, so that a whole one is a stream of one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.api.replies import data, read_events
from gateway.types import Ending, Replay

Json = dict[str, Any]


class GenerateReplay(Replay):
    """GenerateContentResponse."""

    def fold(self, stream: bytes, *, usage: bool = True) -> Json | None:
        """One answer; None for a stream that failed. Whether it ended is seen in its candidates."""
        whole: Json = {}
        candidates: dict[int, Json] = {}
        for written, _ in read_events(stream):
            chunk = orjson.loads(written)
            if "error" in chunk:
                return None
            whole |= chunk
            for candidate in chunk.get("candidates", ()):
                _add(candidates.setdefault(candidate.get("index", 0), {}), candidate)
        whole["candidates"] = [candidates[index] for index in sorted(candidates)]
        return whole

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """One chunk."""
        return [data(whole)]

    def ending(self, whole: Mapping[str, Any]) -> Ending | None:
        """The one of all candidates that is least complete."""
        candidates = whole.get("candidates") or ()
        reasons = {candidate.get("finishReason") for candidate in candidates}
        if not reasons or not reasons <= {"STOP", "MAX_TOKENS"}:
            return None
        if "MAX_TOKENS" in reasons:
            return "length"
        parts = [part for one in candidates for part in (one.get("content") or {}).get("parts") or ()]
        return "tool_calls" if any("functionCall" in part for part in parts) else "stop"

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """Of the parts of its only candidate, which are all texts."""
        (candidate,) = whole["candidates"]
        parts = candidate["content"]["parts"]
        plain = not candidate.get("groundingMetadata") and all(
            set(part) - {"thoughtSignature"} == {"text"} for part in parts
        )
        return "".join(part["text"] for part in parts) if plain else None


def _add(candidate: Json, chunk: Json) -> None:
    """Texts of one kind that follow each other are one; of everything else the last counts."""
    parts = (candidate.get("content") or {}).get("parts") or []
    for part in (chunk.get("content") or {}).get("parts") or ():
        last = parts[-1] if parts else {}
        if set(last) == set(part) and set(part) <= {"text", "thought"} and last.get("thought") == part.get("thought"):
            parts[-1] = {**last, "text": last["text"] + part["text"]}
        else:
            parts.append(dict(part))
    content = {**(candidate.get("content") or {}), **(chunk.get("content") or {}), "parts": parts}
    candidate |= chunk
    candidate["content"] = content
