"""The semantic cache as the response cache sees it: requests in, keys of answers out.

Embeds the question off the event loop, asks the space of its owner and model, and keeps gateways together over Redis.
What takes longer is done off the path of requests, each kind of it bounded: comparing answers, audits, Redis. No method
raises: without the extra, without Redis, with an embedder that fails, the exact cache is what is left.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gateway.config import SemanticCacheSettings
from gateway.errors import KvasirError, NativeError
from gateway.native import no_panic
from gateway.responses.base import Match, Mode, Query, Regenerate
from gateway.responses.entry_stores import Removal
from gateway.responses.semantic.questions import KEPT_ANSWER_CHARS, AnsweredQuestion, RedisQuestions, digest_of
from gateway.responses.semantic.spaces import Background, SharedSpace, Spaces
from gateway.responses.semantic.vectors import Vectors, find_unfit
from gateway.tasks import off_loop

if TYPE_CHECKING:
    from gateway.responses.embedding.embedder import Embedder
    from gateway.responses.semantic.space import Sight, Space


MAX_WRONG: Final = 20
"""Hits that an audit found wrong, the latest, that operators see."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What was found for a request, until it has its answer."""

    shared: SharedSpace
    sight: Sight

    @property
    def space(self) -> Space:
        return self.shared.space


