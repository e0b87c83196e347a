"""Speculation: which tokens a sequence may go on with, and how many of them are worth a row of the step.

A step computes drafted tokens behind a sequence's last one and draws at each of their positions as it would without
them; drafts are accepted while they are what was drawn, so speculation changes no token, only how many a step gives.
Drafts come from the text itself (prompt lookup, arXiv 2304.04487): what followed the last tokens where they stood
before. How often that was right is learned for each sequence by the length of the match, also from what was not
drafted, so a sequence that copies nothing costs no row. What a row costs is learned from the seconds of steps.

Pure: no torch, no clock, no blocks. engine/planner.py asks, engine/compute/runner.py verifies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf
from typing import Final

from engine.sequence import Sequence

MAX_DRAFTS: Final = 16  # tokens behind one sequence in one step
GRAM: Final = 3  # tokens that have to agree
LONGEST: Final = 24  # tokens of a match that are compared
CANDIDATES: Final = 8  # earlier places that are compared
INDEXED_AT_ONCE: Final = 4096  # tokens, about a millisecond: a long prompt is indexed in several steps
CLASSES: Final = (4, 8, 16)  # a match is in the class of how many of these it reaches
PRIORS: Final = (0.3, 0.5, 0.8, 0.9)  # chance that the token behind a match of each class is right, before it is known
MODEL_DRAFTS: Final = 8  # of the draft model, in one step
CATCH_UP: Final = 256  # tokens of one sequence that the draft model computes; what is before them is left out
LEAST_AHEAD: Final = 64  # tokens that a sequence is taken to go on for; then as many as it has generated
MARGIN: Final = 2  # catching up has to save so many times what it costs: both are estimates
PROBE_DRAFTS: Final = 4  # of the draft model, now and then, where drafting is not worth it
PROBE_SHARE: Final = 0.01  # of the time
MEMORY: Final = 0.9  # of what was learned, with each token of the same class
LEAST_CHANCE: Final = 0.05  # of a draft


class PromptLookup:
    """Where the last tokens of a text stood before: positions chained by a hash of GRAM tokens, as compressors of the
    LZ77 family keep them. 8 bytes for each token."""

    def __init__(self) -> None:
        self._heads = array("i", [0]) * 1024  # by hash, the end of the last such run; 0: none
        self._before = array("i")  # of each run that ends at GRAM, GRAM + 1, ...: the end of the one before

    def find(self, tokens: array[int]) -> tuple[int, int]:
        """Length of the longest earlier run that is equal to the text's end, 0 without one, and where it ended; the
        latest of equals. Never the end itself."""
        end = len(tokens)
        self._index(tokens, end)
        if end < GRAM:
            return 0, 0
        at, best, place = self._heads[self._hash(tokens, end)], 0, 0
        for _ in range(CANDIDATES):
            if not at or best == LONGEST:
                break
            length, most = 0, min(LONGEST, at)
            while length < most and tokens[at - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > best:
                best, place = length, at
            at = self._before[at - GRAM]
        return (best, place) if best >= GRAM else (0, 0)

    def _index(self, tokens: array[int], end: int) -> None:
        """Takes in the runs that end before `end`, or the next INDEXED_AT_ONCE of them."""
        first = len(self._before) + GRAM
        end = min(end, first + INDEXED_AT_ONCE)
        if end > 2 * len(self._heads):
            self._heads, self._before = array("i", [0]) * (1 << end.bit_length()), array("i")
            first, end = GRAM, min(end, GRAM + INDEXED_AT_ONCE)
        for at in range(first, end):
            place = self._hash(tokens, at)
            self._before.append(self._heads[place])
            self._heads[place] = at

    def _hash(self, tokens: array[int], end: int) -> int:
        return hash((tokens[end - 3], tokens[end - 2], tokens[end - 1])) & (len(self._heads) - 1)


class Drafter:
    """What one sequence may go on with, and how often that was right."""

    def __init__(self, model: ModelDrafts | None = None) -> None:
        """`model` knows how often the draft model is right for all sequences, with which this one begins."""
        self._lookup = PromptLookup()
        self._hits = [2 * prior for prior in PRIORS]
        self._tries = [2.0] * len(PRIORS)
        self._guess: list[int] = []  # tokens that may follow the first `_made` ones, after a match of `_length`
        self._made = self._length = 0
        self._model = model
        self.followed_chance = 0.0 if model is None else model.chance

    def guess(self, sequence: Sequence) -> list[int]:
        """At most MAX_DRAFTS tokens, none of which ends the sequence. Call it before each step that may draft."""
        tokens = sequence.tokens
        self._learn(tokens)
        self._length, place = self._lookup.find(tokens)
        self._made = len(tokens)
        self._guess = []
        if self._length:
            found = tokens[place : place + MAX_DRAFTS].tolist()
            period = len(found)  # a run that reaches the end of the text goes on with itself
            found = [found[index % period] for index in range(MAX_DRAFTS)]
            ends = (index for index, token in enumerate(found) if token in sequence.end_ids)
            self._guess = found[: next(ends, MAX_DRAFTS)]
        return self._guess

    def chances(self, count: int) -> list[float]:
        """Of the first tokens of the guess, that each is right with all before it; none below LEAST_CHANCE."""
        chance, found = 1.0, list[float]()
        for index in range(count):
            kind = _class_of(self._length + index)
            chance *= self._hits[kind] / self._tries[kind]
            if chance < LEAST_CHANCE:
                break
            found.append(chance)
        return found

    def followed(self, right: int, count: int) -> None:
        """Of so many drafts of the draft model the first ones were right."""
        for is_right in [True] * right + [False] * (right < count):
            self.followed_chance += (is_right - self.followed_chance) * (1 - MEMORY)
            if self._model is not None:
                self._model.chance += (is_right - self._model.chance) * (1 - MEMORY) / 4

    def _learn(self, tokens: array[int]) -> None:
        """Compares the last guess with what came."""
        for index, (guessed, token) in enumerate(zip(self._guess, tokens[self._made :], strict=False)):
            kind = _class_of(self._length + index)
            self._tries[kind] = self._tries[kind] * MEMORY + 1
            self._hits[kind] = self._hits[kind] * MEMORY + (guessed == token)
            if guessed != token:
                return


def _class_of(length: int) -> int:
    return sum(length >= least for least in CLASSES)


def accept(drafts: Seq[int], drawn: Seq[int]) -> list[int]:
    """The drafts that are what was drawn in their places, and one token more, which alone may be below 0 if it stands
    for a row that failed. Behind a draft such a row is left out, and computed again."""
    count = 0
    while count < len(drafts) and drawn[count] == drafts[count]:
        count += 1
    return list(drawn[: count + (count == 0 or drawn[count] >= 0)])


class RowCost:
    """Seconds of a step of decodes as a line over its rows, least squares over the last steps.

    Before steps differ, a row is taken to cost a quarter of its share of a step: drafting tells more.
    """

    MEMORY: Final = 0.98  # with each step
    RIDGE: Final = 4.0  # rows squared that the quarter counts for

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """A step took so long."""
        keep = self.MEMORY
        self._n, self._x, self._y = self._n * keep + 1, self._x * keep + rows, self._y * keep + seconds
        self._xx, self._xy = self._xx * keep + rows * rows, self._xy * keep + rows * seconds

    def line(self, rows: int) -> tuple[float, float]:
        """Of a step of so many rows the seconds, and what another row adds to them; (1, 0.25 / rows) at first."""
        if not self._n:
            return 1.0, 0.25 / rows
        mean_x, mean_y = self._x / self._n, self._y / self._n
        covered, spread = self._xy - self._x * mean_y, self._xx - self._x * mean_x
        slope = max(0.0, (covered + self.RIDGE * mean_y / mean_x / 4) / (spread + self.RIDGE))
        return max(mean_y + slope * (rows - mean_x), slope * rows), slope

    @property
    def is_known(self) -> bool:
        """Whether a step was seen."""
        return self._n > 0


def choose_drafts(chances: Seq[Seq[float]], seconds: float, row_seconds: float, num_decodes: int) -> list[int]:
    """How many drafts each sequence gets, so that the step gives the most tokens for its time.

    chances      of each sequence, for each draft, that it is accepted with all before it: descending
    seconds      of the step without drafts, which gives a token to each of num_decodes sequences
    row_seconds  of each draft
    """
    counts = [0] * len(chances)
    tokens = float(num_decodes)
    flat = [(one, number) for number, row in enumerate(chances) for one in row if one * seconds > row_seconds * tokens]
    for chance, number in sorted(flat, reverse=True):
        if chance * seconds <= row_seconds * tokens:
            break
        counts[number] += 1
        tokens, seconds = tokens + chance, seconds + row_seconds
    return counts


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that the draft model may draft for.

    chance  that a draft is right if those before it are
    behind  tokens of it that the draft model has to compute, at most CATCH_UP; its last one is always among them
    ahead   tokens that it may go on for
    """

    chance: float
    behind: int
    ahead: int

    @property
    def is_late(self) -> bool:
        """Whether there is more to compute than its last token, and a draft if all were right."""
        return self.behind > 2

    def is_worth(self, token_s: float, saved_s: float) -> bool:
        """Whether catching up, at so many seconds for a token, pays where each token ahead takes so many less."""
        return not self.is_late or MARGIN * self.behind * token_s < self.ahead * saved_s


