"""What a vector may not tell apart in a text: numbers, negations, literals, names, times, roles.

Pure. Computed once for each text, when it is asked or remembered; guard.py compares two of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gateway.responses.semantic.lexicon import COURTESIES, FILLERS, NEGATIONS, NUMBERS, ROLES, STOP_WORDS, TIMES, UNITS

MAX_CHARS: Final = 4000
"""Of a text that is looked at: more than the tokens that the encoder takes have."""

MANY_SMALL: Final = 3
"""Words like "the" with a capital, inside of sentences."""

_TOKEN: Final = re.compile(
    r"""(?P<quoted>"[^"\n]{1,200}"|“[^”\n]{1,200}”|`[^`'\n]{1,200}[`']|(?<!\w)'[^'\n]{1,80}'(?!\w))
      |(?P<path>(?<![\w.])(?:https?://|www\.|~/|\.{0,2}/(?=\w)|\$\{?\w)\S{1,300}
               |[\w.+-]{1,64}@[\w-]{1,64}\.\w+
               |(?<!\S)[^\s*]{0,100}\*\S{0,100}
               |\w{1,64}(?:/[\w.-]{1,64}){2,}\S{0,100})
      |(?P<flag>(?<![\w-])--?[A-Za-z][\w-]*)
      |(?P<sign>(?<!\w)[A-Za-z]{1,8}(?:\+\+|\#)(?!\w))
      |(?P<number>\d+(?:,\d{3})*(?:\.\d+)?(?:[kK]\b)?)
      |(?P<word>[^\W\d_]+(?:['’][^\W\d_]+)?)
      |(?P<end>[!?;\n]+|[.:]+(?!\w))""",
    re.VERBOSE,
)
_SQUASHED: Final = re.compile(r"[\W_]+")
_DIGITS: Final = re.compile(r"\d+")
_LETTERS: Final = re.compile(r"[^\W\d_]+")
_ENDINGS: Final = ("ies", "ing", "ed", "es", "s")
_ALIASES: Final = {"US": "usa"}
"""Names that would be other words in lower case."""

_IDIOMS: Final = frozenset(("or", "if", "whether", "not"))
"""Words before a "not" that denies nothing: "is it safe or not?", "if not, why?". """


def stem(word: str) -> str:
    """Without the commonest endings: enough to see that two words are one."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            word = word[: -len(ending)]
            if ending == "ies":
                return word + "y"
            if ending in ("ing", "ed") and word[-1] == word[-2] and word[-1] not in "lsz":
                return word[:-1]
            break
    return word[:-1] if word.endswith("e") and len(word) > 3 else word


COURTESY_STEMS: Final = frozenset(map(stem, COURTESIES))
FILLER_STEMS: Final = frozenset(map(stem, FILLERS))


@dataclass(frozen=True, slots=True)
class Features:
    """Of one text; everything in lower case.

    lowered   the text
    squashed  its letters and digits, nothing between them
    words     its words, as they are and stemmed
    content   stems of the words that say something, in their order, and numbers
    parts     stems by sentence, without numbers and without sentences that only greet or thank
    numbers   as decimal strings; `one`: whether a word is in it that may stand for the number 1
    counted   number -> stem of the word that it counts
    units     number -> its unit, where it has one
    negative  whether its negations are odd in number
    literals  what is quoted, paths, flags: squashed, where letters or digits are left of them then
    names     words with a capital that do not begin a sentence
    times     weekdays, months, parts of the day
    roles     role of a preposition -> stems of the words behind it; "condition" itself where only stop words follow
    """

    lowered: str
    squashed: str
    words: frozenset[str]
    content: tuple[str, ...]
    parts: tuple[frozenset[str], ...]
    numbers: frozenset[str]
    one: bool
    counted: Mapping[str, str]
    units: Mapping[str, str]
    negative: bool
    literals: frozenset[str]
    names: frozenset[str]
    times: frozenset[str]
    roles: Mapping[str, frozenset[str]]


def features(text: str) -> Features:
    """Never raises, whatever the text is. Has no memo: its timing would tell tenants what others have sent."""
    reading = _Reading()
    text = text[:MAX_CHARS]
    for found in _TOKEN.finditer(text):
        kind, token = found.lastgroup, found.group()
        if kind == "word":
            reading.word(token)
        elif kind == "number":
            reading.number(token)
        elif kind == "end":
            reading.end()
        else:
            reading.literal(token, kind)
    return reading.features(text)


def _sentence_stems(content: Sequence[str]) -> frozenset[str]:
    """Stems of a sentence without numbers and courtesies. Empty for a courtesy with fillers ("quick question")."""
    stems = frozenset(word for word in content if not word[0].isdigit())
    rest = stems - COURTESY_STEMS
    return frozenset() if rest != stems and rest <= FILLER_STEMS else rest


class _Reading:
    """A text so far.

    opening  at the beginning of a sentence
    role     of a preposition that still has no object
    pending  the number that has counted nothing yet
    last     the word before
    """

    def __init__(self) -> None:
        self.words: set[str] = set()
        self.content: list[str] = []
        self.ends: list[int] = [0]  # where sentences end in it
        self.numbers: set[str] = set()
        self.counted: dict[str, str] = {}
        self.units: dict[str, str] = {}
        self.literals: set[str] = set()
        self.names: set[str] = set()
        self.times: set[str] = set()
        self.roles: dict[str, set[str]] = {}
        self.negations = self.small_capitals = 0
        self.opening = True
        self.role: str | None = None
        self.pending: str | None = None
        self.last = ""

    def word(self, token: str) -> None:
        lower = token if token.islower() else _ALIASES.get(token) or token.lower()
        if "'" in lower or "’" in lower:
            lower = lower.replace("’", "").replace("'", "")
            if token[-2] in "'’" and lower.endswith("s"):
                lower = lower[:-1]
            elif lower.endswith("nt"):
                self.negations += lower not in NEGATIONS
        self.words.add(lower)
        if lower in NEGATIONS:
            self.negations += not (lower == "not" and self.last in _IDIOMS)
        elif lower == "only" and self.last == "not":
            self.negations -= 1
        elif (value := NUMBERS.get(lower)) is not None:
            self.numbers.add(value)
            self.pending = value
        else:
            self._plain(token, lower)
        self.opening = False
        self.last = lower

    def _plain(self, token: str, lower: str) -> None:
        self._time(lower)
        if self.pending is not None and lower in UNITS:
            self.units[self.pending] = UNITS[lower]
        if lower in ROLES:
            self.role = ROLES[lower]
        elif lower not in STOP_WORDS:
            root = stem(lower)
            self.words.add(root)
            self._content(root)
            if self.pending is not None:
                self.counted[self.pending] = root
                self.pending = None
            if token[0].isupper() and (not self.opening or token[1:2].isupper()):
                self.names.add(lower)
        elif token[0].isupper() and not self.opening and lower != "i":
            self.small_capitals += 1

    def _time(self, lower: str) -> None:
        time = TIMES.get(lower)
        if time is None or self.last == "good":  # "good evening" greets
            return
        if self.pending is not None or lower not in ("am", "sat", "sun", "mon"):
            self.times.add(time)

    def _content(self, root: str) -> None:
        self.content.append(root)
        if self.role is not None:
            self.roles.setdefault(self.role, set()).add(root)
            self.role = None

    def number(self, token: str) -> None:
        digits = token.rstrip("kK").replace(",", "")
        if digits != token or "." in digits:
            value = f"{float(digits) * (1000 if token[-1] in 'kK' else 1):.12g}"
        else:
            value = digits.lstrip("0") or "0"
        self.numbers.add(value)
        self._content(value)
        self.pending = value
        self.opening = False

    def end(self) -> None:
        if self.role == "condition":
            self.roles.setdefault(self.role, set()).add(self.role)
        self.ends.append(len(self.content))
        self.opening = True
        self.role = None
        self.last = ""

    def literal(self, token: str, kind: str | None) -> None:
        inner = token[1:-1] if kind == "quoted" else token
        lower = inner.lower()
        if kind == "sign" or (kind == "flag" and len(token) == 2):
            self.literals.add(token)  # -r is not -R
        elif literal := _SQUASHED.sub("", lower) or inner.strip():
            self.literals.add(literal)
        if kind != "flag":
            self.numbers.update(_DIGITS.findall(inner))
            for word in _LETTERS.findall(lower):
                self.words.update((word, stem(word)))
        self._content(lower)
        self.opening = False

    def features(self, text: str) -> Features:
        lowered = text.lower()
        self.end()
        parts = [_sentence_stems(self.content[start:end]) for start, end in pairwise(self.ends)]
        shouted = self.small_capitals >= MANY_SMALL  # or a title: capitals say nothing of names
        return Features(
            lowered=lowered,
            squashed=_SQUASHED.sub("", lowered),
            words=frozenset(self.words),
            content=tuple(self.content),
            parts=tuple(part for part in parts if part),
            numbers=frozenset(self.numbers),
            one=not self.words.isdisjoint(("one", "first")),
            counted=self.counted,
            units=self.units,
            negative=self.negations % 2 == 1,
            literals=frozenset(self.literals),
            names=frozenset() if shouted else frozenset(self.names),
            times=frozenset(self.times),
            roles={role: frozenset(objects) for role, objects in self.roles.items()},
        )
