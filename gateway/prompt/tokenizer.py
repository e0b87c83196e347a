"""One model's tokeniser: where a prompt is cut, and the ids of what lies between the cuts.

Boundary: masked text (masking.py) -> links -> ids. Knows no messages, memos or tenants.

    link      what lies between two cuts, with the special string that ends it: "Hello<|im_end|>". The last one of a
              text has none. The links of a text joined are the text.
    segment   a link without its special string, unmasked: what is tokenised

What the ids have to equal, for any text: those of the tokenizers library for the whole unmasked text, where special
strings that the template wrote are special tokens, and special strings that users wrote are plain text. Added tokens
that are not special ("<tool_call>" of Qwen) are tokens in users' text too, as they are for Hugging Face: they mean what
their text says, and cannot end a turn. The library itself cannot tell the two kinds of special strings apart, so the
reference is a copy of the tokeniser in which the special tokens have names that nobody can type (guard.py).

Loading proves on samples that the segments' ids are the whole text's ids. Where they are not (prefix spaces of
SentencePiece, special tokens that strip), there are no cuts: the whole prompt is one link, and `fallback` says why.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple

import orjson
from tokenizers import Tokenizer as HfTokenizer

from engine.protocol import TOKEN_BYTES
from gateway.errors import BadRequestError
from gateway.native import no_panic
from gateway.prompt.byte_level import (
    ByteLevelBpe,
    NotConvertibleError,
    TokenizingError,
    has_blank_run,
    num_utf8_bytes,
    vocabulary_texts,
)
from gateway.prompt.decode import Decoding
from gateway.prompt.guard import Spec, deaf_to_specials, guard
from gateway.prompt.masking import Masking, alternatives, find_all
from gateway.prompt.samples import SAMPLES, class_samples

MAX_BLANK_RUN: Final = 4_000_000
"""Characters of white space in a row. The regex engine of tokenizers (Oniguruma) backtracks over all of
them, and panics after ten million steps."""
_MARK_BYTES: Final = 4  # of a character, at most
_BATCH: Final = 64  # texts that are compared at once when a tokeniser is loaded
_NO_TEXT: Final = "(?!)"  # a regular expression that never matches


class Link(NamedTuple):
    """`text` is masked; its first `segment_chars` are the segment, the rest is the special string."""

    text: str
    segment_chars: int


class Tokenizer:
    """Read-only once it is made, and thread-safe.

    library   what tokenises segments
    slow      why it is not tiktoken, or None
    fallback  why there are no cuts, or None
    specials  special strings -> ids; `added` has the other added tokens, too
    prefix    ids that the tokeniser puts in front of a plain text, as bytes
    decoding  the way back
    """

    def __init__(self, tokenizer_json: str, *, template: str = "") -> None:
        """`template` is text that comes unmasked into prompts. Takes seconds for a large vocabulary.

        Raises ValueError for a tokeniser that cannot be read, or not be kept safe from special strings in users' text.
        """
        try:
            with no_panic("tokenizers"):
                original = HfTokenizer.from_str(tokenizer_json)
                original.no_truncation()
                original.no_padding()
                spec: Spec = orjson.loads(original.to_str())
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"the tokeniser cannot be read: {error}") from None
        added = spec["added_tokens"]
        self.specials: Final = {token["content"]: token["id"] for token in added if token["special"]}
        self.masking: Final = Masking(self.specials, avoid=template + "".join(token["content"] for token in added))
        self.prefix: Final = _prefix(original)
        self.decoding: Final = Decoding(original, spec)
        self.added: Final = {token["content"]: token["id"] for token in added}
        self._special_bytes = {special: array("I", [index]).tobytes() for special, index in self.specials.items()}
        self._special = re.compile(alternatives(self.specials) if self.specials else _NO_TEXT)
        self._longest_special = max(map(len, self.specials), default=1)
        guarded = guard(spec)
        self._names = guarded.names if guarded else None
        self._hf = guarded.hf if guarded else deaf_to_specials(spec)
        self._load_fast(guarded.spec if guarded else spec)
        self.fallback = _why_uncut(added, spec["normalizer"]) or self._why_unequal(_mixed_texts(self), original)
        if guarded is None and (self.fallback or self._hears_specials()):
            raise ValueError("special strings in users' text cannot be kept from becoming special tokens")

    @property
    def library(self) -> Literal["tiktoken", "tokenizers"]:
        return "tokenizers" if self._fast is None or self.fallback else "tiktoken"

    def prove(self, texts: Iterable[str]) -> None:
        """Compares segments with the whole on more texts, masked ones; `fallback` is set when they differ."""
        self.fallback = self.fallback or self._why_unequal(texts, None)

    def cut(self, text: str, start: int = 0) -> Iterator[Link]:
        """The links of masked text from `start` on, which is 0 or the end of a link. None for the end of the text."""
        if not self.fallback:
            for special in find_all(self._special, text, start, self._longest_special):
                yield Link(text[start : special.end()], special.start() - start)
                start = special.end()
        if start < len(text):
            yield Link(text[start:], len(text) - start)

    def least_tokens(self, text: str) -> int:
        """Fewer than this masked text can have, whatever it says: as many as if all were the longest token there is. 0
        where a token may stand for more text than it spells. Raises UnicodeEncodeError as `encode` does."""
        if self._fast is None or self.fallback:
            return 0
        # A mark, and what is inserted with it, is at most two characters more than what it stands for.
        num_bytes = num_utf8_bytes(text) - 2 * _MARK_BYTES * text.count(self.masking.mark)
        return num_bytes // self._fast.shrinks(text) // self._longest

    def encode(self, links: Sequence[Link]) -> list[bytes]:
        """Token ids of each link, little-endian uint32.

        Raises UnicodeEncodeError for text with lone surrogates, which no tokeniser has a token for, BadRequestError for
        more white space in a row than the library can do, and NativeError when it panics.
        """
        if self.fallback:
            return [ids.tobytes() for ids in self._encode_slowly([self._named(link.text) for link in links])]
        segments = [self.masking.unmask(link.text[: link.segment_chars]) for link in links]
        encoded = self._encode_slowly(segments) if self._fast is None else map(self._encode_fast, segments)
        return [
            ids.tobytes() + self._special_bytes.get(link.text[link.segment_chars :], b"")
            for ids, link in zip(encoded, links, strict=True)
        ]

    def count_before(self, link: Link, ids: bytes, chars: int) -> int:
        """How many leading tokens of a link, whose ids these are, lie entirely within its first `chars` characters.

        Takes about as long as hashing the link, or as tokenising it where the library is not tiktoken.
        """
        num_tokens = len(ids) // TOKEN_BYTES
        if chars >= len(link.text):
            return num_tokens
        if self.fallback:
            # Special strings are longer here: those that are cut by the breakpoint lie behind it as a whole.
            start = next((found.start() for found in self._special.finditer(link.text) if found.end() > chars), chars)
            return self._count_by_offsets(self._named(link.text), len(self._named(link.text[: min(start, chars)])))
        if chars >= link.segment_chars:
            return num_tokens - (link.text[link.segment_chars :] in self._special_bytes)
        segment = self.masking.unmask(link.text[: link.segment_chars])
        before = self.masking.unmask(link.text[:chars])
        if self._is_spelled_out(segment):
            ends = list(accumulate(map(self._num_bytes.__getitem__, array("I", ids))))
            return bisect_right(ends, len(before.encode()), hi=len(ends) - (link.segment_chars < len(link.text)))
        return self._count_by_offsets(segment, len(before))

    def _is_spelled_out(self, segment: str) -> bool:
        """Whether the bytes of the tokens are the bytes of the text: byte-level, and nothing to normalise."""
        try:
            return self._fast is not None and self._fast.normalize(segment) == segment
        except TokenizingError:
            return False

    def _count_by_offsets(self, text: str, chars: int) -> int:
        with no_panic("tokenizers"):
            offsets = self._hf.encode(text, add_special_tokens=False).offsets
        return next((i for i, (_, end) in enumerate(offsets) if end > chars), len(offsets))

    def _load_fast(self, spec: Spec) -> None:
        """tiktoken, and the added tokens that it has to be kept from seeing."""
        self.slow: str | None = None
        self._fast: ByteLevelBpe | None = None
        others = [token for token in spec["added_tokens"] if not token["special"]]
        self._others = {token["content"]: token["id"] for token in others}
        # In a byte-level vocabulary a token has one character for each byte; added tokens are written as they are.
        self._num_bytes = {index: len(token) for token, index in _vocabulary(spec)}
        self._num_bytes |= {token["id"]: len(token["content"].encode()) for token in spec["added_tokens"]}
        self._longest = max(self._num_bytes.values(), default=1)
        raw = [token["content"] for token in others if not token["normalized"]]
        self._raw_other = re.compile(f"({alternatives(raw) if raw else _NO_TEXT})")
        normal = [token["content"] for token in others if token["normalized"]]
        self._normal_other = re.compile(f"({alternatives(normal) if normal else _NO_TEXT})")
        try:
            if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in others):
                raise NotConvertibleError("added tokens look at the text around them")
            self._fast = ByteLevelBpe(spec)
            if any(self._fast.normalize(text) != text for text in normal):
                raise NotConvertibleError("added tokens are changed by the normaliser")
            self._compare_libraries([*SAMPLES, *class_samples(), *vocabulary_texts(spec["model"]["vocab"])])
        except NotConvertibleError as error:
            self._fast, self.slow = None, str(error)

    def _compare_libraries(self, texts: list[str]) -> None:
        for start in range(0, len(texts), _BATCH):
            batch = texts[start : start + _BATCH]
            for text, theirs in zip(batch, self._encode_slowly(batch), strict=True):
                if self._encode_fast(text) != theirs:
                    raise NotConvertibleError(f"tiktoken and tokenizers differ on {text[:40]!r}")

    def _encode_fast(self, segment: str) -> array[int]:
        assert self._fast is not None
        if not segment.isascii():
            segment.encode()  # raises for lone surrogates, which tiktoken would replace
        try:
            if not self._others:
                return self._fast.encode(segment)
            ids = array("I")
            for i, part in enumerate(self._raw_other.split(segment)):
                if i % 2:
                    ids.append(self._others[part])
                    continue
                for k, piece in enumerate(self._normal_other.split(self._fast.normalize(part))):
                    if k % 2:
                        ids.append(self._others[piece])
                    elif piece:
                        ids += self._fast.encode(piece)
            return ids
        except TokenizingError:
            return self._encode_slowly([segment])[0]

    def _encode_slowly(self, texts: list[str]) -> list[array[int]]:
        for text in texts:
            text.encode()
            _check_blank_runs(text)
        # The batch call is the one that releases the GIL.
        with no_panic("tokenizers"):
            encodings = self._hf.encode_batch_fast(texts, add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in encodings]

    @no_panic("tokenizers")
    def _hears_specials(self) -> bool:
        encodings = self._hf.encode_batch_fast(list(self.specials), add_special_tokens=False)
        return any(index in encoding.ids for index, encoding in zip(self.specials.values(), encodings, strict=True))

    def _named(self, text: str) -> str:
        """Masked text -> plain text for the guarded tokeniser."""
        names = self._names or {}
        return self.masking.unmask(self._special.sub(lambda found: names[found[0]], text))

    def _why_unequal(self, texts: Iterable[str], original: HfTokenizer | None) -> str | None:
        """Segments against the whole. With `original`, the guarded tokeniser is compared with it, too."""
        self.fallback = None
        for text in texts:
            whole = self._encode_whole(text, original)
            if whole is not None and b"".join(self.encode(list(self.cut(text)))) != whole:
                return "segments are tokenised otherwise than the whole prompt"
        return None

    def _encode_whole(self, text: str, original: HfTokenizer | None) -> bytes | None:
        plain = self.masking.unmask(text)
        ids = self._encode_slowly([self._named(text)])[0] if self._names is not None else None
        if original is not None and plain == text:
            with no_panic("tokenizers"):
                theirs = array("I", original.encode(text, add_special_tokens=False).ids)
            if ids is not None and ids != theirs:
                raise ValueError("the tokeniser depends on the names of its special tokens")
            return theirs.tobytes()
        return None if ids is None else ids.tobytes()


def _check_blank_runs(text: str) -> None:
    if len(text) > MAX_BLANK_RUN and has_blank_run(text, MAX_BLANK_RUN + 1):
        raise BadRequestError(
            f"The text has more than {MAX_BLANK_RUN} characters of white space in a row, which cannot be tokenised."
        )


def _vocabulary(spec: Spec) -> Iterable[tuple[str, int]]:
    """Tokens and ids; none for models whose vocabulary is a list, which are not byte-level."""
    vocab = spec["model"]["vocab"]
    return vocab.items() if isinstance(vocab, dict) else ()


@no_panic("tokenizers")
def _prefix(tokenizer: HfTokenizer) -> bytes:
    """What add_special_tokens puts in front of "a"."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return array("I", full[:start]).tobytes()
    return b""


