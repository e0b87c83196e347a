"""The spaces of all owners and models: made with the first question, dropped where an owner has too many models, and
synchronised with those of other gateways over Redis, off the path of requests. While Redis is unreachable each gateway
knows its own questions. `space` is imported with the first question: it needs the extra `semantic`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson

from gateway.config import SemanticCacheSettings
from gateway.errors import RedisDownError
from gateway.responses.entries import About, entry_id
from gateway.responses.entry_stores import Removal
from gateway.responses.semantic.questions import READ_AT_A_TIME, AnsweredQuestion, RedisQuestions
from gateway.tasks import cancel, spawn

if TYPE_CHECKING:
    from gateway.responses.semantic.features import Features
    from gateway.responses.semantic.space import Space

SAVE_S: Final = 30.0
"""Seconds from one time that what was learned is saved to the next."""

APPLIED_AT_A_TIME: Final = 8
"""Changes from Redis, of a tenth to half a millisecond each, between which other tasks have their turn."""

LOOKED_AT: Final = 64
"""Questions between which other tasks have their turn when some are removed, of some microseconds each, and as many as
above when they are."""

MAX_WRITES: Final = 256
"""Writes that wait for Redis; beyond, other gateways miss a question."""


class Background:
    """Tasks of one owner, which no request waits for. What starts them bounds how many there are."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        """As tasks.spawn does."""
        task = spawn(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancels what runs, and waits for its end."""
        while self._tasks:
            await cancel(next(iter(self._tasks)))


@dataclass(slots=True, eq=False)
class SharedSpace:
    """A space, and the state of reading and writing it in Redis.

    name    in Redis
    since   number of the last change that was read
    next_s  when to look again, next_save_s when to save again
    """

    name: str
    space: Space
    since: int = 0
    next_s: float = 0.0
    next_save_s: float = 0.0
    loaded: bool = False
    reading: bool = False


