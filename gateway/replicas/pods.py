"""Pods behind a Kubernetes Service, as changes of the fleet: which replicas there are, and which get no new requests.

    ready       a replica, named ENTRY.POD
    not ready,  the replica drains, and its cache stays in the index for GRACE_S: readiness flips under load, and an
    gone        endpoint that flips may be gone from its slice for a moment
    afterwards  the replica is removed
    new uid     another pod of the same name, whose cache is empty: the replica is another one at once

Pure but for the clock it is given. kubernetes.py reads the slices, fleet.py asks once a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import xxhash
from pydantic import ValidationError

from gateway.config import PodSettings, ReplicaSettings
from gateway.replicas.fleet import Change

GRACE_S: Final = 60.0
MAX_PODS: Final = 512
"""Of one Service, those that are gone and in their grace included; the first by name."""

MAX_ENDPOINTS: Final = 1000
"""Of one slice, which is also the API's limit."""

_NAME_CHARS: Final = 64


class Endpoint(NamedTuple):
    """One pod in one slice. `uid` and `pod` are the address where the slice names no pod."""

    pod: str
    uid: str
    address: str  # host:port
    ready: bool


class Slice(NamedTuple):
    """What of an EndpointSlice counts. `why`: it has no endpoints for us, because of this."""

    endpoints: tuple[Endpoint, ...]
    why: str = ""


def read_slice(found: Mapping[str, Any], port: str) -> Slice:
    """Of an EndpointSlice (discovery.k8s.io/v1). `port` is a name or number of its `ports`, empty for its only one.

    Raises TypeError, ValueError, KeyError or AttributeError for what is none.
    """
    if found["addressType"] not in ("IPv4", "IPv6"):
        return Slice((), f"it has addresses of type {found['addressType']}")
    number = _port(found.get("ports") or [], port)
    if number is None:
        have = ", ".join(f"{one.get('name') or '-'}={one.get('port')}" for one in found.get("ports") or []) or "none"
        return Slice((), f"its ports are {have[:200]}; the URL says {port or 'none'}")
    endpoints = (found.get("endpoints") or [])[:MAX_ENDPOINTS]
    return Slice(tuple(_endpoint(one, number) for one in endpoints if one.get("addresses")))


def _port(ports: Iterable[Mapping[str, Any]], wanted: str) -> int | None:
    tcp = [one for one in ports if one.get("protocol", "TCP") == "TCP" and type(one.get("port")) is int]
    if not wanted:
        return int(tcp[0]["port"]) if len(tcp) == 1 else None
    return next((int(one["port"]) for one in tcp if wanted in (one.get("name"), str(one["port"]))), None)


def _endpoint(found: Mapping[str, Any], port: int) -> Endpoint:
    conditions, target = found.get("conditions") or {}, found.get("targetRef") or {}
    host = str(found["addresses"][0])  # the others are the same pod, by the API's rules
    ready = conditions.get("ready") is not False and not conditions.get("terminating")  # not said is ready
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Endpoint(str(target.get("name") or host), str(target.get("uid") or host), address, ready)


def joined(slices: Mapping[str, Slice]) -> dict[str, Endpoint]:
    """Pod -> its endpoint. In several slices (while they are rebalanced, or with two families of addresses) the one
    that is ready counts, of equals the first by address, so that all gateways choose the same."""
    best: dict[str, Endpoint] = {}
    for one in (endpoint for found in slices.values() for endpoint in found.endpoints):
        other = best.get(one.pod)
        if other is None or _order(one) < _order(other):
            best[one.pod] = one
    return best


def _order(one: Endpoint) -> tuple[bool, bool, str, str]:
    return not one.ready, one.address.startswith("["), one.address, one.uid


class Pods:
    """Of one [[replicas]] entry."""

    def __init__(self, entry: ReplicaSettings, clock: Callable[[], float]) -> None:
        self._entry, self._clock = entry, clock
        self._pods: dict[str, tuple[Endpoint, float | None]] = {}  # since when it has not been ready

    def see(self, slices: Mapping[str, Slice]) -> int:
        """Takes in what there is now. Returns how many pods are too many."""
        now_s, found = self._clock(), joined(slices)
        taken = {one.address for one in found.values()}
        before = {
            pod: (one, since) for pod, (one, since) in self._pods.items() if pod in found or one.address not in taken
        }
        pods: dict[str, tuple[Endpoint, float | None]] = {}
        for pod, one in found.items():
            old, since = before.pop(pod, (None, None))
            if one.ready:
                pods[pod] = (one, None)
            elif old is not None and old.uid == one.uid:  # one that was never ready is not known yet
                pods[pod] = (one, now_s if since is None else since)
        for pod, (old, since) in before.items():
            pods[pod] = (old, now_s if since is None else since)
        order = sorted(pods, key=lambda pod: (pods[pod][1] is not None, pod))
        self._pods = {pod: pods[pod] for pod in order[:MAX_PODS]}
        return max(0, len(order) - MAX_PODS)

    def changes(self) -> dict[str, Change]:
        """Name of each replica -> what is decided about it now. What is no longer there has been removed."""
        end_s = self._clock() - GRACE_S
        self._pods = {pod: (one, since) for pod, (one, since) in self._pods.items() if since is None or since > end_s}
        found = {}
        for one, since in self._pods.values():
            name = f"{self._entry.name}.{one.pod}"
            if len(name) > _NAME_CHARS:
                name = f"{name[: _NAME_CHARS - 9]}-{xxhash.xxh32_hexdigest(name.encode())}"
            try:
                settings = PodSettings.of(self._entry, name, one.address, one.uid)
            except ValidationError:  # no name of a pod, nor an address, as Kubernetes allows them
                continue
            found[name] = Change(settings, draining=since is not None)
        return found
