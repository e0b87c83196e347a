"""A watch of EndpointSlices against an API server over TLS that keeps the API's rules and breaks off at any time."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError
from gateway import tasks
from gateway.app import cluster_url
from gateway.config import ReplicaSettings, Settings
from gateway.replicas import joining, kubernetes
from gateway.replicas.kubernetes import Discovery, ServiceWatch
from tests.fakes.cached_answers import CachedAnswers
from tests.fakes.kubernetes_api import NAMESPACE, SERVICE, KubernetesApi, endpoint_slice, kubernetes_api, pod
from tests.fakes.lru_cache import LruCache
from tests.fakes.replica_server import replica_server
from tests.fakes.waiting import until
from tests.fakes.whole import whole

ENTRY = {"name": "qwen", "kind": "vllm", "url": f"k8s://{NAMESPACE}/{SERVICE}:http"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "FIRST_RETRY_S", 0.002)
    monkeypatch.setattr(kubernetes, "LONGEST_RETRY_S", 0.05)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    async with kubernetes_api(tmp_path) as found:
        yield found


@asynccontextmanager
async def watching(api: KubernetesApi, **more: Any) -> AsyncIterator[ServiceWatch]:
    watch = ServiceWatch(ReplicaSettings.model_validate(ENTRY | more), api.url, api.account)
    task = tasks.spawn(watch.run(), name="watch")
    try:
        yield watch
    finally:
        await tasks.cancel(task)


def serving(watch: ServiceWatch) -> set[str]:
    return {name.removeprefix("qwen.") for name, change in watch.pods.changes().items() if not change.draining}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the watch logged."""
    return [record.message for record in caplog.records if record.name == kubernetes.__name__]


@pytest.mark.parametrize("chunk_bytes", [7, 1 << 16])
async def test_slices_are_listed_once_and_then_followed(api: KubernetesApi, chunk_bytes: int) -> None:
    api.chunk_bytes = chunk_bytes
    api.put(endpoint_slice("a", pod("vllm-0", "10.0.0.1")))
    async with watching(api) as watch:
        await until(lambda: serving(watch) == {"vllm-0"})
        api.put(endpoint_slice("b", pod("vllm-1", "10.0.0.2"), pod("vllm-2", "10.0.0.3")))
        await until(lambda: serving(watch) == {"vllm-0", "vllm-1", "vllm-2"})
        api.put(endpoint_slice("b", pod("vllm-1", "10.0.0.2", ready=False), pod("vllm-2", "10.0.0.3")))
        await until(lambda: serving(watch) == {"vllm-0", "vllm-2"})
        api.delete("a")
        await until(lambda: serving(watch) == {"vllm-2"})
    assert (len(api.lists), len(api.watches)) == (1, 1)