class SemanticCache:
    """Answers to requests that mean the same. No method raises, and none is called for requests that the exact cache is
    not for."""

    def __init__(
        self,
        settings: SemanticCacheSettings,
        modes: Mapping[str, Mode],
        embedder: Embedder,
        redis: RedisQuestions | None,
        *,
        random: Callable[[], float],
        now: Callable[[], float],
        namespaces: Collection[str] = (),
        shows_texts: bool = False,
    ) -> None:
        """modes   of tenants that have one of their own
        namespaces  shared ones whose tenants may get answers to one another's questions
        shows_texts  whether operators may read questions
        random  a number from 0 to 1, evenly distributed
        now     the clock of entries, in seconds since 1970
        """
        self._settings = settings
        self.replace(modes, namespaces)
        self._now = now
        self._shows_texts = shows_texts
        self._wrong: deque[dict[str, Any]] = deque(maxlen=MAX_WRONG)
        self.outcomes: Counter[str] = Counter()
        self.events: Counter[str] = Counter(redis_failures=0, unread=0, removed=0)
        self._background = Background()
        self._spaces = Spaces(
            settings, redis, self._background, self.events, random=random, now=now, clock=time.monotonic
        )
        self._judging = self._auditing = 0
        self._vectors = Vectors(embedder, settings, self.events)

    def replace(self, modes: Mapping[str, Mode], namespaces: Collection[str]) -> None:
        """From now on these hold."""
        self._modes = modes
        self._namespaces = frozenset(f"namespace:{name}" for name in namespaces)

    def start(self) -> None:
        """Begins to load the encoder, which the first question would else be too late for."""
        self._background.start(self._vectors.load(), "load the encoder")

    async def close(self) -> None:
        """Ends what runs off the path of requests."""
        await self._background.close()

    async def find(self, query: Query[Any]) -> Match | None:
        """The answer to give, which the cache then looks up by its key."""
        try:
            with no_panic():
                outcome, match = await self._find(query)
        except NativeError:
            outcome, match = "failed", None
        self.outcomes[outcome] += 1
        return match

    async def _find(self, query: Query[Any]) -> tuple[str, Match | None]:
        """And what to count it as: hit, miss, or why it was not looked up."""
        if (unfit := self._unfit(query)) is not None:
            return unfit, None
        if (situation := await off_loop(query.request.work, query.find_situation)) is None:
            return "chat", None
        text = situation.text.strip()
        unfit = find_unfit(text, max_chars=self._settings.max_text_chars)
        if unfit is not None:
            return unfit, None
        if self._vectors.encoder:  # it reads what others put while the text is embedded
            self._spaces.open(query.owner, query.model, self._vectors.encoder)
        vector = await self._vectors.of_question(text, query.tenant)
        if vector is None:
            return "not-embedded", None
        shared = self._spaces.open(query.owner, query.model, self._vectors.encoder)
        # Where nothing may be generated there is nothing to learn from, neither an answer nor an audit.
        counts = not query.reuse.only_cached
        question = shared.space.question(situation.digest, text, vector)
        sight = shared.space.look(question, least=query.reuse.similarity or 0.0, counts=counts)
        if counts:
            query.looked = Looked(shared, sight)
        hit = sight.hit
        if hit is None:
            return "veto" if sight.vetoes and not sight.neighbours else "miss", None
        if sight.verdict.audit and self._auditing >= self._settings.max_audits:
            return "unaudited", None  # a fresh answer teaches the same
        return "hit", Match(hit.entry.key, hit.similarity)

    def repeats(self, query: Query[Any]) -> Callable[[], None] | None:
        """Counts a request that the exact cache answered, each time it is called; None where those do not count. Holds
        nothing of the request's text."""
        if self._unfit(query) is not None:
            return None
        return partial(self._spaces.repeated, query.owner, query.model, query.key)

    def hit(self, query: Query[Any], anew: Regenerate) -> None:
        """The answer was there, and is given. `anew` generates one of its own, to compare it."""
        looked = query.looked
        if looked is None:
            return
        looked.space.given(looked.sight)
        if looked.sight.verdict.audit:
            self._auditing += 1
            self._background.start(self._audit(query, looked, anew), "audit a semantic hit")

    def gone(self, query: Query[Any], match: Match) -> None:
        """The answer was not there any more."""
        self.events["gone"] += 1
        if query.looked is not None:
            query.looked.space.remove(match.key)

    def remember(self, query: Query[Any], answer: str | None) -> None:
        """The text of what was generated, and is stored under the key; None for what no other request may get."""
        looked = query.looked
        if looked is None or not answer:
            return
        question, now = looked.sight.question, self._now()
        ttl_s = min(query.reuse.ttl_s or self._settings.ttl_s, self._settings.ttl_s)
        entry = AnsweredQuestion(
            key=query.key,
            scope=question.scope,
            group=query.key,
            text=question.text,
            vector=question.vector.tobytes(),
            answer=answer[:KEPT_ANSWER_CHARS],
            digest=digest_of(answer),
            created_s=now,
            expires_s=now + ttl_s,
        )
        if not self._spaces.remember(looked.space, entry, question.features):
            return
        self.events["kept"] += 1
        if not looked.sight.neighbours or not self._settings.judged:
            self._spaces.put(looked.shared, entry.key, entry)
        elif self._judging >= self._settings.max_judging:
            self.events["not_judged"] += 1
            self._spaces.put(looked.shared, entry.key, entry)
        else:
            self._judging += 1
            self._background.start(self._judge(query.tenant, query.key, looked, answer), "judge an answer")

    def forget(self, removal: Removal) -> None:
        """Soon the questions whose answers are removed are gone, here and for other gateways."""
        for wrong in self._wrong:  # whichever of them it is about
            wrong.update(question=None, answered_as=None)
        self._spaces.forget(removal)

    def stats(self) -> dict[str, Any]:
        """For operators: requests by outcome and other events since the start; what is kept and learned, by owner and
        model; the last wrong hits."""
        return {
            "outcomes": dict(self.outcomes),
            "events": dict(self.events),
            "spaces": self._spaces.figures(),
            "last_wrong": [dict(wrong) for wrong in self._wrong],
        }

    def _unfit(self, query: Query[Any]) -> str | None:
        """Why a request is not looked up, as one word; whatever can be told without its text."""
        settings, reuse = self._settings, query.reuse
        mode = self._modes.get(query.tenant, settings.mode)
        if mode == "off" or reuse.semantic is False:
            return "off"
        if query.owner.startswith("namespace:") and query.owner not in self._namespaces:
            return "shared"
        if mode == "ask" and not reuse.semantic:
            return "not-asked"
        return query.find_unfit(settings.max_temperature)

    async def _judge(self, tenant: str, key: bytes, looked: Looked, answer: str) -> None:
        """Labels a miss: whether its nearest neighbour would have given the same answer."""
        try:
            first, *others = looked.sight.neighbours
            agrees = [await self._same(answer, first.entry, tenant)]
            agrees += [digest_of(answer) == other.entry.digest for other in others]
            looked.space.judge_miss(looked.sight, key, agrees)
            entry = looked.space.find(key)
            if entry is not None:
                self._spaces.put(looked.shared, entry.key, entry)
        except (KvasirError, TimeoutError):
            self.events["not_judged"] += 1
        finally:
            self._judging -= 1

    async def _audit(self, query: Query[Any], looked: Looked, anew: Regenerate) -> None:
        """Compares a hit's answer with a fresh one. A wrong one is not given again, here or elsewhere."""
        try:
            fresh = await anew()
            if fresh is None:
                self.events["audits_lost"] += 1
                return
            entry = looked.sight.neighbours[0].entry
            same = await self._same(fresh, entry, query.tenant)
            looked.space.judge_hit(looked.sight, same)
            self.events["audited"] += 1
            if not same:
                self._wrong.append(self._about_wrong(query, looked.sight, entry))
                self._spaces.put(looked.shared, entry.key, None)
        except (KvasirError, TimeoutError):
            self.events["audits_lost"] += 1
        finally:
            self._auditing -= 1

    def _about_wrong(self, query: Query[Any], sight: Sight, entry: AnsweredQuestion) -> dict[str, Any]:
        return {
            "at_s": self._now(),
            "owner": query.owner,
            "model": query.model,
            "similarity": round(sight.neighbours[0].similarity, 4),
            "probability": round(sight.verdict.probability, 4),
            "question": sight.question.text if self._shows_texts else None,
            "answered_as": entry.text if self._shows_texts else None,
        }

    async def _same(self, answer: str, entry: AnsweredQuestion, tenant: str) -> bool:
        """Raises what the embedder raises."""
        from gateway.responses.semantic import judge

        if digest_of(answer) == entry.digest:
            return True
        answer = answer[:KEPT_ANSWER_CHARS]
        same = judge.compare(answer, entry.answer)
        if same is not None:
            return same
        one, other = await self._vectors.of_answers(answer, entry.answer, tenant)
        return judge.near(one, other)
