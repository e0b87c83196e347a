"""A byte-level BPE tokenizer.json, handed to tiktoken: the same merges and the same ids, several times faster.

Boundary: text without any added token in it -> ids. tokenizer.py decides what is an added token; here is only the BPE,
its pre-tokeniser and NFC. Whatever is not provably the same raises NotConvertibleError: then the tokenizers library is
used.

Why it is the same. tokenizers merges the pairs of a list in the list's order; tiktoken merges any two neighbours whose
concatenation is a token, in the order of the tokens' ranks. Within the span of a token t, as long as no merge crosses
its ends, a merge depends on nothing outside; so two neighbours that make up t are always the two that t falls into when
it is encoded alone, one step before its end. Therefore both do the same if

  1. every token in tiktoken's table is what tokenizers makes of its own text (no text yields the others);
  2. the ranks of the tokens are in the order of those last merges.

Pre-tokenisation is a regular expression in both, read by two different libraries (Oniguruma, fancy-regex): that part is
not proven here, but compared on samples by tokenizer.py. Over all of Unicode, alone and between letters, digits, blanks
and punctuation, the patterns of GPT-2, Llama 3 and o200k were found to cut alike (tiktoken 0.14, tokenizers 0.23).
"""

from __future__ import annotations

import contextlib
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import tiktoken
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, normalizers

from gateway.errors import NativeError
from gateway.native import no_panic

GPT2_PATTERN: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same behind a Digits(individual_digits) pre-tokeniser, whose pieces end before every digit.
GPT2_DIGITS_PATTERN: Final = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_NEVER_IN_UTF8: Final = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
_BATCH: Final = 4096
_NFC_SHRINKS: Final = 4
"""Bytes that are composed to one byte, at most: a sign of three that stands for an ASCII character, or three letters of
Hangul; and one for good measure."""
_SLICE: Final = 1 << 18
"""Characters that are looked at before another thread may have its turn."""
_ASCII: Final = re.compile(r"[\x00-\x7f]")
_BLANK_RUN: Final = 500_000
"""Characters of white space in a row; the regex engine of tiktoken 0.14 overflows its stack at about twice as many."""


class NotConvertibleError(ValueError):
    """This tokeniser is not, or is not provably, a byte-level BPE that tiktoken can do. The message says why."""


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF: Final = _byte_alphabet()