@pytest.mark.parametrize("halfway", [False, True])
async def test_a_broken_watch_goes_on_at_its_version_and_bookmarks_move_it_on(
    api: KubernetesApi, halfway: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(api) as watch:
        api.put(endpoint_slice("a", pod("vllm-0", "10.0.0.1")))
        await until(lambda: serving(watch) == {"vllm-0"})
        at = api.version
        api.disconnect(halfway=halfway)
        await until(lambda: at in api.watches)
        for _ in range(1000):
            api.touch()
        api.bookmark()
        await until(lambda: watch._version == str(api.version))
        api.compact()  # a version before the bookmark would be gone
        api.put(endpoint_slice("a", pod("vllm-1", "10.0.0.2")))
        api.end()
        await until(lambda: serving(watch) == {"vllm-1"})
    assert len(api.lists) == 1
    assert not said(caplog)


@pytest.mark.parametrize("as_status", [False, True], ids=["as an event", "as a status"])
async def test_a_version_that_is_gone_is_listed_again_and_what_was_missed_is_seen(
    api: KubernetesApi, as_status: bool, caplog: pytest.LogCaptureFixture
) -> None:
    api.gone_as_status = as_status
    api.put(endpoint_slice("a", pod("vllm-0", "10.0.0.1")), endpoint_slice("b", pod("vllm-1", "10.0.0.2")))
    async with watching(api) as watch:
        await until(lambda: serving(watch) == {"vllm-0", "vllm-1"} and bool(api.watches))
        api.stalled = True
        api.disconnect()
        api.delete("a")  # nobody will tell of it
        api.put(endpoint_slice("b", pod("vllm-2", "10.0.0.3")))
        api.touch()
        api.compact()
        api.stalled = False
        await until(lambda: serving(watch) == {"vllm-2"})
    assert len(api.lists) == 2
    assert not said(caplog)


async def test_a_token_that_rotates_is_read_again(api: KubernetesApi, caplog: pytest.LogCaptureFixture) -> None:
    api.put(endpoint_slice("a", pod("vllm-0", "10.0.0.1")))
    async with watching(api) as watch:
        await until(lambda: serving(watch) == {"vllm-0"})
        api.tokens = {"token-2"}
        api.disconnect()
        await until(lambda: "answers 401: Unauthorized; is account_dir's token of this cluster?" in caplog.text)
        assert serving(watch) == {"vllm-0"}  # an API server that refuses costs no replica
        (api.account / "token").write_text("token-2")
        api.put(endpoint_slice("a", pod("vllm-1", "10.0.0.2")))
        await until(lambda: serving(watch) == {"vllm-1"})
    assert "token-" not in caplog.text
    assert len([message for message in said(caplog) if "401" in message]) == 1


async def test_an_api_server_that_is_silent_is_asked_again_and_costs_no_replica(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kubernetes, "SILENT_S", 0.05)
    api.put(endpoint_slice("a", pod("vllm-0", "10.0.0.1")))
    async with watching(api) as watch:
        await until(lambda: serving(watch) == {"vllm-0"} and len(api.watches) > 2)
        api.stalled = True
        await until(lambda: "cannot be watched" in caplog.text)
        assert serving(watch) == {"vllm-0"}
        api.put(endpoint_slice("a", pod("vllm-1", "10.0.0.2")))
        api.stalled = False
        await until(lambda: serving(watch) == {"vllm-1"})
    assert len(api.lists) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"forbidden": True}, "needs get, list and watch on endpointslices of discovery.k8s.io there"),
        ({"account": Path("/nowhere")}, "No such file or directory"),
        ({"url": "https://127.0.0.1:1"}, "Cannot connect"),
    ],
)
async def test_what_is_wrong_is_one_line_and_no_more(
    api: KubernetesApi, change: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in change.items():
        setattr(api, name, value)
    async with watching(api):
        await until(lambda: why in caplog.text)
    (message,) = said(caplog)
    assert message.startswith(f"{ENTRY['url']} cannot be watched: ")
    assert "\n" not in message


async def test_a_server_with_another_certificate_is_not_told_the_token(
    api: KubernetesApi, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    async with kubernetes_api(tmp_path_factory.mktemp("other")) as other:
        (other.account / "token").write_text("token-1")
        watch = ServiceWatch(ReplicaSettings.model_validate(ENTRY), api.url, other.account)
        task = tasks.spawn(watch.run(), name="watch")
        await until(lambda: "certificate verify failed" in caplog.text)
        await tasks.cancel(task)
    assert not api.lists


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"type": "ADDED"}',
        '{"type": "ADDED", "object": {"metadata": {"name": "x"}}}',
        '{"type": "ERROR", "object": {"code": 500, "message": "etcdserver: leader changed"}}',
        "<html>",
        '{"type": "BOOKMARK", "object": null}',
        '{"type": "MODIFIED", "object": {"metadata": {"name": "' + "x" * 3000 + '"}}}',
    ],
)
async def test_nonsense_ends_the_watch_and_nothing_else(
    api: KubernetesApi, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "MAX_EVENT_BYTES", 2000)
    async with watching(api) as watch:
        api.put(endpoint_slice("a", pod("vllm-0", "10.0.0.1")))
        await until(lambda: serving(watch) == {"vllm-0"} and len(api.watches) == 1)
        api.answer(line)
        await until(lambda: len(api.watches) > 1)
        assert serving(watch) == {"vllm-0"}
        api.put(endpoint_slice("a", pod("vllm-1", "10.0.0.2")))
        await until(lambda: serving(watch) == {"vllm-1"})


async def test_a_list_that_is_too_large_is_not_taken(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kubernetes, "MAX_LIST_BYTES", 1 << 20)
    api.put(endpoint_slice("a", pod("vllm-0", "10.0.0.1"), metadata_padding="x" * (1 << 20)))
    async with watching(api) as watch:
        await until(lambda: "its slices are more than 1 MiB" in caplog.text)
        assert not serving(watch)


