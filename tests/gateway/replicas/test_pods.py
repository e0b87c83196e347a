"""What pods of a Service become in the fleet: pure, by example and by properties."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import ReplicaSettings
from gateway.replicas.pods import GRACE_S, MAX_PODS, Endpoint, Pods, Slice, joined, read_slice
from tests.fakes.clock import Clock
from tests.fakes.fleet import FakeGateway
from tests.fakes.kubernetes_api import endpoint_slice, pod

SERVICE = {"name": "qwen", "kind": "vllm", "url": "k8s://models/vllm:http"}


def entry(**more: Any) -> ReplicaSettings:
    return ReplicaSettings.model_validate(SERVICE | more)


def slices(*found: dict[str, Any], port: str = "http") -> dict[str, Slice]:
    return {one["metadata"]["name"]: read_slice(one, port) for one in found}


def state(pods: Pods) -> dict[str, tuple[str, bool]]:
    """Name -> URL, and whether it drains."""
    return {name: (one.settings.url, one.draining) for name, one in pods.changes().items() if one.settings}


def test_each_ready_pod_is_a_replica_with_the_settings_of_the_entry() -> None:
    pods = Pods(entry(model="qwen", key="sk-secret", kv_events="tcp://*:5557"), Clock())
    pods.see(slices(endpoint_slice("a", pod("vllm-0", "10.0.0.1"), pod("vllm-1", "10.0.0.2", ready=False))))
    ((name, change),) = pods.changes().items()
    settings: Any = change.settings
    assert (name, settings.url, settings.entry) == ("qwen.vllm-0", "http://10.0.0.1:8000", "qwen")
    assert (settings.kv_events, settings.kv_replay, settings.model) == ("tcp://10.0.0.1:5557", "auto", "qwen")
    assert settings.key.get_secret_value() == "sk-secret"


def test_a_pod_that_is_not_ready_drains_and_is_removed_when_its_grace_is_over() -> None:
    clock = Clock()
    pods = Pods(entry(), clock)
    up = slices(endpoint_slice("a", pod("vllm-0", "10.0.0.1")))
    down = [
        slices(endpoint_slice("a", pod("vllm-0", "10.0.0.1", ready=False))),
        slices(endpoint_slice("a", pod("vllm-0", "10.0.0.1", terminating=True))),
        slices(endpoint_slice("a")),
        {},
    ]
    for gone in down:
        pods.see(up)
        assert state(pods) == {"qwen.vllm-0": ("http://10.0.0.1:8000", False)}
        pods.see(gone)
        clock.now_s += GRACE_S - 1
        pods.see(gone)  # the grace does not begin again
        assert state(pods) == {"qwen.vllm-0": ("http://10.0.0.1:8000", True)}
        pods.see(up)
        assert state(pods) == {"qwen.vllm-0": ("http://10.0.0.1:8000", False)}
        pods.see(gone)
        clock.now_s += GRACE_S
        assert state(pods) == {}


def test_another_pod_of_the_same_name_or_address_takes_the_place_at_once() -> None:
    pods = Pods(entry(), Clock())
    pods.see(slices(endpoint_slice("a", pod("vllm-0", "10.0.0.1"), pod("old", "10.0.0.9"))))
    before = pods.changes()["qwen.vllm-0"].settings
    pods.see(slices(endpoint_slice("a", pod("vllm-0", "10.0.0.1", "new"), pod("fresh", "10.0.0.9"))))
    assert state(pods) == {
        "qwen.vllm-0": ("http://10.0.0.1:8000", False),
        "qwen.fresh": ("http://10.0.0.9:8000", False),
    }
    after = pods.changes()["qwen.vllm-0"].settings
    assert before is not None
    assert after is not None
    assert before != after
    assert before.place != after.place


def test_slices_are_joined_and_all_gateways_choose_the_same_endpoint_of_a_pod() -> None:
    four = endpoint_slice("b", pod("vllm-0", "10.0.0.1"), pod("vllm-1", "10.0.0.2", ready=False))
    six = endpoint_slice("a", pod("vllm-0", "fd00::1"), pod("vllm-1", "fd00::2"), addressType="IPv6")
    names = endpoint_slice("c", pod("vllm-2", "example.com"), addressType="FQDN")
    found = joined(slices(four, six, names))
    assert found == joined(slices(names, six, four))
    assert {one.address for one in found.values()} == {"10.0.0.1:8000", "[fd00::2]:8000"}


@pytest.mark.parametrize(
    ("port", "address", "why"),
    [
        ("http", "10.0.0.1:8000", ""),
        ("events", "10.0.0.1:5557", ""),
        ("5557", "10.0.0.1:5557", ""),
        ("", None, "its ports are http=8000, events=5557; the URL says none"),
        ("grpc", None, "its ports are http=8000, events=5557; the URL says grpc"),
    ],
)
def test_a_port_is_a_name_or_a_number_of_the_pods(port: str, address: str | None, why: str) -> None:
    found = read_slice(endpoint_slice("a", pod("vllm-0", "10.0.0.1")), port)
    assert ([one.address for one in found.endpoints], found.why) == ([address] if address else [], why)
    only = endpoint_slice("a", pod("vllm-0", "10.0.0.1"), ports=[{"name": "", "port": 8000, "protocol": "TCP"}])
    assert read_slice(only, "").endpoints[0].address == "10.0.0.1:8000"


def test_an_endpoint_without_a_pod_is_named_by_its_address() -> None:
    found = {"addresses": ["10.0.0.1"]}  # as people write them: no condition is ready
    assert read_slice(endpoint_slice("a", found), "http").endpoints == (
        Endpoint("10.0.0.1", "10.0.0.1", "10.0.0.1:8000", ready=True),
    )


def test_there_are_never_more_pods_than_the_limit_and_ready_ones_come_first() -> None:
    pods = Pods(entry(), Clock())
    assert (
        pods.see(slices(endpoint_slice("a", *(pod(f"old-{i}", f"10.1.{i >> 8}.{i & 255}") for i in range(500))))) == 0
    )
    fresh = [pod(f"x-{i}", f"10.2.{i >> 8}.{i & 255}") for i in range(MAX_PODS)]
    assert pods.see(slices(endpoint_slice("a", *fresh))) == 500
    assert len(pods.changes()) == MAX_PODS
    assert not any(change.draining for change in pods.changes().values())


def test_a_long_name_of_a_pod_gives_a_short_one_of_its_own() -> None:
    pods = Pods(entry(), Clock())
    pods.see(slices(endpoint_slice("a", pod("p" * 80 + "-1", "10.0.0.1"), pod("p" * 80 + "-2", "10.0.0.2"))))
    assert len(pods.changes()) == 2
    assert all(len(name) <= 64 for name in pods.changes())


SEEN = st.lists(
    st.builds(
        Endpoint,
        pod=st.sampled_from(["p0", "p1", "p2"]),
        uid=st.sampled_from(["u0", "u1"]),
        address=st.sampled_from(["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]),
        ready=st.booleans(),
    ),
    max_size=4,
    unique_by=(lambda one: one.pod, lambda one: one.address),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(SEEN, st.integers(0, 40)), max_size=12))
def test_whatever_comes_ready_pods_serve_and_others_drain_no_longer_than_their_grace(
    steps: list[tuple[list[Endpoint], int]],
) -> None:
    clock = Clock()
    pods = Pods(entry(), clock)
    ready_until: dict[tuple[str, str], float] = {}  # pod and uid -> when it was last seen ready
    before: list[Endpoint] = []
    for seen, after_s in steps:
        pods.see({"a": Slice(tuple(seen))})
        ready_until |= {(one.pod, one.uid): clock.now_s for one in before if one.ready}
        for _ in range(2):
            found = {name.removeprefix("qwen."): change for name, change in pods.changes().items()}
            those: dict[str, Any] = {name: change.settings for name, change in found.items()}
            # 1. Exactly those that are ready serve, as they are now.
            serving = {(name, one.uid, one.url) for name, one in those.items() if not found[name].draining}
            assert serving == {(one.pod, one.uid, f"http://{one.address}") for one in seen if one.ready}
            # 2. No server is there twice.
            assert len({one.url for one in those.values()}) == len(those)
            # 3. What drains was ready within the grace, under this uid.
            for name, one in those.items():
                if found[name].draining:
                    assert clock.now_s - ready_until[name, one.uid] < GRACE_S
            clock.now_s += after_s
        before = seen
        ready_until |= {(one.pod, one.uid): clock.now_s for one in before if one.ready}


async def test_the_fleet_takes_in_drains_replaces_and_removes_pods_as_they_come_and_go() -> None:
    clock = Clock()
    pods = Pods(entry(), clock)
    gateway = FakeGateway(configured=("file",), pods=pods.changes)
    gateway.fleet.attach()

    async def settle(*found: dict[str, Any]) -> list[str]:
        pods.see(slices(endpoint_slice("a", *found)))
        await gateway.fleet._sync()
        return list(gateway.attached)

    assert await settle(pod("vllm-0", "10.0.0.1"), pod("vllm-1", "10.0.0.2")) == ["file", "qwen.vllm-0", "qwen.vllm-1"]
    kept = gateway.attached["qwen.vllm-0"]
    await settle(pod("vllm-0", "10.0.0.1", ready=False), pod("vllm-1", "10.0.0.2"))
    assert gateway.draining == ["qwen.vllm-0"]
    await settle(pod("vllm-0", "10.0.0.1"), pod("vllm-1", "10.0.0.2"))
    assert gateway.attached["qwen.vllm-0"] is kept  # and with it what the index has of its cache
    assert not gateway.draining
    # Drained by hand it stays drained, and it cannot be removed; a pod of another uid is another replica at once.
    await gateway.fleet.drain("qwen.vllm-1")
    kept.in_flight = 1
    await settle(pod("vllm-0", "10.0.0.1", "another"), pod("vllm-1", "10.0.0.2"))
    assert gateway.attached["qwen.vllm-0"] is not kept
    assert gateway.draining == ["qwen.vllm-1"]
    with pytest.raises(Exception, match=r"qwen\.vllm-1 is one of the settings"):
        await gateway.fleet.remove("qwen.vllm-1")
    # What runs in a pod that is gone may end; afterwards nothing is left of it, nor of its having been drained.
    gateway.attached["qwen.vllm-1"].in_flight = 1
    await settle(pod("vllm-0", "10.0.0.1", "another"))
    clock.now_s += GRACE_S
    assert "qwen.vllm-1" in await settle(pod("vllm-0", "10.0.0.1", "another"))
    gateway.attached["qwen.vllm-1"].in_flight = 0
    assert await settle(pod("vllm-0", "10.0.0.1", "another")) == ["file", "qwen.vllm-0"]
    await settle(pod("vllm-0", "10.0.0.1", "another"), pod("vllm-1", "10.0.0.2"))
    assert not gateway.draining
