"""What a worker of a gateway has of the process that started it (workers.py): its place, its sockets, and answers."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.config import ConfigError
from gateway import tasks
from gateway.config import Reloaded, Settings
from gateway.errors import OverloadedError
from gateway.peer import Peer

log = logging.getLogger(__name__)

ASK_S: Final = 5.0
"""For the parent to answer, which asks all workers first."""


RELOAD_S: Final = 30.0
"""For it to read the settings again, and all workers to have them."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker is told: its part of the settings, and what its parent runs for all.

    own_engines  whether that is `kvasir serve`
    engine_urls  name -> URL of the engines that it runs
    name         of the gateway, whose worker it is
    joined       URLs of engines that other workers have, when this one is started
    """

    settings: Settings
    own_engines: bool
    redis_url: str
    engine_urls: Mapping[str, str]
    name: str
    joined: frozenset[str] = frozenset()


class Parent:
    """The way to it. `sockets` are to be listened on."""

    def __init__(self, place: Place, sockets: Sequence[socket.socket], end: socket.socket) -> None:
        """`end` is that of the socket between the two."""
        self.place = place
        self.sockets = sockets
        self._end = end
        self._snapshot: Callable[[], Mapping[str, Any]] = dict
        self._plan: Callable[[Settings], Callable[[], None]] = _not_yet
        self._ready: tuple[Settings, Callable[[], None]] | None = None
        self._peer = Peer(self._answer)

    async def connect(
        self, snapshot: Callable[[], Mapping[str, Any]], plan: Callable[[Settings], Callable[[], None]]
    ) -> None:
        """`snapshot` is what it is told when it asks what this worker has counted. `plan` makes changed settings ready,
        and returns what makes them hold; it raises ConfigError."""
        self._snapshot, self._plan = snapshot, plan
        await self._peer.connect(self._end)

    async def close(self) -> None:
        await self._peer.close()

    async def listening(self) -> None:
        """Tells it that requests are answered. Raises ConnectionError and TimeoutError: it is gone, then."""
        await self._peer.ask("up", timeout_s=ASK_S)

    def say(self, text: str) -> None:
        """Tells it a text for the operator."""
        tasks.spawn(self._peer.ask("say", text, timeout_s=ASK_S), name="say what runs")

    async def total(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """What all workers have counted, given the snapshot of this one. Raises OverloadedError."""
        try:
            total: dict[str, Any] = await self._peer.ask("total", own, timeout_s=ASK_S)
        except (OSError, TimeoutError) as error:
            log.warning("the other workers of this gateway cannot be asked: %s", error or type(error).__name__)
            raise OverloadedError("The figures of all workers are not to be had at the moment.") from error
        return total

    async def reload(self) -> Reloaded:
        """Has it read the settings again, for all workers. Raises ConfigError and KvasirError."""
        try:
            answer = await self._peer.ask("reload", timeout_s=RELOAD_S)
        except (OSError, TimeoutError) as error:
            raise OverloadedError("The first process of this gateway cannot be asked at the moment.") from error
        if isinstance(answer, Exception):
            raise answer
        report: Reloaded = answer
        return report

    async def _answer(self, what: str, value: Any) -> Any:
        if what == "prepare":
            try:
                self._ready = value, self._plan(value)
            except ConfigError as error:
                return str(error)
        elif what == "use":
            ready, self._ready = self._ready, None
            use = ready[1] if ready is not None and ready[0] == value else self._plan(value)
            use()
        else:
            return self._snapshot()
        return None


def _not_yet(settings: Settings) -> Callable[[], None]:
    raise ConfigError("the worker has not started yet")