@pytest.mark.parametrize("seed", range(6))
async def test_after_any_changes_and_faults_the_watch_sees_what_there_is(api: KubernetesApi, seed: int) -> None:
    chance, names = random.Random(seed), ["a", "b", "c"]
    faults = [api.disconnect, lambda: api.disconnect(halfway=True), api.end, api.bookmark, api.compact, api.touch]
    api.chunk_bytes = chance.choice([11, 1 << 16])
    async with watching(api) as watch:
        for _ in range(8):
            for _ in range(chance.randrange(1, 8)):
                name = chance.choice(names)
                if chance.random() < 0.25:
                    chance.choice(faults)()
                elif name in api.slices and chance.random() < 0.3:
                    api.delete(name)
                else:
                    numbers = chance.sample(range(4), chance.randrange(4))
                    ready = {number: chance.random() < 0.7 for number in numbers}
                    api.gone_as_status = chance.random() < 0.5
                    pods = (pod(f"{name}-{i}", f"10.{names.index(name)}.0.{i}", ready=ready[i]) for i in numbers)
                    api.put(endpoint_slice(name, *pods))
            there = [one for found in api.slices.values() for one in found["endpoints"] if one["conditions"]["ready"]]
            expected = {one["targetRef"]["name"] for one in there}
            await until(lambda expected=expected: serving(watch) == expected)


@pytest.mark.slow
async def test_a_flip_of_readiness_keeps_the_index_and_a_new_uid_purges_it(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "LOOK_S", 0.05)
    answers = CachedAnswers(LruCache(96, 16), None)
    text = [{"role": "user", "content": "The traveller reaches the next town and asks for the old road. " * 12}]
    async with replica_server(block_size=16, num_blocks=96, completions=answers, events_port=None) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")

        def put(uid: str, *, ready: bool = True) -> None:
            api.put(endpoint_slice("a", pod("vllm-0", host, uid, ready=ready), port=int(port)))

        sections: dict[str, Any] = {
            "replicas": [ENTRY],
            "kubernetes": {"url": api.url, "account_dir": api.account},
            "response_cache": {"mode": "off"},
        }
        async with whole(engines=0, sections=sections) as running:
            gateway = running.gateway
            gateway.discovery.start()
            await gateway.fleet.start()

            async def predicted() -> int:
                _, headers = await running.ask(*text)
                return int(headers["x-kvasir-predicted-tokens"])

            def states() -> list[tuple[str, bool, bool]]:
                return [(one.name, one.joined, one.draining) for one in gateway.fleet.replicas]

            put("first")
            await until(lambda: states() == [("qwen.vllm-0", True, False)], 120)  # its tokeniser is compared first
            assert await predicted() == 0
            kept = await predicted()
            assert kept > 64
            put("first", ready=False)
            await until(lambda: states() == [("qwen.vllm-0", True, True)])
            put("first")
            await until(lambda: states() == [("qwen.vllm-0", True, False)])
            assert await predicted() == kept
            before = gateway.fleet.replicas[0].hello.incarnation
            put("second")

            def replaced() -> bool:
                (one,) = gateway.fleet.replicas or [None]
                return one is not None and one.joined and one.hello.incarnation != before

            await until(replaced, 120)
            assert await predicted() == 0
            await gateway.discovery.stop()
            await gateway.fleet.stop()


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "https://10.96.0.1:443"),
        ({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}, "https://[fd00::1]:6443"),
    ],
)
def test_in_a_pod_the_cluster_is_its_own_and_elsewhere_it_must_be_named(environ: dict[str, str], url: str) -> None:
    settings = Settings.model_validate({"replicas": [ENTRY]})
    assert cluster_url(settings, environ) == url
    with pytest.raises(ConfigError, match=r"needs kubernetes\.url"):
        cluster_url(settings, {})
    assert cluster_url(Settings(), {}) == ""


async def test_nothing_is_watched_where_no_entry_names_a_service(tmp_path: Path) -> None:
    discovery = Discovery((), "", tmp_path)
    discovery.start()
    assert discovery.changes() == {}
    await discovery.stop()