class ModelDrafts:
    """How much the draft model drafts: what it costs and how often it is right is learned from all sequences."""

    def __init__(self) -> None:
        self.chance = 0.7  # that a draft is right if those before it are
        self._draft_s = 0.0  # of one draft for all sequences that draft; 0 before there was one
        self._token_s = 0.0  # of one token that is caught up
        self._probe_s = inf  # that probes may take: of four steps at first
        self.rows = 0  # that the drafts of the last choice add to its step
        self._caught_up = self._longest = 0  # tokens of late ones in it; drafts of one sequence

    def choose(self, candidates: Seq[Candidate], seconds: float, row_seconds: float, num_decodes: int) -> list[int]:
        """How many drafts each gets, all the same or none. Late ones are caught up first, where that pays, and so many
        in a step that it takes about double its time.

        seconds      of the step without drafts, which gives a token to each of num_decodes sequences
        row_seconds  of each draft in it
        """

        def best(numbers: list[int]) -> tuple[int, float]:
            chances = [candidates[number].chance for number in numbers]
            return choose_count(chances, seconds, row_seconds, self._draft_s, num_decodes - len(chances))

        order = worth = sorted(range(len(candidates)), key=lambda number: candidates[number].behind)
        for _ in range(2):  # fewer share the cost of a draft, so it saves less
            _, saved_s = best(worth)
            worth = [n for n in worth if candidates[n].is_worth(self._token_s, saved_s)]
        late, room = list[int](), max(CATCH_UP, int(seconds / self._token_s)) if self._token_s else CATCH_UP
        for number in worth:
            one = candidates[number]
            if one.is_late and one.behind <= room:
                room -= one.behind
                late.append(number)
        chosen = [n for n in worth if not candidates[n].is_late] + late
        count, _ = best(chosen)
        if not count and late:
            chosen, count = late, 1
        elif not count:
            first = candidates[order[0]]
            price_s = first.behind * self._token_s + PROBE_DRAFTS * (self._draft_s + row_seconds)
            chosen = order[:1] if price_s <= self._probe_s else []
            self._probe_s -= price_s * len(chosen)
            count = PROBE_DRAFTS
        self._caught_up = sum(candidates[n].behind for n in chosen if candidates[n].is_late)
        self.rows, self._longest = count * len(chosen), count if chosen else 0
        counts = [0] * len(candidates)
        for number in chosen:
            counts[number] = count
        return counts

    def took(self, seconds: float) -> None:
        """So long the draft model took for what was chosen last."""
        if self._caught_up:
            beside = max(seconds - self._longest * self._draft_s, seconds / 4)
            self._token_s = follow(self._token_s, beside / self._caught_up)
        elif self._longest:
            self._draft_s = follow(self._draft_s, seconds / self._longest)

    def rested(self, seconds: float) -> None:
        """So long a step took in which it did nothing."""
        self._probe_s = min(4 * seconds, self._probe_s + seconds * PROBE_SHARE)


def follow(old: float, new: float) -> float:
    """A moving average of seconds. What is much longer than expected counts as twice as long."""
    return old * min(2.0, max(0.5, new / old)) ** 0.3 if old else new


def choose_count(
    chances: Seq[float], seconds: float, row_seconds: float, draft_seconds: float, others: int
) -> tuple[int, float]:
    """How many tokens the draft model drafts for each of some sequences, so that the step gives most for its time; and
    the seconds that each token takes less then.

    chances  of each sequence, that a draft is right if those before it are
    seconds  of the step without drafts; draft_seconds those of one draft for all of them; others: its other sequences
    """
    tokens, right = float(others + len(chances)), list(chances)
    best, least_s = 0, seconds / tokens
    without_s = least_s
    for count in range(1, MODEL_DRAFTS + 1):
        tokens += sum(right)
        token_s = (seconds + count * (draft_seconds + len(chances) * row_seconds)) / tokens
        if token_s < least_s:
            best, least_s = count, token_s
        right = [chance * one for chance, one in zip(chances, right, strict=True)]
    return best, without_s - least_s
