"""What is kept of a question that was answered, so that others can be compared with it; and its bytes."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

KEPT_ANSWER_CHARS: Final = 2000
"""Of an answer, for comparing it with another. The whole answer is in the exact cache, under the key."""

ENTRY_OVERHEAD_BYTES: Final = 8192
"""What an entry takes in memory besides its bytes, about: what the guard knows of its text, and its vector once
more, in full and in an index."""

_HEAD: Final = struct.Struct("<B32s32s32s32sddHII")
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A question and what was answered.

    key        of its answer in the exact cache
    scope      digest of everything else that was asked with it; only questions of one scope are compared
    group      key of the first question that had the same answer, as far as it is known
    text       the question
    vector     of the text, little-endian float32 of length 1
    answer     its first KEPT_ANSWER_CHARS; `digest` is of all of it
    created_s  seconds since 1970, as expires_s
    """

    key: bytes
    scope: bytes
    group: bytes
    text: str
    vector: bytes
    answer: str
    digest: bytes
    created_s: float
    expires_s: float

    @property
    def num_bytes(self) -> int:
        """In memory, about."""
        return ENTRY_OVERHEAD_BYTES + len(self.vector) + 4 * (len(self.text) + len(self.answer))

    def to_bytes(self) -> bytes:
        text, answer = self.text.encode(), self.answer.encode()
        sizes = len(self.vector), len(text), len(answer)
        keys = self.key, self.scope, self.group, self.digest
        return _HEAD.pack(_VERSION, *keys, self.created_s, self.expires_s, *sizes) + self.vector + text + answer

    @classmethod
    def from_bytes(cls, data: bytes) -> Entry:
        """Raises ValueError for what `to_bytes` of this version did not write."""
        try:
            version, key, scope, group, digest, created_s, expires_s, *sizes = _HEAD.unpack_from(data)
        except struct.error as error:
            raise ValueError(f"an entry is cut short: {error}") from error
        if version != _VERSION or len(data) != _HEAD.size + sum(sizes) or sizes[0] % 4:
            raise ValueError("an entry is of another version, or cut short")
        vector_end = _HEAD.size + sizes[0]
        text_end = vector_end + sizes[1]
        vector, text, answer = data[_HEAD.size : vector_end], data[vector_end:text_end], data[text_end:]
        return cls(key, scope, group, text.decode(), vector, answer.decode(), digest, created_s, expires_s)


def digest_of(answer: str) -> bytes:
    """Equal for answers that are equal but for white space at the ends."""
    return hashlib.sha256(answer.strip().encode(errors="surrogatepass")).digest()