class ByteLevelBpe:
    """Encodes text that holds no added tokens. Thread-safe."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """Converts tokenizer.json, as the tokenizers library writes it. Takes seconds for a large vocabulary.

        Raises NotConvertibleError.
        """
        pattern = _pattern(spec)
        self._nfc = _is_nfc(spec["normalizer"])
        self._odd_marks = _odd_marks()
        ranks, self._ids = _ranks(spec["model"], {token["id"] for token in spec["added_tokens"]})
        try:
            with no_panic("tiktoken"):
                self._encoding = tiktoken.Encoding("kvasir", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        except ValueError as error:
            raise NotConvertibleError(f"tiktoken cannot read the pre-tokeniser's pattern: {error}") from None

    def encode(self, text: str) -> array[int]:
        """Token ids. Raises TokenizingError for the rare text that only the tokenizers library can do."""
        if len(text) >= _BLANK_RUN and has_blank_run(text, _BLANK_RUN):
            raise TokenizingError
        try:
            ids = self._encode(self.normalize(text))
        except NativeError:
            raise TokenizingError from None
        return ids if self._ids is None else array("I", map(self._ids.__getitem__, ids))

    @no_panic("tiktoken")
    def _encode(self, text: str) -> array[int]:
        if len(text) > _SLICE:
            with contextlib.suppress(ImportError):  # it needs numpy, and makes no list of Python's numbers
                found = array("I")
                found.frombytes(self._encoding.encode_to_numpy(text, disallowed_special=()).tobytes())
                return found
        return array("I", self._encoding.encode_ordinary(text))

    def shrinks(self, text: str) -> int:
        """By how much the text may become shorter when it is normalised, in bytes, at most."""
        return _NFC_SHRINKS if self._nfc and not text.isascii() else 1

    def normalize(self, text: str) -> str:
        """What the normaliser makes of it. Raises TokenizingError as `encode` does."""
        if not self._nfc or text.isascii():
            return text
        if any(self._odd_marks.search(text, at, at + _SLICE) for at in range(0, len(text), _SLICE)):
            raise TokenizingError
        parts: list[str] = []
        start = 0
        while start < len(text):  # slice by slice: nothing is composed with an ASCII character behind it
            behind = _ASCII.search(text, start + _SLICE)
            end = behind.start() if behind else len(text)
            parts.append(unicodedata.normalize("NFC", text[start:end]))
            start = end
        return "".join(parts)


def has_blank_run(text: str, chars: int) -> bool:
    """Whether so much white space, or more, is in a row."""
    width = max(chars // 2, 1)  # a run of twice that has one of these slices in it, whole
    if not any(text[at : at + width].isspace() for at in range(0, len(text) - width + 1, width)):
        return False
    return any(run.end() - run.start() >= chars for run in re.finditer(r"\s+", text))


def num_utf8_bytes(text: str) -> int:
    """Raises UnicodeEncodeError for lone surrogates."""
    if text.isascii():
        return len(text)
    return sum(len(text[at : at + _SLICE].encode()) for at in range(0, len(text), _SLICE))


class TokenizingError(Exception):
    """Not for tiktoken: the text would exceed a limit of its regex engine, or has characters of `_odd_marks`."""


def _pattern(spec: dict[str, Any]) -> str:
    """The pre-tokeniser as one regular expression."""
    pre = spec["pre_tokenizer"]
    stages = pre["pretokenizers"] if pre and pre["type"] == "Sequence" else [pre]
    *first, last = stages
    if not last or last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise NotConvertibleError("the pre-tokeniser is not byte-level, or puts a space in front")
    match first, last["use_regex"]:
        case [], True:
            return GPT2_PATTERN
        case [{"type": "Digits", "individual_digits": True}], True:
            return GPT2_DIGITS_PATTERN
        case [{"type": "Split", "behavior": "Isolated", "invert": False, "pattern": pattern}], False:
            return str(pattern["Regex"]) if "Regex" in pattern else re.escape(pattern["String"])
    raise NotConvertibleError("the pre-tokeniser is not one regular expression")


def _is_nfc(normalizer: dict[str, Any] | None) -> bool:
    if normalizer and normalizer["type"] == "Sequence" and len(normalizer["normalizers"]) <= 1:
        normalizer = next(iter(normalizer["normalizers"]), None)
    if normalizer is None:
        return False
    if normalizer["type"] != "NFC":
        raise NotConvertibleError(f"the normaliser is {normalizer['type']}")
    return True


@lru_cache(maxsize=1)
@no_panic("tokenizers")
def _odd_marks() -> re.Pattern[str]:
    """Combining marks that Python's NFC orders otherwise than tokenizers', which knows an older Unicode."""
    nfc = normalizers.NFC()
    marks = [chr(code) for code in range(0x300, 0x20000) if unicodedata.combining(chr(code))]
    odd = [
        mark
        for mark in marks
        for text in (f"a{mark}\u0301", f"e\u0301{mark}\u0323{mark}")
        if nfc.normalize_str(text) != unicodedata.normalize("NFC", text)
    ]
    return re.compile(f"[{''.join(odd)}]" if odd else "(?!)")


def _ranks(model: dict[str, Any], added: set[int]) -> tuple[dict[bytes, int], list[int] | None]:
    """tiktoken's table, and the id of each rank, or None when ranks are ids."""
    if (
        model["type"] != "BPE"
        or model.get("dropout")
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
        or model.get("byte_fallback")
    ):
        raise NotConvertibleError("the model is not a plain byte-level BPE")
    # 1. Tokens by what they spell; added tokens are not made by merges.
    vocabulary: dict[str, int] = {
        token: index for token, index in model["vocab"].items() if index not in added and BYTE_OF.keys() >= set(token)
    }
    singles = [char for char in BYTE_OF if char in vocabulary]
    if missing := {BYTE_OF[char] for char in BYTE_OF.keys() - vocabulary.keys()} - _NEVER_IN_UTF8:
        raise NotConvertibleError(f"{len(missing)} bytes are not in the vocabulary")
    # 2. Tokens that merges make, in the order of those merges, and tokens that are only ever a whole word.
    ranked = _merge_ranks(model["merges"])
    reachable, whole = _split_by_use(model, ranked, vocabulary)
    last_merges = _last_merges(ranked, reachable)
    merged = sorted(reachable, key=last_merges.__getitem__)
    # 3. Ids serve as ranks where their order is the merges' order, which is usual.
    tokens = singles + merged + whole
    ids = [vocabulary[token] for token in tokens]
    ascending = ids[len(singles) : len(singles) + len(merged)]
    ids_are_ranks = ascending == sorted(ascending)
    ranks = {_bytes(token): (ids[i] if ids_are_ranks else i) for i, token in enumerate(tokens)}
    unused = max(ranks.values()) + 1
    for byte in _NEVER_IN_UTF8:  # tiktoken wants all 256, also those that UTF-8 does not have
        if ranks.setdefault(bytes([byte]), unused) == unused:
            unused += 1
    return ranks, (None if ids_are_ranks else ids)


