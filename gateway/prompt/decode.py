"""Token ids -> text, chunk by chunk: whole characters only, special tokens left out, stop strings cut exactly.

The text is what the tokens add behind a prompt: the space in front of a first word stays. A table has the bytes of
every token, and an incremental UTF-8 decoder joins them, so the text is the same however the tokens are cut into
chunks. Stop strings are looked for in the characters as they arrive; the rest is released in whole grapheme clusters.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Any, Final

import regex
from tokenizers import Tokenizer as HfTokenizer

from gateway.native import no_panic
from gateway.prompt.byte_level import BYTE_OF
from gateway.types import Spelled

_SPACE_MARK: Final = "▁"


class Decoding:
    """What all decoders of one tokeniser share. Read-only once it is made."""

    def __init__(self, hf: HfTokenizer, spec: dict[str, Any]) -> None:
        """`spec` is what the library writes of `hf`."""
        self._specials: dict[int, str] = {one["id"]: one["content"] for one in spec["added_tokens"] if one["special"]}
        spell = _spelling(spec["decoder"])
        self._table = _decode_each(hf) if spell is None else _byte_table(spec, spell)

    def decoder(self, stop: tuple[str, ...], keep: frozenset[str] = frozenset()) -> Decoder:
        """For one answer; empty stop strings stop nothing. The special strings in `keep` are text, too."""
        return Decoder(self.characters(keep), [string for string in stop if string])

    def characters(self, keep: frozenset[str] = frozenset()) -> Characters:
        """For one answer, without stop strings; only parts of characters are held back."""
        specials = self._specials
        return Characters(
            self._table, {token for token in specials if specials[token] not in keep} if keep else specials
        )

    def spell(self, token: int) -> Spelled:
        """A token by itself. Where tokens do not stand for certain bytes, as it is written behind another one."""
        if (name := self._specials.get(token)) is not None:
            return Spelled(name, None)
        written = self._table[token] if token < len(self._table) else b""
        return Spelled(written.decode(errors="replace"), written)


class Characters:
    """One answer's tokens as text, in whole characters. Bytes that never become a character are U+FFFD."""

    def __init__(self, table: Sequence[bytes], skipped: Container[int]) -> None:
        self._table, self._skipped = table, skipped
        self._rest = b""  # the beginning of a character

    def feed(self, tokens: Sequence[int]) -> str:
        table, skipped = self._table, self._skipped
        written = [table[token] for token in tokens if token < len(table) and token not in skipped]
        data = self._rest + b"".join(written)
        text, size = codecs.utf_8_decode(data, "replace")
        self._rest = data[size:]
        return text

    def flush(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


class Decoder:
    """Tokens of one answer into text. Holds back unfinished characters and what may become a stop string.

    met  the stop string that was met; what follows is not part of the answer
    """

    def __init__(self, characters: Characters, stop: Sequence[str]) -> None:
        self.met: str | None = None
        self._characters = characters
        self._stops = StopStrings(stop)
        self._signs = Signs()

    def feed(self, tokens: Sequence[int]) -> str:
        """Nothing more comes after a stop string, and nothing is held back then."""
        if self.met:
            return ""
        text = self._signs.feed(self._stops.feed(self._characters.feed(tokens)))
        self.met = self._stops.met
        return text + self._signs.release() if self.met else text

    def flush(self) -> str:
        """Bytes that never became a character come as U+FFFD. A stop string may show up here, too."""
        if self.met:
            return ""
        text = self._stops.feed(self._characters.flush())
        self.met = self._stops.met
        text += "" if self.met else self._stops.release()
        return self._signs.feed(text) + self._signs.release()


class StopStrings:
    """Finds the stop string that is complete first (of several that end there, the longest) in text that arrives in
    chunks."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty."""
        self.met: str | None = None
        self._stops = stops
        self._held = ""  # the longest beginning of a stop string that the text ends with

    def feed(self, text: str) -> str:
        """What is certain not to belong to a stop string. After `met`, it is the last there is."""
        if not self._stops:
            return text
        text = self._held + text
        complete = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if complete:
            end, _, self.met = min(complete)
            return text[: end - len(self.met)]
        cut = min(_begins_at(stop, text) for stop in self._stops)
        self._held = text[cut:]
        return text[:cut]

    def release(self) -> str:
        """What is held back, because no more text comes."""
        held, self._held = self._held, ""
        return held


def _begins_at(stop: str, text: str) -> int:
    """Where the longest beginning of `stop` starts that `text` ends with; the end of the text when there is none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)


def _byte_table(spec: dict[str, Any], spell: Callable[[str], bytes]) -> list[bytes]:
    """The bytes of every token."""
    vocab = spec["model"]["vocab"]
    tokens = vocab.items() if isinstance(vocab, dict) else ((piece, index) for index, (piece, _) in enumerate(vocab))
    spelled = {index: spell(token) for token, index in tokens}
    spelled |= {token["id"]: token["content"].encode() for token in spec["added_tokens"]}
    return [spelled.get(index, b"") for index in range(max(spelled, default=-1) + 1)]


@no_panic("tokenizers")
def _decode_each(hf: HfTokenizer) -> list[bytes]:
    """What the library writes for each token behind another one."""
    before = hf.encode("a", add_special_tokens=False).ids
    start = len(hf.decode(before))
    every = [[*before, token] for token in range(hf.get_vocab_size(with_added_tokens=True))]
    return [text[start:].encode() for text in hf.decode_batch(every, skip_special_tokens=False)]


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