class Spaces:
    """One gateway's. No method waits or raises."""

    def __init__(
        self,
        settings: SemanticCacheSettings,
        redis: RedisQuestions | None,
        background: Background,
        events: Counter[str],
        *,
        random: Callable[[], float],
        now: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        """`random` and `now` as in SemanticCache, `clock` is monotonic. `background` is the caller's, who closes it.
        `events` counts failures of Redis, what was read there and is none of ours, and removed questions."""
        self._settings = settings
        self._redis = redis
        self._background = background
        self._events = events
        self._random = random
        self._now = now
        self._clock = clock
        self._spaces: OrderedDict[tuple[str, str], SharedSpace] = OrderedDict()  # used last at the end
        self._writing = 0

    def __iter__(self) -> Iterator[Space]:
        return iter([shared.space for shared in self._spaces.values()])

    def repeated(self, owner: str, model: str, key: bytes) -> None:
        """The exact cache answered a request with this key."""
        if (shared := self._spaces.get((owner, model))) is not None:
            shared.space.repeated(key)

    def open(self, owner: str, model: str, encoder: str) -> SharedSpace:
        """The space of a question. Soon it has the questions of other gateways with the same encoder: other vectors,
        and what was learned of them, mean nothing here."""
        from gateway.responses.semantic.space import Space

        key = owner, model
        shared = self._spaces.get(key)
        if shared is None:
            # An owner may make up names of models where an upstream answers to any.
            own = [key for key in self._spaces if key[0] == owner]
            if len(own) >= self._settings.max_models:
                del self._spaces[own[0]]
            space = Space(self._settings, random=self._random, now=self._now)
            shared = self._spaces[key] = SharedSpace(f"{owner}/{model}/{encoder}", space)
        self._spaces.move_to_end(key)
        if self._redis is not None and not shared.reading and self._clock() >= shared.next_s:
            shared.reading = True
            self._background.start(self._read(self._redis, shared), "read questions")
        return shared

    def remember(self, space: Space, entry: AnsweredQuestion, read: Features | None = None) -> bool:
        """As Space.remember, within the bytes of all spaces: questions beyond those are removed from the owner with
        most, from the model that was used longest ago."""
        remembered = space.remember(entry, read)
        owned: Counter[str] = Counter()
        for (owner, _), shared in self._spaces.items():
            owned[owner] += shared.space.bytes
        while owned.total() > self._settings.max_memory_bytes:
            ((most, _),) = owned.most_common(1)
            oldest = next(one.space for (owner, _), one in self._spaces.items() if owner == most and len(one.space))
            owned[most] -= oldest.evict_oldest()
        return remembered

    def put(self, shared: SharedSpace, key: bytes, entry: AnsweredQuestion | None) -> None:
        """Other gateways will know this one; with None they forget the one with this key."""
        if self._redis is not None and self._writing < MAX_WRITES:
            self._writing += 1
            body = b"" if entry is None else entry.to_bytes()
            self._background.start(self._put(self._redis, shared.name, key, body), "write a question")

    def forget(self, removal: Removal) -> None:
        """Starts to remove the questions whose answers are removed, here and from Redis."""
        for (owner, model), shared in self._spaces.items():
            if removal.chosen.owner in (None, owner) and removal.chosen.model in (None, model):
                takes = partial(_is_removed, removal, owner, model)
                self._background.start(self._remove(shared, takes), "remove questions")

    def figures(self) -> list[dict[str, Any]]:
        """What is stored and learned, by owner and model."""
        return [
            {
                "owner": owner,
                "model": model,
                "entries": len(shared.space),
                "bytes": shared.space.bytes,
                "evicted": shared.space.evicted,
                "quarantined": shared.space.quarantined,
                "bound": self._settings.bound,
                **asdict(shared.space.budget.figures()),
            }
            for (owner, model), shared in self._spaces.items()
        ]

    # -- Redis --------------------------------------------------------------------------------------------------------

    async def _put(self, redis: RedisQuestions, name: str, key: bytes, body: bytes) -> None:
        try:
            await redis.put(name, key, body)
        except RedisDownError as error:
            self._events["redis_failures"] += error.asked
        finally:
            self._writing -= 1

    async def _remove(self, shared: SharedSpace, takes: Callable[[AnsweredQuestion], bool]) -> None:
        space, redis = shared.space, self._redis
        removed: list[bytes] = []
        for number, entry in enumerate(space, 1):
            if takes(entry) and space.find(entry.key) == entry:
                space.remove(entry.key)
                removed.append(entry.key)
            if number % LOOKED_AT == 0:
                await asyncio.sleep(0)
        self._events["removed"] += len(removed)
        if redis is None:
            return
        try:
            for key in removed:
                await redis.put(shared.name, key, b"")
        except RedisDownError as error:
            self._events["redis_failures"] += error.asked

    async def _read(self, redis: RedisQuestions, shared: SharedSpace) -> None:
        try:
            if not shared.loaded:
                self._restore(shared.space, await redis.load_budget(shared.name))
                shared.loaded = True
            while True:
                shared.since, changes = await redis.changes(shared.name, shared.since)
                for number, (key, body) in enumerate(changes, 1):
                    self._apply(shared.space, key, body)
                    if number % APPLIED_AT_A_TIME == 0:
                        await asyncio.sleep(0)
                if len(changes) < READ_AT_A_TIME:
                    break
            await self._save(redis, shared)
        except RedisDownError as error:
            self._events["redis_failures"] += error.asked
        finally:
            shared.reading = False
            shared.next_s = self._clock() + self._settings.sync_s

    async def _save(self, redis: RedisQuestions, shared: SharedSpace) -> None:
        budget = shared.space.budget
        # Without a label there is nothing to go on with, and models that clients made up would fill Redis.
        if budget.figures().labels and self._clock() >= shared.next_save_s:
            shared.next_save_s = self._clock() + SAVE_S
            await redis.save_budget(shared.name, orjson.dumps(budget.to_state()))

    def _apply(self, space: Space, key: bytes, body: bytes) -> None:
        if not body:
            space.remove(key)
            return
        try:
            entry = AnsweredQuestion.from_bytes(body)
        except ValueError:
            self._events["unread"] += 1
            return
        if space.find(key) != entry and not self.remember(space, entry):
            self._events["unread"] += 1

    def _restore(self, space: Space, state: bytes | None) -> None:
        if state is None or space.budget.figures().labels:
            return
        try:
            space.budget.restore(orjson.loads(state))
        except ValueError:
            self._events["unread"] += 1


def _is_removed(removal: Removal, owner: str, model: str, entry: AnsweredQuestion) -> bool:
    answer = About(owner, entry_id(entry.key), model, entry.created_s, entry.expires_s, entry.num_bytes)
    return removal.chosen.takes(answer, removal.at_s)
