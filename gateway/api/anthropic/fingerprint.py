"""What is remembered of a prompt, so that a later one can be told what it changed: hashes, and no text. Pure.

A piece is a tool, a block of the system prompt, or a block of a message. Each has a digest, and a mark of two bytes for
every word, or every few words of a long prompt, so that the first one that changed is found. All hashes are keyed by
the id of the message that was answered, which the client has and nobody keeps: what is stored can neither be looked up
nor guessed at without it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import orjson

Section = Literal["tools", "system", "messages"]

SECTIONS: Final[tuple[Section, ...]] = ("tools", "system", "messages")
"""In the order in which they are compared: what comes first is the reason."""

MAX_MARKS: Final = 8192
"""Of one prompt; of a longer one each stands for 2, 4, 8, ... words."""

MAX_SHOWN_CHARS: Final = 64
_MARK_BYTES: Final = 2


class PromptPart(NamedTuple):
    """`kind` is all that makes it what it is, besides its text."""

    section: Section
    path: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Change:
    """The first thing that is not as it was.

    section  None when the model has changed
    path     of the piece in the new request
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
    """

    model: str
    scope: str
    cached_tokens: int
    words_per_mark: int
    parts: tuple[tuple[Section, str, bytes], ...]

    def to_json(self) -> bytes:
        parts = [(section, digest, base64.b64encode(marks).decode()) for section, digest, marks in self.parts]
        return orjson.dumps([self.model, self.scope, self.cached_tokens, self.words_per_mark, parts])

    @classmethod
    def from_json(cls, written: bytes) -> Fingerprint:
        model, scope, cached_tokens, words_per_mark, parts = orjson.loads(written)
        read = ((section, digest, base64.b64decode(marks)) for section, digest, marks in parts)
        return cls(model, scope, cached_tokens, words_per_mark, tuple(read))


def take(message_id: str, model: str, scope: str, parts: Sequence[PromptPart], cached_tokens: int) -> Fingerprint:
    """The fingerprint of a prompt that the message with this id answers."""
    hasher = _Hasher(message_id)
    words = sum(len(part.text.split()) for part in parts)
    size = 1
    while words > MAX_MARKS * size:
        size *= 2
    hashed = ((part.section, hasher.digest(part), hasher.marks(part.text, size)) for part in parts)
    return Fingerprint(hasher.name(model), hasher.name(scope), cached_tokens, size, tuple(hashed))


def compare(before: Fingerprint, message_id: str, model: str, parts: Sequence[PromptPart]) -> Change | None:
    """What a request changed against one whose answer has this id. None for nothing but messages behind its last one,
    and also where only the scope is another."""
    hasher = _Hasher(message_id)
    if before.model != hasher.name(model):
        return Change(None)
    for section in SECTIONS:
        old = [(digest, marks) for name, digest, marks in before.parts if name == section]
        new = [part for part in parts if part.section == section]
        for (digest, marks), part in zip(old, new, strict=False):
            if digest != hasher.digest(part):
                return _changed_in(part, marks, hasher, before.words_per_mark)
        if len(new) < len(old) or (len(new) > len(old) and section != "messages"):
            return Change(section, new[len(old)].path if len(new) > len(old) else section)
    return None


def same_scope(before: Fingerprint, message_id: str, scope: str) -> bool:
    return before.scope == _Hasher(message_id).name(scope)


def store_key(message_id: str) -> str:
    """Under which a fingerprint is stored: it does not tell the id."""
    return hashlib.blake2b(message_id.encode(), digest_size=16, person=b"kvasir message").hexdigest()


def _changed_in(part: PromptPart, marks: bytes, hasher: _Hasher, size: int) -> Change:
    new = hasher.marks(part.text, size)
    starts = range(0, max(len(marks), len(new)), _MARK_BYTES)
    at = next((at for at in starts if marks[at : at + _MARK_BYTES] != new[at : at + _MARK_BYTES]), None)
    if at is None:  # blanks, or what is no text
        return Change(part.section, part.path)
    word = at // _MARK_BYTES * size
    text = " ".join(part.text.split()[word : word + size])
    return Change(part.section, part.path, word, text[:MAX_SHOWN_CHARS])


class _Hasher:
    """Hashes that are keyed by a message's id."""

    def __init__(self, message_id: str) -> None:
        self._key = hashlib.blake2b(message_id.encode(), digest_size=32).digest()

    def name(self, text: str) -> str:
        return self._hash(text.encode(), 8).hex()

    def digest(self, part: PromptPart) -> str:
        kind = part.kind.encode()
        return self._hash(len(kind).to_bytes(4, "little") + kind + part.text.encode(), 8).hex()

    def marks(self, text: str, size: int) -> bytes:
        return b"".join(self._hash(group, _MARK_BYTES) for group in _groups(text, size))

    def _hash(self, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, digest_size=size, key=self._key).digest()


def _groups(text: str, size: int) -> Iterator[bytes]:
    words = text.split()
    if size == 1:
        return (word.encode() for word in words)
    return (" ".join(words[start : start + size]).encode() for start in range(0, len(words), size))


def json_text(value: Any) -> str:
    """Data as a text whose words are its own: a blank behind every comma and colon."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
