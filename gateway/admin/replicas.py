"""/admin/replicas: the servers of the fleet as this gateway sees them. Adds, drains and removes them.

What a change means, and where it holds, is in replicas/fleet.py. States:

    joining   not reached yet, or refused; `reason` says why
    joined    gets requests
    draining  gets no new ones
    lost      was joined, and is asked again and again; `reason` says what happened
    unusable  was added by way of another gateway, and this one cannot use it
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol, get_args

from aiohttp import web

from gateway.admin.metrics import Metrics
from gateway.admin.sources import EngineStatus, Sources
from gateway.api.dialect import Route
from gateway.api.fields import Parameter, boolean, choice, in_url, read, read_query, text
from gateway.api.record import BODY, CHANGED
from gateway.api.replies import reply_json
from gateway.config import ReplicaKind
from gateway.errors import BadRequestError

MAX_CHARS: Final = 4096
_STATES: Final = {"connecting": "joining", "ready": "joined"}

_text = text(MAX_CHARS, 1)
ADD: Final[Mapping[str, Parameter]] = {
    one.name: one
    for one in (
        Parameter("name", _text, "string", "In logs, metrics and headers."),
        Parameter("kind", choice(*get_args(ReplicaKind)), "string", "What runs there."),
        Parameter("url", _text, "string", "As `http://host:8000`."),
        Parameter(
            "api_key_env",
            _text,
            "string",
            "Environment variable of the gateways that has its key; its name begins with `REPLICA_`.",
        ),
        Parameter("model", _text, "string", "Name that clients use."),
        Parameter("tokenizer", _text, "string", "Folder or hub id of its tokeniser."),
        Parameter("kv_events", _text, "string", "`tcp://host:port`, `auto` or `off`."),
        Parameter("kv_replay", _text, "string", "The same, for events that were missed."),
    )
}
_flag = in_url(boolean)
DRAIN: Final = {"undo": Parameter("undo", _flag, "`true` or `false`, the default", "It gets requests again.")}
LEAST: Final = {"model": Parameter("model", _text, "string", "Only of this model.")}
REMOVE: Final = {
    "force": Parameter("force", _flag, "`true` or `false`, the default", "What runs there ends now, with an error.")
}


class Fleet(Protocol):
    """See replicas/fleet.py."""

    @property
    def unusable(self) -> Mapping[str, str]: ...

    async def add(self, table: Mapping[str, Any]) -> str: ...

    async def drain(self, name: str, *, draining: bool = True) -> None: ...

    async def remove(self, name: str, *, force: bool = False) -> None: ...

    async def worth(self) -> Mapping[str, float]: ...


class ReplicaPages:
    """`figures` are of this process, or of all workers that it is one of."""

    def __init__(self, fleet: Fleet, figures: Callable[[], Awaitable[tuple[Sources, Metrics]]]) -> None:
        self._fleet = fleet
        self._figures = figures

    def routes(self) -> list[Route]:
        path, one = "/admin/replicas", "/admin/replicas/{name}"
        example = {"name": "vllm-2", "kind": "vllm", "url": "http://vllm-2:8000"}
        return [
            Route("GET", path, self.show, "The replicas, with state, trust, load and receipts.", key="admin"),
            Route(
                "POST",
                path,
                self.add,
                "Adds a server, as a table of [[replicas]]. One that cannot be reached is asked again and again.",
                parameters=ADD,
                required=("name", "kind", "url"),
                example=example,
                key="admin",
                changes="replica added",
            ),
            Route(
                "POST",
                f"{path}/drain",
                self.drain_least,
                "Drains the replica whose cache is worth least, where another one has its model.",
                query=LEAST,
                key="admin",
                changes="replica drained",
            ),
            Route(
                "POST",
                f"{one}/drain",
                self.drain,
                "It gets no new requests.",
                query=DRAIN,
                key="admin",
                changes="replica drained",
            ),
            Route(
                "DELETE",
                one,
                self.remove,
                "Drains a replica that was added, then forgets it.",
                query=REMOVE,
                key="admin",
                changes="replica removed",
            ),
        ]

    async def show(self, http: web.Request) -> web.Response:
        """GET /admin/replicas"""
        shown = [_replica(status) for status in await self._statuses() if status.replica]
        unusable = [{"name": name, "state": "unusable", "reason": why} for name, why in self._fleet.unusable.items()]
        return reply_json({"replicas": [*shown, *unusable]})

    async def add(self, http: web.Request) -> web.Response:
        """POST /admin/replicas"""
        body = http[BODY]
        return _done(await self._fleet.add(read(body, ADD, ("name", "kind", "url"))), "added")

    async def drain(self, http: web.Request) -> web.Response:
        """POST /admin/replicas/{name}/drain"""
        name, undo = http.match_info["name"], read_query(http.query, DRAIN).get("undo", False)
        await self._fleet.drain(name, draining=not undo)
        return _done(name, "serving" if undo else "draining")

    async def drain_least(self, http: web.Request) -> web.Response:
        """POST /admin/replicas/drain"""
        model = read_query(http.query, LEAST).get("model")
        statuses, shared = await self._statuses(), await self._fleet.worth()
        name = choose_least([one for one in statuses if model is None or one.model == model], shared)
        if name is None:
            raise BadRequestError("No replica can be drained: none that is joined has another one with its model.")
        await self._fleet.drain(name)
        http[CHANGED] = {"name": name}
        return _done(name, "draining", worth_tokens=worth_of(statuses, shared))

    async def remove(self, http: web.Request) -> web.Response:
        """DELETE /admin/replicas/{name}"""
        name = http.match_info["name"]
        await self._fleet.remove(name, force=read_query(http.query, REMOVE).get("force", False))
        return _done(name, "removed")

    async def _statuses(self) -> Sequence[EngineStatus]:
        sources, _ = await self._figures()
        return sources.engines()


def worth_of(statuses: Sequence[EngineStatus], shared: Mapping[str, float] = MappingProxyType({})) -> dict[str, int]:
    """Server -> what its cache is worth: tokens that requests did not have to compute there, each counting half
    after every ten minutes (receipts.py). A cache that nothing hits is worth nothing, however full it is.
    `shared`: to all gateways, where that is known."""
    worth: dict[str, float] = {}
    for one in statuses:
        if one.replica:
            server = one.replica["server"]
            worth[server] = worth.get(server, 0.0) + one.receipts.get("recent_tokens", 0.0)
    return {server: round(shared.get(server, tokens)) for server, tokens in worth.items()}


def choose_least(statuses: Sequence[EngineStatus], shared: Mapping[str, float] = MappingProxyType({})) -> str | None:
    """The server whose cache is worth least, of those that get requests and whose model another engine serves, too.
    Among equals the one with the fewest requests, then the first name. Pure."""
    ready = [one for one in statuses if one.state == "ready"]
    worth = worth_of(ready, shared)
    found: list[tuple[float, int, str]] = []
    for server, tokens in worth.items():
        own = [one for one in ready if one.replica.get("server") == server]
        others = {one.model for one in ready if one.replica.get("server") != server}
        if all(one.model in others for one in own):
            found.append((tokens, sum(one.replica.get("in_flight", 0) for one in own), server))
    return min(found)[2] if found else None


def _done(name: str, state: str, **more: Any) -> web.Response:
    return reply_json({"name": name, "state": state, **more})


def _replica(status: EngineStatus) -> dict[str, Any]:
    """One rank."""
    figures, load = dict(status.replica), status.load
    index = dict(figures.pop("index", None) or {})
    return {
        "name": status.name,
        "url": status.url,
        "state": _STATES.get(status.state, status.state),
        **figures,
        "model": status.model,
        "incarnation": status.incarnation,
        "trust": index.pop("trust", None),
        "trust_reason": index.pop("reason", None),
        "blocks": {
            "total": status.num_blocks,
            "free": load.free_blocks,
            "cached": load.cached_blocks,
            "live": load.live_blocks,
            "tokens_per_block": status.block_size,
        },
        "load": {
            "running": load.running,
            "waiting": load.waiting,
            "prefill_backlog": load.prefill_backlog,
            "prefill_tokens_per_s": round(load.prefill_tokens_per_s, 1),
            "decode_tokens_per_s": round(load.decode_tokens_per_s, 1),
        },
        "receipts": dict(status.receipts),
        "index": index,
    }
