"""Servers of a fleet that only count: no port, no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.config import ReplicaSettings
from gateway.errors import BadRequestError
from gateway.replicas.fleet import Change, Fleet
from gateway.storage.redis_calls import RedisCalls


@dataclass
class FakeMember:
    name: str
    url: str
    in_flight: int = 0
    draining: bool = False

    def figures(self) -> dict[str, Any]:
        return {"in_flight": self.in_flight}


@dataclass
class FakeServer:
    settings: ReplicaSettings
    replicas: list[FakeMember] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replicas = [FakeMember(self.settings.name, self.settings.url)]

    def drain(self, draining: bool) -> None:
        self.replicas[0].draining = draining


@dataclass
class FakeGateway:
    """What of one gateway is about its fleet."""

    calls: RedisCalls | None = None
    configured: tuple[str, ...] = ()
    clock: Callable[[], float] = lambda: 1e9
    pods: Callable[[], Mapping[str, Change]] = dict
    refuses: str = ""  # why it can use none that is added
    attached: dict[str, FakeMember] = field(default_factory=dict)
    worth: dict[str, float] = field(default_factory=dict)  # of replicas' caches, to this gateway

    def __post_init__(self) -> None:
        servers = [FakeServer(settings_of(name)) for name in self.configured]
        worth = lambda name: self.worth.get(name, 0.0)  # noqa: E731
        self.fleet = Fleet(servers, self._open, self._attach, self._detach, self.calls, self.clock, worth, self.pods)

    def _open(self, settings: ReplicaSettings) -> FakeServer:
        if self.refuses:
            raise BadRequestError(self.refuses)
        return FakeServer(settings)

    def _attach(self, member: FakeMember) -> None:
        assert member.name not in self.attached
        self.attached[member.name] = member

    async def _detach(self, member: FakeMember) -> None:
        del self.attached[member.name]

    @property
    def draining(self) -> list[str]:
        return [name for name, member in self.attached.items() if member.draining]


def settings_of(name: str) -> ReplicaSettings:
    return ReplicaSettings.model_validate(table_of(name))


def table_of(name: str, **more: str) -> dict[str, Any]:
    return {"name": name, "kind": "vllm", "url": f"http://{name}.test", **more}
