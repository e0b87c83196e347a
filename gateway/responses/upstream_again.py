"""Answers of upstreams, kept or just come: an entry in the form that a request wants, and what an answer says to it.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.responses.entries import Entry
from gateway.responses.upstream_asked import UpstreamAsked
from gateway.responses.upstream_forms import media_type, read, told
from gateway.responses.upstream_recording import Kept, find_kept
from gateway.types import Hit, Lookup, UpstreamAnswer


@dataclass(frozen=True, slots=True)
class Head:
    """What comes before the pieces of an answer."""

    upstream: str
    status: int
    headers: tuple[tuple[str, str], ...]
    label: str
    retry_after_s: float | None = None


class Again(NamedTuple):
    """An answer that was kept, in the form that is wanted."""

    kept: Kept
    pieces: Sequence[bytes]
    head: Head

    def hit(self, lookup: Lookup) -> Hit:
        return Hit("semantic" if lookup.outcome == "semantic" else "exact", *self.kept.tokens, self.kept.ms)


def find_again(entry: Entry, asked: UpstreamAsked) -> Again | None:
    """None for what cannot be read, or be told in the form that is wanted."""
    kept = find_kept(entry.body)
    pieces = None if kept is None else told(kept.pieces, kept.form, asked.form, asked.replay)
    if kept is None or pieces is None:
        return None
    head = Head("", 200, (("Content-Type", media_type(kept, asked.form)),), kept.label)
    return Again(kept, pieces, head)


def find_text(pieces: Sequence[bytes], asked: UpstreamAsked) -> str | None:
    """The text of a complete answer, in the form that was asked for."""
    said = read(b"".join(pieces), asked.form, asked.replay)
    return None if said is None else said.text


def content_type(answer: UpstreamAnswer) -> str:
    """Empty where it says none."""
    return next((value for name, value in answer.headers if name.lower() == "content-type"), "")


def is_odd(answer: UpstreamAnswer, asked: UpstreamAsked) -> bool:
    """Whether it comes in another form than the one that was asked for, or is encoded."""
    plain = ("", "identity")
    encoded = any(name.lower() == "content-encoding" and value.lower() not in plain for name, value in answer.headers)
    return encoded or ("text/event-stream" in content_type(answer)) != asked.form.stream
