"""The spaces of all owners and models: made when the first question comes, kept together with those of other gateways
(sync.py), given up where an owner has too many models. `space` is imported then, too: it needs the extra `semantic`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.config import SemanticCacheSettings
from gateway.responses.entries import About
from gateway.responses.key import entry_id
from gateway.responses.removals import Removal
from gateway.responses.semantic.entry import Entry
from gateway.responses.semantic.sync import Sync

if TYPE_CHECKING:
    from gateway.responses.semantic.space import Space


class _Named(NamedTuple):
    """name  in Redis"""

    name: str
    space: Space


class Spaces:
    """One gateway's."""

    def __init__(
        self,
        settings: SemanticCacheSettings,
        sync: Sync,
        *,
        random: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        """`random` and `now` as in SemanticCache."""
        self._settings = settings
        self._sync = sync
        self._random = random
        self._now = now
        self.bytes = 0
        self._spaces: OrderedDict[tuple[str, str], _Named] = OrderedDict()  # asked last at the end

    def __iter__(self) -> Iterator[Space]:
        return iter([named.space for named in self._spaces.values()])

    def find(self, owner: str, model: str) -> Space | None:
        named = self._spaces.get((owner, model))
        return None if named is None else named.space

    def asked(self, owner: str, model: str, encoder: str) -> tuple[str, Space]:
        """The one that a question is for, and its name in Redis. It begins to read what other gateways have put that
        have the same encoder: others' vectors, and what was learned of them, mean nothing here."""
        from gateway.responses.semantic.space import Space

        key = owner, model
        named = self._spaces.get(key)
        if named is None:
            self._make_room(owner)
            space = Space(self._settings, random=self._random, now=self._now, grew=self._grew)
            named = self._spaces[key] = _Named(f"{owner}/{model}/{encoder}", space)
        self._spaces.move_to_end(key)
        self._sync.catch_up(*named)
        return named

    def forget(self, removal: Removal) -> None:
        """See removals.Questions."""
        for (owner, model), (name, space) in self._spaces.items():
            if removal.chosen.owner in (None, owner) and removal.chosen.model in (None, model):
                self._sync.remove(name, space, partial(_is_removed, removal, owner, model))

    def figures(self) -> list[dict[str, Any]]:
        """What is kept and learned, by owner and model."""
        return [
            {
                "owner": owner,
                "model": model,
                "entries": len(space),
                "bytes": space.bytes,
                "evicted": space.evicted,
                "quarantined": space.quarantined,
                "bound": self._settings.bound,
                **asdict(space.budget.figures()),
            }
            for (owner, model), (_, space) in self._spaces.items()
        ]

    def _make_room(self, owner: str) -> None:
        """For one more model of an owner, who may make up names where an upstream answers to any."""
        own = [model for whose, model in self._spaces if whose == owner]
        if len(own) >= self._settings.max_models:
            gone = self._spaces.pop((owner, own[0]))
            self.bytes -= gone.space.bytes
            gone.space.grew = _nowhere  # a request may still hold it
            self._sync.forget(gone.name)

    def _grew(self, num_bytes: int) -> None:
        """Keeps all of them together within their bytes: what does not fit goes from the owner that has most, from the
        model that was asked longest ago."""
        self.bytes += num_bytes
        while num_bytes > 0 and self.bytes > self._settings.max_memory_bytes:
            owned: Counter[str] = Counter()
            for (owner, _), named in self._spaces.items():
                owned[owner] += named.space.bytes
            ((most, most_bytes),) = owned.most_common(1)
            if not most_bytes:
                return
            next(
                named.space for (owner, _), named in self._spaces.items() if owner == most and len(named.space)
            ).evict_oldest()


def _nowhere(num_bytes: int) -> None:
    """Counts nothing."""


def _is_removed(removal: Removal, owner: str, model: str, entry: Entry) -> bool:
    answer = About(owner, entry_id(entry.key), model, entry.created_s, entry.expires_s, entry.num_bytes)
    return removal.chosen.takes(answer, removal.at_s)
