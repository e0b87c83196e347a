"""Token ids -> text, piece by piece: whole characters only, special tokens left out, stop strings cut exactly.

The text is what the tokens add behind a prompt: the space in front of a first word stays. However the tokens are cut
into pieces, the pieces of text joined are the same. Two ways: where every token stands for certain bytes (byte-level
BPE, SentencePiece), a table and an incremental UTF-8 decoder; else the tokenizers library decodes a short window again
for each token. Stop strings are looked for in the characters as they come; what is left goes out in whole signs
(signs.py). Implements reader.TextDecoder.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Protocol

import regex
from tokenizers import Tokenizer as HfTokenizer

from gateway.native import no_panic
from gateway.prompt.byte_level import BYTE_OF
from gateway.types import Spelled

_WINDOW_TOKENS: Final = 16
"""Tokens after which a window is let go that still ends in an unfinished character."""

_SPACE_MARK: Final = "▁"


class Characters(Protocol):
    """One answer's tokens as text, in whole characters and no larger signs."""

    def feed(self, tokens: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Decoding:
    """What all decoders of one tokeniser share. Read-only once it is made."""

    def __init__(self, hf: HfTokenizer, spec: dict[str, Any]) -> None:
        """`spec` is what the library writes of `hf`, which is kept only where it is needed."""
        specials = {token["id"]: token["content"] for token in spec["added_tokens"] if token["special"]}
        table = _byte_table(spec, frozenset(specials))
        self._specials: dict[int, str] = specials
        self._make_text: Callable[[frozenset[str]], Characters]
        self._spell: Callable[[int], bytes]
        if table is not None:
            tables = lru_cache(4)(partial(_with_specials, table, specials))
            self._make_text = lambda keep: _TableText(tables(keep))
            self._spell = partial(_look_up, table)
        else:
            with no_panic("tokenizers"):
                seed = hf.encode("a", add_special_tokens=False).ids
            self._make_text = partial(_make_window, hf, seed, specials)
            self._spell = partial(_spell_alone, hf, seed)

    def decoder(self, stop: tuple[str, ...], keep: frozenset[str] = frozenset()) -> Decoder:
        """For one answer; empty stop strings stop nothing. The special strings in `keep` are text, too."""
        return Decoder(self._make_text(keep), [string for string in stop if string])

    def characters(self, keep: frozenset[str] = frozenset()) -> Characters:
        """For one answer, without stop strings; nothing but parts of characters is held back."""
        return self._make_text(keep)

    def spell(self, token: int) -> Spelled:
        """A token by itself. Where tokens do not stand for certain bytes, as it is written behind another one."""
        if (name := self._specials.get(token)) is not None:
            return Spelled(name, None)
        written = self._spell(token)
        return Spelled(written.decode(errors="replace"), written)


class Decoder:
    """Tokens of one answer into text. Holds back unfinished characters and what may become a stop string.

    met  the stop string that was met; what follows is not part of the answer
    """

    def __init__(self, text: Characters, stop: Sequence[str]) -> None:
        self.met: str | None = None
        self._text = text
        self._stops = StopStrings(stop) if stop else None
        self._signs = Signs()

    def feed(self, tokens: Sequence[int]) -> str:
        """Nothing more comes after a stop string, and nothing is held back then."""
        if self._stops is None:
            return self._signs.feed(self._text.feed(tokens))
        if self.met:
            return ""
        text = self._signs.feed(self._watch(self._stops, self._text.feed(tokens)))
        return text + self._signs.release() if self.met else text

    def flush(self) -> str:
        """Bytes that never became a character come as U+FFFD. A stop string may show up here, too."""
        if self.met:
            return ""
        text = self._text.flush()
        if self._stops is not None:
            text = self._watch(self._stops, text)
            text += "" if self.met else self._stops.release()
        return self._signs.feed(text) + self._signs.release()

    def _watch(self, stops: StopStrings, text: str) -> str:
        text = stops.feed(text)
        self.met = stops.met
        return text


class StopStrings:
    """Finds the stop string that is complete first (of several that end there, the longest) in text that comes in
    pieces. Knuth-Morris-Pratt for each: the work per character is constant however the strings look. Its tables grow
    with what was matched, so that an answer which never comes near a long stop string pays nothing for it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty."""
        self.met: str | None = None
        self._stops = [(stop, [0]) for stop in stops]  # each with the table `_grow` makes
        self._firsts = {stop[0] for stop in stops}
        self._matched = [0] * len(stops)  # characters of each that the text ends with
        self._held = ""  # as long as the longest of those

    def feed(self, text: str) -> str:
        """What is certain not to belong to a stop string. After `met`, it is the last there is."""
        if not self._held and not any(first in text for first in self._firsts):
            return text
        whole = self._held + text
        for at, char in enumerate(text, len(self._held) + 1):
            if length := self._step(char):
                self.met = whole[at - length : at]
                return whole[: at - length]
        cut = len(whole) - max(self._matched)
        self._held = whole[cut:]
        return whole[:cut]

    def release(self) -> str:
        """What is held back, because no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """Length of the longest stop string that ends with this character, or 0."""
        longest = 0
        for i, (stop, borders) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            matched += stop[matched] == char
            if matched > len(borders):
                _grow(borders, stop)
            self._matched[i] = matched
            if matched == len(stop):
                longest = max(longest, matched)
        return longest


def _grow(borders: list[int], text: str) -> None:
    """The table has, for each prefix of `text`, the length of its longest proper prefix that is also its end; here it
    gets that of the next prefix. There is one for the first character."""
    at = len(borders)
    length = borders[-1]
    while length and text[at] != text[length]:
        length = borders[length - 1]
    borders.append(length + (text[at] == text[length]))


class _TableText:
    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        table = self._table
        return self._utf8.decode(b"".join([table[token] for token in tokens if token < len(table)]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowText:
    """The tokens behind the last text that was given out are decoded together with those that gave it."""

    def __init__(self, hf: HfTokenizer, seed: Sequence[int], skipped: frozenset[int]) -> None:
        """`seed` stands for the prompt, so that the answer's first space is not taken for the beginning of a text."""
        self._hf = hf
        self._skipped = skipped
        self._base, self._new = list(seed), list[int]()

    def feed(self, tokens: Sequence[int]) -> str:
        return "".join([self._feed(token) for token in tokens if token not in self._skipped])

    def flush(self) -> str:
        text, self._new = self._pending(), []
        return text

    def _feed(self, token: int) -> str:
        self._new.append(token)
        text = self._pending()
        if (not text or text.endswith("\ufffd")) and len(self._new) < _WINDOW_TOKENS:
            return ""
        self._base, self._new = self._new, []
        return text

    def _pending(self) -> str:
        if not self._new:
            return ""
        with no_panic("tokenizers"):
            whole = self._hf.decode(self._base + self._new, skip_special_tokens=False)
            return whole[len(self._hf.decode(self._base, skip_special_tokens=False)) :]


def _make_window(
    hf: HfTokenizer, seed: Sequence[int], specials: Mapping[int, str], keep: frozenset[str]
) -> _WindowText:
    return _WindowText(hf, seed, frozenset(token for token, text in specials.items() if text not in keep))


def _with_specials(table: list[bytes], specials: Mapping[int, str], keep: frozenset[str]) -> list[bytes]:
    """The table with the special tokens in `keep` spelled out."""
    if not keep:
        return table
    kept = list(table)
    for token, text in specials.items():
        if text in keep:
            kept[token] = text.encode()
    return kept


def _look_up(table: Sequence[bytes], token: int) -> bytes:
    return table[token] if token < len(table) else b""


def _spell_alone(hf: HfTokenizer, seed: Sequence[int], token: int) -> bytes:
    with no_panic("tokenizers"):
        return str(hf.decode([*seed, token]))[len(hf.decode(seed)) :].encode()


def _byte_table(spec: dict[str, Any], special_ids: frozenset[int]) -> list[bytes] | None:
    """The bytes of every token, none for special ones; None when the decoder is not of a kind that has such a table."""
    spell = _spelling(spec["decoder"])
    if spell is None:
        return None
    vocab = spec["model"]["vocab"]
    tokens = vocab.items() if isinstance(vocab, dict) else ((piece, index) for index, (piece, _) in enumerate(vocab))
    spelled = {index: spell(token) for token, index in tokens}
    spelled |= {token["id"]: token["content"].encode() for token in spec["added_tokens"]}
    spelled |= dict.fromkeys(special_ids, b"")
    return [spelled.get(index, b"") for index in range(max(spelled, default=-1) + 1)]


def _spelling(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    """How this decoder spells a token in bytes, wherever the token stands."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return _spell_bytes
        case ["Metaspace"] if steps[0]["replacement"] == _SPACE_MARK:
            return _spell_spaces
        case ["Replace", "ByteFallback", "Fuse"] | ["Replace", "ByteFallback", "Fuse", "Strip"]:
            if steps[0]["pattern"] == {"String": _SPACE_MARK} and steps[0]["content"] == " ":
                return _spell_byte_fallback
    return None


def _spell_bytes(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _spell_spaces(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode()


def _spell_byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return _spell_spaces(token)


MAX_HELD: Final = 64
"""Characters of one sign that are held back. The longest emoji in use has ten, a flag of tags seven."""

_CLUSTER: Final = regex.compile(r"\X")
_GOES_ON: Final = regex.compile(
    r"[\p{Extended_Pictographic}\p{Regional_Indicator}\p{Emoji_Modifier}"
    r"\p{M}\u200D\U000E0020-\U000E007F"  # marks, keycaps and variation selectors; joiner; tags
    r"\p{GCB=Prepend}\p{GCB=L}\p{GCB=V}\p{GCB=T}]"  # Hangul in its parts: a whole syllable is a plain letter
)


class Signs:
    """Cuts text that comes in chunks so that no extended grapheme cluster (Unicode Standard Annex 29: a family of
    emoji, a flag, a letter with its marks) is split where that can be foreseen: the last one is held back while it is
    of a kind that often goes on. A plain letter or digit is not: each chunk would then be a letter behind."""

    def __init__(self) -> None:
        self._held = ""  # one sign, or the rest of one

    def feed(self, text: str) -> str:
        """What was held back and `text`, but for a last sign that may go on. ASCII alone is never held back."""
        if not self._held and (text.isascii() or not _GOES_ON.search(text)):
            return text
        whole = self._held + text
        start = _last_sign(whole)
        self._held = whole[start:]
        if len(self._held) > MAX_HELD or not _GOES_ON.search(self._held):
            self._held = ""
            return whole
        return whole[:start]

    def release(self) -> str:
        """What is held back, because no more text comes."""
        held, self._held = self._held, ""
        return held


def _last_sign(text: str) -> int:
    """Where it begins. Flags are pairs, counted from the front, so this reads forward."""
    start = 0
    for found in _CLUSTER.finditer(text):
        start = found.start()
    return start
