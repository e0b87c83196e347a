"""Sessions that take turns at the engines: which prefix is in which cache, which of them are kept, and after how long
sessions come back; and which engine was sent a prefix of batch requests. Pure: no I/O, no clock.

A prompt that begins with all that is remembered of an earlier one is the next turn of its session. Of each a few
digests are remembered, two for each doubling of its length, so what is known of a prompt may be a third too short.
Caches are taken to give up first what was used longest ago. All of it is what one gateway has sent, and a hint.

    newest                                                             oldest
    | A | B (waits) |  C  |   D, away for long   | E |   cache ends here  | F |
    '---- kept: C may be back soon ----'----- room for others ------------'
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from typing import Final

from engine.protocol import DIGEST_BYTES
from engine.protocol.frozen import dataclass

MAX_POSITIONS: Final = 16_384
"""Of all prompts that are remembered, the latest."""

AFFINITY_S: Final = 60.0
"""So long a prefix is taken to be where it was sent; every line that follows renews it."""

MAX_SESSIONS: Final = 2048
"""Of all engines, with some 25 digests for a prompt of 100,000 tokens; the oldest is forgotten first."""

SESSION_S: Final = 1800.0
"""A session that comes back later is a new one."""

SOON_S: Final = 30.0
"""Blocks of a session are kept that is more likely than not to be back within that time."""

TTL_RANGE_S: Final = (1.0, 120.0)
"""Shortest and longest time for which the blocks of a paused session are kept."""

GAPS: Final = 256
"""Times between turns that are learned from."""

LEARN_EVERY: Final = 16


class PrefixAffinity:
    """Digest at a position -> which engine was sent a prompt with it last, and when, before any index can know it. For
    the batch lane, whose lines come together and begin alike: without it the first lines of a document would go to all
    engines at once, and each would compute it."""

    def __init__(self) -> None:
        self._sent: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def sent(self, digests: bytes, incarnation: str, now_s: float) -> None:
        for count in positions(len(digests) // DIGEST_BYTES):
            position = _digest(digests, count)
            self._sent[position] = incarnation, now_s
            self._sent.move_to_end(position)
        while self._sent and (len(self._sent) > MAX_POSITIONS or now_s - self._oldest_s() > AFFINITY_S):
            self._sent.popitem(last=False)

    def _oldest_s(self) -> float:
        return next(iter(self._sent.values()))[1]

    def find(self, digests: bytes, now_s: float) -> Mapping[str, int]:
        """Incarnation -> leading blocks that it was sent within AFFINITY_S; engines without any are missing."""
        found: dict[str, int] = {}
        for count in positions(len(digests) // DIGEST_BYTES):
            position = _digest(digests, count)
            incarnation, sent_s = self._sent.get(position, ("", 0.0))
            if incarnation and now_s - sent_s <= AFFINITY_S:
                found[incarnation] = count
        return found


@dataclass(slots=True, eq=False)
class Session:
    """A session of which a turn was sent. `waiting` counts its turns in the queue."""

    incarnation: str
    blocks: int
    sent_s: float
    positions: list[bytes] = field(default_factory=list)  # its digests that are remembered, in the order of the prompt
    waiting: int = 0


class Sessions:
    """Those of one queue."""

    def __init__(self) -> None:
        self.kept_s = TTL_RANGE_S[1]  # so long blocks of a paused session are kept
        self._sessions: OrderedDict[Session, None] = OrderedDict()  # the newest last, as in the next two
        self._by_position: dict[bytes, Session] = {}  # the last one that passed there
        self._cached: dict[str, OrderedDict[Session, None]] = {}  # by engine; none is empty
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._turns = 0

    def find(self, digests: bytes, now_s: float) -> tuple[int, Session | None]:
        """Leading blocks that were sent somewhere before, and the session whose next turn it is."""
        for count in reversed(positions(len(digests) // DIGEST_BYTES)):
            position = _digest(digests, count)
            session = self._by_position.get(position)
            if session is not None and now_s - session.sent_s <= SESSION_S:
                return count, session if position == session.positions[-1] else None
        return 0, None

    def arrived(self, session: Session, now_s: float) -> None:
        """Its next turn is here; how long it was away is learned from."""
        self._gaps.append(max(0.0, now_s - session.sent_s))
        self._turns += 1
        if self._turns % LEARN_EVERY == 0:
            self.kept_s = min(max(worth_waiting_s(sorted(self._gaps)), TTL_RANGE_S[0]), TTL_RANGE_S[1])

    def lost(self, session: Session) -> None:
        """The engine's cache turned out not to have it."""
        if (cached := self._cached.get(session.incarnation)) is not None:
            cached.pop(session, None)
            if not cached:
                del self._cached[session.incarnation]

    def sent(self, session: Session | None, digests: bytes, incarnation: str, now_s: float) -> None:
        """A turn of a session, or the first of a new one, goes to an engine, which has all of it afterwards."""
        blocks = len(digests) // DIGEST_BYTES
        if session is None:
            session = Session(incarnation, blocks, now_s)
        self.lost(session)
        session.incarnation, session.blocks, session.sent_s = incarnation, blocks, now_s
        for count in positions(blocks)[len(session.positions) :]:
            position = _digest(digests, count)
            session.positions.append(position)
            self._by_position[position] = session
        self._sessions[session] = None
        self._sessions.move_to_end(session)
        self._cached.setdefault(incarnation, OrderedDict())[session] = None
        if len(self._sessions) > MAX_SESSIONS:
            self._forget(self._sessions.popitem(last=False)[0])

    def _forget(self, session: Session) -> None:
        self.lost(session)
        for position in session.positions:
            if self._by_position.get(position) is session:
                del self._by_position[position]
        session.positions.clear()

    def room(self, incarnation: str, capacity: int, now_s: float) -> int:
        """Blocks of an engine's cache that can be used without giving up anything of a session that waits, or that may
        be back soon."""
        room, used = capacity, 0
        for session in reversed(self._cached.get(incarnation, OrderedDict())):
            used += min(session.blocks, capacity)
            if used > capacity:
                break
            if session.waiting or now_s - session.sent_s < self.kept_s:
                room = capacity - used
        return room


def worth_waiting_s(gaps: list[float]) -> float:
    """The least time after which fewer than half of the sessions that are still away come back within SOON_S. Of gaps
    in order, at least one; sessions that never came back are not among them."""
    for index, gap in enumerate(gaps[:-1]):
        later = len(gaps) - index - 1
        if bisect_right(gaps, gap + SOON_S) - index - 1 < later / 2:
            return gap
    return gaps[-1]


def _digest(digests: bytes, count: int) -> bytes:
    return digests[(count - 1) * DIGEST_BYTES : count * DIGEST_BYTES]


@lru_cache(maxsize=4096)
def positions(num_blocks: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to the number of blocks."""
    counts, count = [], 1
    while count <= num_blocks:
        counts.append(count)
        if count > 1 and count + count // 2 <= num_blocks:
            counts.append(count + count // 2)
        count *= 2
    return tuple(counts)
