"""The part of a Kubernetes API server that a watch of EndpointSlices sees, over TLS, by its API conventions.

Every change has a version. A list says the version it is of; a watch goes on behind one, in a chunked stream that may
be cut anywhere, with bookmarks, and ends by itself. A version that was compacted away is 410: as a status, or an event.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.fakes.certificates import certificate

NAMESPACE, SERVICE = "models", "vllm"
RESOURCE = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def pod(name: str, address: str, uid: str = "", *, ready: bool | None = True, **conditions: bool) -> dict[str, Any]:
    """An endpoint as the controller writes it."""
    return {
        "addresses": [address],
        "conditions": {"ready": ready, **conditions} if ready is not None else conditions,
        "nodeName": "node-1",
        "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": name, "uid": uid or f"uid-of-{name}"},
    }


def endpoint_slice(name: str, *pods: dict[str, Any], port: int = 8000, **more: Any) -> dict[str, Any]:
    ports = [{"name": "http", "port": port, "protocol": "TCP"}, {"name": "events", "port": 5557, "protocol": "TCP"}]
    labels = {"kubernetes.io/service-name": SERVICE}
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": list(pods),
        **more,
    }


@dataclass
class KubernetesApi:
    """What it has, and how it answers; a test may change everything at any time."""

    account: Path  # `token` and `ca.crt`
    url: str = ""
    tokens: set[str] = field(default_factory=lambda: {"token-1"})  # that it takes
    version: int = 100
    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    oldest: int = 0  # what changed at this version or before is forgotten
    gone_as_status: bool = False
    forbidden: bool = False
    stalled: bool = False  # requests are taken, and not answered
    chunk_bytes: int = 1 << 16
    lists: list[str] = field(default_factory=list)  # token of each
    watches: list[int] = field(default_factory=list)  # version of each that was granted
    _connections: list[web.Request] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _generation: int = 0

    def put(self, *slices: dict[str, Any]) -> None:
        for one in slices:
            name = one["metadata"]["name"]
            self._log("MODIFIED" if name in self.slices else "ADDED", one)
            self.slices[name] = self.events[-1][2]

    def delete(self, name: str) -> None:
        self._log("DELETED", self.slices.pop(name))

    def touch(self) -> None:
        """Something else of the cluster changed."""
        self.version += 1

    def bookmark(self) -> None:
        self.events.append((self.version, "BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}}))
        self._wake()

    def compact(self) -> None:
        """Watches that run go on: they are sent what they have not seen."""
        self.oldest = self.version

    def disconnect(self, *, halfway: bool = False) -> None:
        """Every watch, some in the middle of an object."""
        for http in self._connections:
            if http.transport is None:
                continue
            if halfway:
                http.transport.write(b'9\r\n{"type":"\r\n')
                http.transport.close()
            else:
                http.transport.abort()

    def end(self) -> None:
        """Every watch, as if its time were over."""
        self._generation += 1
        self._wake()

    def answer(self, *events: str) -> None:
        """Lines that no API server would write."""
        for line in events:
            self.events.append((self.version, "", {"line": line}))
        self._wake()

    def _log(self, kind: str, one: dict[str, Any]) -> None:
        self.version += 1
        one = deepcopy(one)
        one["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, kind, one))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def handle(self, http: web.Request) -> web.StreamResponse:
        if self.stalled:
            await asyncio.sleep(3600)
        token = http.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.tokens:
            return _status(401, "Unauthorized")
        if self.forbidden or http.match_info["namespace"] != NAMESPACE:
            return _status(403, 'endpointslices.discovery.k8s.io is forbidden: User "kvasir" cannot list resource')
        if http.query["labelSelector"] != f"kubernetes.io/service-name={SERVICE}":
            return web.json_response(self._list([]))
        if "watch" not in http.query:
            self.lists.append(token)
            return web.json_response(self._list(list(self.slices.values())))
        try:
            return await self._watch(http)
        except ConnectionError:  # it was broken off while it was answered
            return web.Response()

    def _list(self, items: list[Any]) -> dict[str, Any]:
        return {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(self.version)}, "items": items}

    async def _watch(self, http: web.Request) -> web.StreamResponse:
        assert http.query["allowWatchBookmarks"] == "true"
        assert 100 < int(http.query["timeoutSeconds"]) <= 300
        at, generation = int(http.query["resourceVersion"]), self._generation
        if at < self.oldest and self.gone_as_status:
            return _status(410, f"too old resource version: {at} ({self.oldest})")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(http)
        if at < self.oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await self._write(response, {"type": "ERROR", "object": gone})
            return response
        self._connections.append(http)
        self.watches.append(at)  # from here on it is sent what changes, and can be broken off
        sent = next((i for i, (version, _, _) in enumerate(self.events) if version > at), len(self.events))
        try:
            while generation == self._generation:
                changed = self._changed
                while sent < len(self.events):
                    _, kind, found = self.events[sent]
                    await self._write(response, found["line"] if not kind else {"type": kind, "object": found})
                    sent += 1
                await changed.wait()
        finally:
            self._connections.remove(http)
        return response

    async def _write(self, response: web.StreamResponse, event: Any) -> None:
        data = (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n"
        for start in range(0, len(data), self.chunk_bytes):
            await response.write(data[start : start + self.chunk_bytes])


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": code, "message": message}, status=code)


@asynccontextmanager
async def kubernetes_api(folder: Path) -> AsyncIterator[KubernetesApi]:
    """Listens on a free port of 127.0.0.1 until the end of the block. Its account is in `folder`."""
    pem = certificate(folder)
    (folder / "ca.crt").write_text(pem.read_text().partition("-----END PRIVATE KEY-----\n")[2])
    (folder / "token").write_text("token-1\n")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    api = KubernetesApi(folder)
    app = web.Application()
    app.router.add_get(RESOURCE, api.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    api.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        api.stalled = False
        with suppress(TimeoutError):
            await runner.cleanup()
