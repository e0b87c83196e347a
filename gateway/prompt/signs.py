"""Text that comes in pieces, cut so that no sign of several characters is split where that can be foreseen.

A sign is an extended grapheme cluster (Unicode Standard Annex 29): a family of emoji, a flag, a letter with its marks.
The last one of the text so far is held back while it is of a kind that often goes on. A plain letter or digit is not
held back, because each piece would then be a letter behind: a mark that comes in a piece of its own follows the letter
there. Pieces joined are the text, unchanged. Knows neither tokens nor stop strings; decode.py does.
"""

from __future__ import annotations

from typing import Final

import regex

MAX_HELD: Final = 64
"""Characters of one sign that are held back. The longest emoji in use has ten, a flag of tags seven."""

_CLUSTER: Final = regex.compile(r"\X")
_GOES_ON: Final = regex.compile(
    r"[\p{Extended_Pictographic}\p{Regional_Indicator}\p{Emoji_Modifier}"
    r"\p{M}\u200D\U000E0020-\U000E007F"  # marks, keycaps and variation selectors; joiner; tags
    r"\p{GCB=Prepend}\p{GCB=L}\p{GCB=V}\p{GCB=T}]"  # Hangul in its parts: a whole syllable is a plain letter
)


class Signs:
    """One text."""

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
