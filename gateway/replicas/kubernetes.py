"""Watches the EndpointSlices of the Services that [[replicas]] name, with the rights of a pod's service account.

    1. list    every slice of the Service, and the version of the cluster's state
    2. watch   what changes from that version on, one JSON object per line; bookmarks move the version on
    3. again   a watch that ends, breaks or is silent for SILENT_S is begun again at the last version; a version that
               the server has forgotten (410) means step 1

What was last seen stays while the API server cannot be reached, or answers nonsense: its outage costs no replica.
API: kubernetes.io/docs/reference/using-api/api-concepts. pods.py has what is made of the slices.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from gateway import tasks
from gateway.config import ReplicaSettings
from gateway.replicas.calls import message_of, read_most
from gateway.replicas.fleet import Change
from gateway.replicas.pods import MAX_PODS, Pods, Slice, read_slice

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
LIST_TIMEOUT_S: Final = 30.0
WATCH_S: Final = 300
"""After which the server ends a watch, at most; the least is half of it, so that gateways do not come at once."""

SILENT_S: Final = 90.0
"""Without a byte of a watch, where bookmarks come once a minute: the connection is dead."""

WELL_S: Final = 10.0
"""After a watch that lasted as long, or brought an event, the next one begins soon."""

FIRST_RETRY_S: Final = 0.25
LONGEST_RETRY_S: Final = 30.0
MAX_LIST_BYTES: Final = 16 << 20
MAX_EVENT_BYTES: Final = 4 << 20
"""Of one slice: it has 1,000 endpoints at most."""

MAX_ERROR_BYTES: Final = 4096
MAX_SLICES: Final = 64
GROUP: Final = "discovery.k8s.io/v1"


class WatchError(Exception):
    """Why the slices are not known, in words for an operator."""


class GoneError(WatchError):
    """The version is too old: list again."""


class Discovery:
    """Of all entries with a Service. Belongs to one event loop, from `start` to `stop`."""

    def __init__(self, entries: Sequence[ReplicaSettings], url: str, account: Path) -> None:
        self._watches = [ServiceWatch(one, url, account) for one in entries]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [tasks.spawn(one.run(), name=f"watch of {one.url}") for one in self._watches]

    async def stop(self) -> None:
        for task in self._tasks:
            await tasks.cancel(task)

    def changes(self) -> dict[str, Change]:
        """See Pods.changes."""
        return {name: change for one in self._watches for name, change in one.pods.changes().items()}


class ServiceWatch:
    """The slices of one Service, and the pods that follow from them."""

    def __init__(self, entry: ReplicaSettings, url: str, account: Path, group: str = GROUP) -> None:
        assert entry.service is not None
        self.url, self._service = entry.url, entry.service
        self.pods = Pods(entry, time.monotonic)
        self._account = account
        self._path = f"{url}/apis/{group}/namespaces/{self._service.namespace}/endpointslices"
        self._slices: dict[str, Slice] = {}
        self._version = ""  # of the cluster's state; empty: list first
        self._answered = self._heard = False  # the watch that runs is granted, and brought an event
        self._told: dict[str, str] = {}  # what the log says is wrong, by topic

    async def run(self) -> None:
        """Until it is cancelled."""
        retry_s = FIRST_RETRY_S
        while not tasks.was_cancelled():
            begun_s, self._answered, self._heard, why = time.monotonic(), False, False, ""
            try:
                async with self._session() as session:
                    if not self._version:
                        await self._list(session)
                    await self._watch(session)
            except GoneError:
                self._version = ""
            except (WatchError, ValueError) as error:
                why = f"cannot be watched: {error}"
            except (aiohttp.ClientError, OSError) as error:
                if not self._answered:  # that a watch breaks off now and then is as it should be
                    why = f"cannot be watched: {str(error) or type(error).__name__}"
            if self._heard or time.monotonic() - begun_s > WELL_S:
                retry_s = FIRST_RETRY_S
            self._warn_once("watch", why)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    def _session(self) -> aiohttp.ClientSession:
        """With the token and CA of now. Raises OSError where they cannot be read."""
        context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        token = (self._account / "token").read_text(encoding="ascii").strip()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENT_S)
        return aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
            connector=aiohttp.TCPConnector(ssl=context, limit=1),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=timeout,
        )

    async def _list(self, session: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(LIST_TIMEOUT_S), session.get(self._path, params=self._query()) as answer:
            await _check(answer)
            body = await read_most(answer, MAX_LIST_BYTES)
        if len(body) >= MAX_LIST_BYTES:
            raise WatchError(f"its slices are more than {MAX_LIST_BYTES >> 20} MiB")
        found = orjson.loads(body)
        try:
            slices = {str(one["metadata"]["name"]): self._read(one) for one in found["items"]}
            version = str(found["metadata"]["resourceVersion"])
        except (TypeError, KeyError, AttributeError) as error:
            raise WatchError(f"the answer is no list of EndpointSlices: {error!r}") from None
        self._slices, self._version = slices, version
        self._seen()

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        """Until the server ends it."""
        query = self._query() | {
            "watch": "1",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(random.randint(WATCH_S // 2, WATCH_S)),  # noqa: S311 - jitter
        }
        async with session.get(self._path, params=query) as answer:
            await _check(answer)
            self._answered = True
            async for line in _lines(answer):
                event = orjson.loads(line)
                try:
                    self._take(event["type"], event["object"])
                except (TypeError, KeyError, AttributeError) as error:
                    self._version = ""  # what it said is not known
                    raise WatchError(f"the answer has no event of an EndpointSlice: {error!r}") from None
                self._heard = True

    def _take(self, kind: str, found: Mapping[str, Any]) -> None:
        if kind == "ERROR":
            _raise(found["code"], " ".join(str(found.get("message"))[:200].split()))
        meta = found["metadata"]
        if kind == "DELETED":
            self._slices.pop(str(meta["name"]), None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[str(meta["name"])] = self._read(found)
        self._version = str(meta["resourceVersion"])
        if kind != "BOOKMARK":
            self._seen()

    def _read(self, found: Mapping[str, Any]) -> Slice:
        return read_slice(found, self._service.port)

    def _seen(self) -> None:
        slices = {name: self._slices[name] for name in sorted(self._slices)[:MAX_SLICES]}
        why = f"has {len(self._slices)} EndpointSlices, of which {MAX_SLICES} are used"
        self._warn_once("slices", why if len(slices) < len(self._slices) else "")
        self._slices = slices
        none = not any(one.endpoints for one in slices.values())
        reason = next((one.why for one in slices.values() if one.why), "") if none else ""
        self._warn_once("ports", reason and f"has no pod that can be used: {reason}")
        more = self.pods.see(slices)
        self._warn_once("pods", f"has {more} pods more than {MAX_PODS}, which are not used" if more else "")

    def _query(self) -> dict[str, str]:
        return {"labelSelector": f"kubernetes.io/service-name={self._service.name}"}

    def _warn_once(self, topic: str, why: str) -> None:
        """Again only when the reason is another one; empty: there is none."""
        if why not in ("", self._told.get(topic)):
            log.warning("%s %s", self.url, why)
        self._told[topic] = why


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        _raise(answer.status, message_of(await read_most(answer, MAX_ERROR_BYTES)))


def _raise(code: object, said: str) -> None:
    if code == 410:
        raise GoneError(said)
    hint = {
        401: "; is account_dir's token of this cluster?",
        403: "; its service account needs get, list and watch on endpointslices of discovery.k8s.io there",
        404: "; it needs discovery.k8s.io/v1 (Kubernetes 1.21)",
    }.get(code if isinstance(code, int) else 0, "")
    raise WatchError(f"the API server answers {code}: {said}{hint}")


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Whole lines: one that a broken connection cut off is none."""
    buffer = bytearray()
    async for chunk in answer.content.iter_any():
        *whole, rest = (buffer + chunk).split(b"\n")
        for line in whole:
            if line:
                yield bytes(line)
        if len(rest) > MAX_EVENT_BYTES:
            raise WatchError(f"an event is more than {MAX_EVENT_BYTES >> 20} MiB")
        buffer = rest