_Pair = tuple[str, str]


def _merge_ranks(merges: Sequence[str | Sequence[str]]) -> dict[_Pair, int]:
    """Both spellings of the file: "a b" and ["a", "b"]. The last of equal pairs counts, as in tokenizers."""
    ranked: dict[_Pair, int] = {}
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranked[left, right] = rank
    return ranked


@no_panic("tokenizers")
def _split_by_use(
    model: dict[str, Any], ranked: dict[_Pair, int], vocabulary: dict[str, int]
) -> tuple[list[str], list[str]]:
    """Tokens of several bytes that the merges make of their own text; then those that only a whole word can be.

    A token of the second kind has to end in three or more tokens when it is merged: two are what tiktoken would put
    together inside longer words. Without ignore_merges there is no second kind, and no text yields such a token.
    """
    whole_words = bool(model.get("ignore_merges"))
    bare = HfTokenizer(models.BPE(vocab=model["vocab"], merges=list(ranked)))
    reachable: list[str] = []
    whole: list[str] = []
    for batch in _batches([token for token in vocabulary if len(token) > 1]):
        for token, encoding in zip(batch, bare.encode_batch_fast(batch, add_special_tokens=False), strict=True):
            if encoding.ids == [vocabulary[token]]:
                reachable.append(token)
            elif whole_words:
                if len(encoding.ids) < 3:
                    raise NotConvertibleError(f"token {vocabulary[token]} is made of whole words, but not by merges")
                whole.append(token)
    return reachable, whole


def _last_merges(ranked: dict[_Pair, int], reachable: Sequence[str]) -> dict[str, int]:
    """The rank of the merge that makes each token of its own text.

    Several merges may make one token. Vocabularies that were converted from ranks list all of them side by side, and
    then any of their ranks serves; where they are spread over the list, the token is merged here to see which it is.
    """
    first: dict[str, int] = {}
    spread: set[str] = set()
    before = ""
    for (left, right), rank in sorted(ranked.items(), key=lambda item: item[1]):
        token = left + right
        if token != before and token in first:
            spread.add(token)
        first.setdefault(token, rank)
        before = token
    return {token: _last_merge(ranked, token) if token in spread else first[token] for token in reachable}


def _last_merge(ranked: dict[_Pair, int], token: str) -> int:
    parts, rank = list(token), -1
    while len(parts) > 1:
        rank, at = min((ranked.get(pair, len(ranked)), at) for at, pair in enumerate(pairwise(parts)))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return rank


def vocabulary_texts(vocabulary: Iterable[str]) -> Iterator[str]:
    """The whole vocabulary, many entries to a text, one to a line; without entries that are parts of characters."""
    entries: list[str] = []
    for token in vocabulary:
        try:
            entries.append(_bytes(token).decode())
        except (KeyError, UnicodeDecodeError):
            continue
    for start in range(0, len(entries), 200):
        yield "\n".join(entries[start : start + 200])


def _bytes(token: str) -> bytes:
    return bytes([BYTE_OF[char] for char in token])


def _batches(items: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]
