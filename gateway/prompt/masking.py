"""Keeps users' text from becoming special tokens.

Before the template runs, every string that came from outside is masked: a mark is put behind the first character of
each special string in it, so that none is left to be found. What is found in the rendered text is then the template's
own, the prompt is cut there, and the segments between the cuts are unmasked. Pure text; knows no tokeniser.

Mark and codes are rare printable characters that neither the model's template nor its added tokens contain. In masked
text a code follows every mark, which makes the masking reversible for any text, marks included:

    mark, typed    a mark that was in the text
    mark, break    nothing: it breaks a special string, or the beginning of one at the end of the text
    mark, other    a special token of one character, which cannot be broken
    mark, marker   nothing: a breakpoint's place in text that is rendered to find it, and never in text to be tokenised
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from gateway.types import MAX_MARKERS

_CANDIDATES: Final = "⸻⸺⸹⸸⸷⸶⸵⸴⹀⹁⹂⹃⹄⹅⹆⹇⹈⹉"  # printable, caseless, not whitespace, the same in every normal form
SLICE: Final = 1 << 20
"""Characters that are looked through at once: about a millisecond."""


class Masking:
    """Masks and unmasks for one set of special strings.

    `mask` leaves no special string in its result, nor the beginning of one at its end, so that two masked strings put
    side by side hold none either; `unmask` is its inverse.
    """

    def __init__(self, specials: Iterable[str], avoid: str = "") -> None:
        """`avoid` is text that is not masked and must not contain the mark: the template, the other added tokens."""
        specials = {special for special in specials if special}
        longer = {special for special in specials if len(special) > 1}
        unused = _unused(avoid + "".join(specials))
        self.mark: Final = next(unused)
        typed, broken = next(unused), next(unused)
        self._break: Final = self.mark + broken
        codes = {self.mark: typed} | {single: next(unused) for single in sorted(specials - longer)}
        self._coded = str.maketrans({char: self.mark + code for char, code in codes.items()})
        self.markers: Final = tuple(self.mark + next(unused) for _ in range(MAX_MARKERS + 1))
        self._meaning = {broken: ""} | {marker[-1]: "" for marker in self.markers}
        self._meaning |= {code: char for char, code in codes.items()}
        self.sequences: Final = tuple(self.mark + code for code in self._meaning)
        self._marked = re.compile(f"{re.escape(self.mark)}(.)", re.DOTALL)
        self._watched = tuple(codes)  # replaced wherever they are
        self._firsts = tuple(sorted({special[0] for special in longer}))
        self._triggers = self._firsts + self._watched
        self._needed = _needed(longer)
        self._prefixes = {special[:i] for special in longer for i in range(1, len(special))}
        self._max_prefix = max(map(len, self._prefixes), default=0)
        self._pattern = re.compile(alternatives(longer)) if longer else None

    def mask(self, text: str) -> str:
        """The same string object when there is nothing to mask, which a few memchr-like scans find out."""
        for char in self._triggers:
            if char in text:
                return self._mask(text)
        return text

    def mask_data(self, value: Any) -> Any:
        """A copy of JSON-like data with every string in it masked, the keys of objects too."""
        kind = type(value)
        if kind is str:
            return self.mask(value)
        if kind is dict:
            mask, mask_data = self.mask, self.mask_data
            return {mask(key): mask(item) if type(item) is str else mask_data(item) for key, item in value.items()}
        if kind is list or kind is tuple:
            return [self.mask_data(item) for item in value]
        return value

    def unmask(self, text: str) -> str:
        if self.mark not in text:
            return text
        return self._marked.sub(lambda found: self._meaning[found[1]], text)

    def insert(self, masked: str, chars: int, marker: str) -> str:
        """Masked text with a marker behind its first `chars` characters, counted in the text as it was."""
        if self.mark not in masked:
            return masked[:chars] + marker + masked[chars:]
        longer = 0  # characters that the masked text up to here has more than what it stands for
        for found in self._marked.finditer(masked):
            if found.start() - longer >= chars:
                break
            longer += len(found[0]) - len(self._meaning[found[1]])
        at = chars + longer
        return masked[:at] + marker + masked[at:]

    def _mask(self, text: str) -> str:
        # 1. Marks of the text's own, so that every mark from here on is one of ours.
        if any(char in text for char in self._watched):
            text = "".join([text[at : at + SLICE].translate(self._coded) for at in range(0, len(text), SLICE)])
        # 2. Beginnings of special strings at the end.
        tail = text[-self._max_prefix :] if self._max_prefix else ""
        for first in self._firsts:
            if first in tail:
                text = self._mask_end(text)
                break
        # 3. Whole special strings, overlapping ones too.
        if self._pattern and self._needed in text:
            text = self._mask_whole(text, self._pattern)
        return text

    def _mask_whole(self, text: str, pattern: re.Pattern[str]) -> str:
        masked, done = io.StringIO(), 0
        for found in find_all(pattern, text, 0, self._max_prefix + 1, overlapping=True):
            masked.write(text[done : found.start() + 1])
            masked.write(self._break)
            done = found.start() + 1
        masked.write(text[done:])
        return masked.getvalue() if done else text

    def _mask_end(self, text: str) -> str:
        # From the right, so that positions further left stay valid.
        for start in range(len(text) - 1, max(-1, len(text) - 1 - self._max_prefix), -1):
            if text[start] in self._firsts and text[start:].replace(self._break, "") in self._prefixes:
                text = text[: start + 1] + self._break + text[start + 1 :]
        return text


def find_all(
    pattern: re.Pattern[str], text: str, start: int, longest: int, *, overlapping: bool = False
) -> Iterator[re.Match[str]]:
    """As `pattern.finditer(text, start)`, for matches of `longest` characters at most, of a pattern that does not look
    around; `overlapping` finds those that begin inside of others, too. In a long text other threads have their turn
    after each SLICE that holds none."""
    end = start
    while start < len(text):
        end = max(end, start + SLICE)
        found = pattern.search(text, start, min(end + longest, len(text)))
        if found is None or found.start() >= end:
            start = end
            continue
        yield found
        start = found.start() + 1 if overlapping else found.end()


def alternatives(strings: Iterable[str]) -> str:
    """A regular expression that finds the leftmost, and there the longest, of `strings`, of which there is one.

    Written as a tree of common beginnings: what begins like hundreds of them and is none is told apart in few steps.
    """
    tree: dict[str, Any] = {}
    for string in strings:
        node = tree
        for char in string:
            node = node.setdefault(char, {})
        node[_END] = {}
    return _write(tree)


_END: Final = ""  # in a tree: a string may end here


def _write(tree: dict[str, Any]) -> str:
    branches = [re.escape(char) + _write(rest) for char, rest in sorted(tree.items()) if char != _END]
    if not branches:
        return ""
    if len(branches) == 1 and _END not in tree:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + ("?" if _END in tree else "")


def _unused(taken: str) -> Iterator[str]:
    """Candidates that are not in `taken`; there are more of them than a template has characters."""
    for char in _CANDIDATES:
        if char not in taken:
            yield char
    yield from (char for char in map(chr, range(0x20000, 0x2A6D0)) if char not in taken)  # CJK extension B


def _needed(specials: set[str]) -> str:
    """A character that all of `specials` contain, the rarest in ordinary text; empty when there is none."""
    common = set.intersection(*map(set, specials)) if specials else set()
    return min(common or {""}, key=lambda char: (char.isalnum(), char in "<>[]_ -", char))
