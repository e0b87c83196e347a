"""Fingerprints of prompts, by which a later request learns what it changed: hashes, and no text. Pure.

A part is a tool, a block of the system prompt, or a block of a message. Each has a digest, and a mark of two bytes for
every word, or every few words of a long prompt, so that the first one that changed is found. All hashes are keyed by
the id of the message that was answered, which the client has and no store: what is stored can neither be looked up
nor guessed at without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Literal, NamedTuple

import orjson

Section = Literal["tools", "system", "messages"]

SECTIONS: Final[tuple[Section, ...]] = ("tools", "system", "messages")
"""In the order in which they are compared: the first change is the reason."""

MAX_MARKS: Final = 8192
"""Of one prompt; of a longer one each stands for 2, 4, 8, ... words."""

MAX_SHOWN_CHARS: Final = 64
_MARK_CHARS: Final = 4  # hexadecimal digits of two bytes


class PromptPart(NamedTuple):
    """`kind` is all that makes it what it is, besides its text."""

    section: Section
    path: str
    kind: str
    text: str


class Change(NamedTuple):
    """The first difference of two prompts.

    section  None when the model has changed
    path     of the part in the new request
    word     number of the first word in it that is another one, where one is
    text     that word, and those behind it that share its mark; empty where words are missing
    """

    section: Section | None
    path: str | None = None
    word: int | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of an answered prompt.

    scope          whose blocks it could share
    cached_tokens  of its prompt: read, and created
    parts          section, digest and marks of each, in order
    """

    model: str
    scope: str
    cached_tokens: int
    words_per_mark: int
    parts: tuple[tuple[Section, str, str], ...]

    def to_json(self) -> bytes:
        return orjson.dumps([self.model, self.scope, self.cached_tokens, self.words_per_mark, self.parts])

    @classmethod
    def from_json(cls, written: bytes) -> Fingerprint:
        model, scope, cached_tokens, words_per_mark, parts = orjson.loads(written)
        read = ((section, digest, marks) for section, digest, marks in parts)
        return cls(model, scope, cached_tokens, words_per_mark, tuple(read))


def take(message_id: str, model: str, scope: str, parts: Sequence[PromptPart], cached_tokens: int) -> Fingerprint:
    """The fingerprint of a prompt that the message with this id answers."""
    digest = _Digest(message_id)
    words = sum(len(part.text.split()) for part in parts)
    size = 1
    while words > MAX_MARKS * size:
        size *= 2
    hashed = ((part.section, digest(_content(part)), _marks(part.text, size, digest)) for part in parts)
    return Fingerprint(digest(model), digest(scope), cached_tokens, size, tuple(hashed))


def compare(before: Fingerprint, message_id: str, model: str, parts: Sequence[PromptPart]) -> Change | None:
    """What a request changed against one whose answer has this id. None for nothing but messages behind its last one,
    and also where only the scope is another."""
    digest = _Digest(message_id)
    if before.model != digest(model):
        return Change(None)
    for section in SECTIONS:
        old = [(hashed, marks) for name, hashed, marks in before.parts if name == section]
        new = [part for part in parts if part.section == section]
        for (hashed, marks), part in zip(old, new, strict=False):
            if hashed != digest(_content(part)):
                return _changed_in(part, marks, _marks(part.text, before.words_per_mark, digest), before.words_per_mark)
        if len(new) < len(old) or (len(new) > len(old) and section != "messages"):
            return Change(section, new[len(old)].path if len(new) > len(old) else section)
    return None


def same_scope(before: Fingerprint, message_id: str, scope: str) -> bool:
    return before.scope == _Digest(message_id)(scope)


def store_key(message_id: str) -> str:
    """The key of a fingerprint in the store, which does not reveal the id."""
    return hashlib.blake2b(message_id.encode(), digest_size=16, person=b"kvasir message").hexdigest()


def _changed_in(part: PromptPart, old: str, new: str, size: int) -> Change:
    """`old` and `new` are marks, each of `size` words."""
    if old == new:  # blanks, or what is no text
        return Change(part.section, part.path)
    differ = (at for at, (one, other) in enumerate(zip_longest(old, new)) if one != other)
    word = next(differ) // _MARK_CHARS * size
    text = " ".join(part.text.split()[word : word + size])
    return Change(part.section, part.path, word, text[:MAX_SHOWN_CHARS])


class _Digest:
    """A hash that is keyed by a message's id."""

    def __init__(self, message_id: str) -> None:
        self._key = hashlib.blake2b(message_id.encode(), digest_size=32).digest()

    def __call__(self, text: str, size: int = 8) -> str:
        return hashlib.blake2b(text.encode(), digest_size=size, key=self._key).hexdigest()


def _content(part: PromptPart) -> str:
    return f"{len(part.kind)} {part.kind}{part.text}"


def _marks(text: str, size: int, digest: _Digest) -> str:
    words = text.split()
    groups = words if size == 1 else [" ".join(words[at : at + size]) for at in range(0, len(words), size)]
    return "".join([digest(group, _MARK_CHARS // 2) for group in groups])


def json_text(value: Any) -> str:
    """Data as a text whose words are its own: a blank behind every comma and colon."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