def _why_uncut(added: list[dict[str, Any]], normalizer: object) -> str | None:
    """Reasons against cuts that are known from the added tokens alone."""
    specials = [token for token in added if token["special"]]
    if any(token["lstrip"] or token["rstrip"] for token in specials):
        return "special tokens strip the text around them"
    if any(token["single_word"] for token in added):
        return "added tokens look at the text around them"
    if normalizer and any(token["normalized"] for token in specials):
        return "special tokens are normalised"
    special_texts = {token["content"] for token in specials}
    other_texts = {token["content"] for token in added} - special_texts
    if any(map(_overlaps(special_texts), special_texts | other_texts)) or any(
        map(_overlaps(other_texts), special_texts)
    ):
        return "special tokens overlap"
    return None


def _overlaps(texts: set[str]) -> Callable[[str], bool]:
    """Whether a text, read from its second character on, holds or begins another one, or holds one at its start."""
    beginnings = {text[:i] for text in texts for i in range(1, len(text) + 1)}
    lengths = {len(text) for text in texts}

    def overlaps(text: str) -> bool:
        for start in range(len(text)):
            rest = text[start:]
            if start and rest in beginnings:
                return True
            if any(rest[:length] in texts for length in lengths if start or length < len(rest)):
                return True
        return False

    return overlaps


def _mixed_texts(ours: Tokenizer) -> Iterator[str]:
    """Samples between special strings, masked: what no template may ever render, and should still be equal."""
    specials = sorted(ours.specials)
    for start in range(0, len(SAMPLES), 8):
        parts: list[str] = []
        for i, sample in enumerate(SAMPLES[start : start + 8], start):
            parts.append(ours.masking.mask(sample))
            parts += [specials[(start + i) % len(specials)]] if specials else []
        yield "".join(parts)
        yield ours.masking.mask("".join(parts))
