"""Several processes that are one gateway: real ones, with a real Redis, over an engine without a model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from cryptography import x509
from redis.asyncio import Redis

from engine.config import ConfigError
from gateway import processes
from gateway import workers as workers_module
from gateway.config import LimitSettings, QueueSettings, ServerSettings, Settings, UpstreamSettings
from gateway.errors import OverloadedError
from gateway.parent import Place
from gateway.peer import Peer
from gateway.processes import FIRST_TRIES, ChildStartError
from gateway.workers import Workers, bind, part_of
from tests.fakes import tokenisers
from tests.fakes.certificates import Authority
from tests.fakes.collector import collector
from tests.fakes.fake_engine import FakeEngine, make_hello
from tests.fakes.redis_process import RedisProcess
from tests.fakes.server import Server, inside
from tests.fakes.waiting import until

LIMIT_S = 60.0
CHAT = "/v1/chat/completions"
SENT = 'kvasir_requests_total{endpoint="/v1/chat/completions",model="demo",status="200",tenant="anonymous"}'
CONFIG = """
[[tenants]]
name = "north"
keys = ["north-key-1"]
requests_per_minute = 7

[[tenants]]
name = "anonymous"
keys = ["none-key-1"]

[auth]
admin_keys = ["admin-key-1"]
"""

HANGS = """
import asyncio, pickle, socket, sys
from gateway.peer import Peer

async def answer(what, value):
    await asyncio.Event().wait()

async def main():
    _, _, end = pickle.load(sys.stdin.buffer)
    peer = Peer(answer)
    await peer.connect(socket.socket(fileno=end))
    await peer.ask("up", timeout_s=30)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Running:
    """A gateway with workers, and its engine. Every request has a connection of its own."""

    def __init__(self, server: Server, engine: FakeEngine, session: aiohttp.ClientSession) -> None:
        self.server, self.engine, self.session = server, engine, session
        self.sent = 0

    @property
    def workers(self) -> list[int]:
        return self.server.children("gateway.worker")

    async def ask(self, text: str = "hello", *, key: str = "none-key-1", **more: Any) -> tuple[int, dict[str, str]]:
        """Status and headers of an answer. Raises aiohttp.ClientError."""
        body = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": text}], **more}
        async with self.session.post(self.server.url + CHAT, json=body, headers=_bearer(key)) as answer:
            await answer.read()
            self.sent += answer.status == 200
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}

    async def ask_until(self, holds: Callable[[], bool]) -> None:
        """Asks until it is so: which worker gets a connection is chance."""

        async def asked() -> bool:
            assert (await self.ask())[0] == 200
            return holds()

        await until(asked, LIMIT_S)

    async def get(self, path: str, key: str = "admin-key-1") -> Any:
        async with self.session.get(self.server.url + path, headers=_bearer(key)) as answer:
            text = await answer.text()
            return json.loads(text) if "json" in answer.headers["content-type"] else text

    async def post(self, path: str, body: Any, key: str = "admin-key-1") -> Any:
        async with self.session.post(self.server.url + path, json=body, headers=_bearer(key)) as answer:
            return await answer.json()

    async def counted(self) -> float:
        """Chats that were answered, by /metrics."""
        return (await self.metrics()).get(SENT, 0.0)

    async def metrics(self) -> dict[str, float]:
        found = re.findall(r"^(kvasir_\S+) (\S+)$", await self.get("/metrics"), re.MULTILINE)
        return {name: float(value) for name, value in found}

    async def all_run(self, restarts: int) -> None:
        async def do() -> bool:
            health = await self.get("/health")
            return bool(health["workers"] == {"configured": 2, "running": 2, "restarts": restarts})

        await until(do, LIMIT_S)


@asynccontextmanager
async def running(folder: Path, redis: RedisProcess, *flags: str, **behaviour: Any) -> AsyncIterator[Running]:
    files = tokenisers.qwen()
    hello = make_hello(tokenizer=files.fingerprint(), vocab_size=tokenisers.hello(files).vocab_size)
    async with FakeEngine(hello=hello, tokenizer=files, **behaviour) as engine:
        flags = (
            "--workers",
            "2",
            "--redis-timeout-s",
            "10",
            "--redis-url",
            redis.url,
            "--engine-urls",
            engine.url,
            *flags,
        )
        server = Server(folder / "data", *flags, command="gateway", config=CONFIG)
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(LIMIT_S)
        async with inside(server), aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            # A worker listens before it has its engine, and answers 503 until then.
            joined = "engine .* joined: "
            await asyncio.to_thread(
                server.wait_until,
                lambda: sum(bool(re.search(joined, line)) for line in server.lines) == 2,
                "an engine each",
            )
            yield Running(server, engine, session)


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def total(samples: dict[str, float], name: str, label: str = "") -> float:
    return sum(value for sample, value in samples.items() if sample.startswith(f"{name}{{") and label in sample)


# -- requests ---------------------------------------------------------------------------------------------------------


async def test_any_worker_tells_the_sums_of_all_and_of_those_that_are_no_more(
    tmp_path: Path, own_redis: RedisProcess
) -> None:
    async with running(tmp_path, own_redis) as gateway:
        await gateway.ask_until(lambda: len(gateway.engine.by_gateway) == 2)
        for _ in range(8):
            assert await gateway.counted() == gateway.sent
        samples = await gateway.metrics()
        stats = await gateway.get("/admin/stats")
        assert samples["kvasir_workers"] == 2
        assert total(samples, "kvasir_first_token_seconds_count") == gateway.sent
        assert total(samples, "kvasir_first_token_seconds_bucket", 'le="+Inf"') == gateway.sent
        assert stats["tenants"]["anonymous"]["requests"] == gateway.sent
        assert stats["queues"]["online"]["admitted"] == gateway.sent
        assert stats["ledger"]["requests"] == gateway.sent
        assert [one["state"] for one in stats["engines"]] == ["ready"]

        os.kill(gateway.workers[0], signal.SIGKILL)
        await asyncio.to_thread(gateway.server.wait_for_line, "worker . ended with status -9")
        for _ in range(10):
            assert (await gateway.ask())[0] == 200  # its socket does not listen
        assert await gateway.counted() == gateway.sent
        await gateway.all_run(restarts=1)
        await gateway.ask_until(lambda: len(gateway.engine.by_gateway) == 3)
        assert await gateway.counted() == gateway.sent
        assert (await gateway.metrics())["kvasir_worker_restarts_total"] == 1
        assert (await gateway.get("/admin/stats"))["queues"]["online"]["admitted"] == gateway.sent


@pytest.mark.slow
async def test_each_worker_exports_its_own_spans_and_a_stop_loses_none(tmp_path: Path, own_redis: RedisProcess) -> None:
    async with collector() as there:
        flags = ("--otel-endpoint", there.url, "--otel-sample", "1")
        async with running(tmp_path, own_redis, *flags) as gateway:
            await gateway.ask_until(lambda: len(gateway.engine.by_gateway) == 2)
            await until(lambda: len(there.roots) == gateway.sent)

            async def all_counted() -> bool:
                samples = await gateway.metrics()
                return samples['kvasir_traced_requests_total{outcome="exported"}'] == gateway.sent

            await until(all_counted)
            await gateway.ask()
        assert len(there.roots) == len({root.trace_id for root in there.roots}) == gateway.sent
        assert len({resource["service.instance.id"] for resource in there.resources}) == 2


@pytest.mark.slow
async def test_a_worker_that_is_killed_under_load_fails_no_more_than_what_it_had(
    tmp_path: Path, own_redis: RedisProcess
) -> None:
    failed: list[aiohttp.ClientError] = []
    ended = asyncio.Event()

    async def keep_asking() -> None:
        while not ended.is_set():
            try:
                assert (await gateway.ask())[0] == 200
            except aiohttp.ClientError as error:
                failed.append(error)

    async with running(tmp_path, own_redis, interval_s=0.01) as gateway:
        async with asyncio.TaskGroup() as clients:
            for _ in range(8):
                clients.create_task(keep_asking())
            await until(lambda: len(gateway.engine.by_gateway) == 2 and gateway.sent > 20, LIMIT_S)
            last = await gateway.counted()
            os.kill(gateway.workers[0], signal.SIGKILL)
            await until(lambda: len(gateway.workers) == 1)
            assert await gateway.counted() >= last
            await gateway.all_run(restarts=1)
            await until(lambda: len(gateway.engine.by_gateway) == 3, LIMIT_S)
            ended.set()
        assert len(failed) <= 16  # of each client the one that it had, and one before its end was noticed
        assert last < await gateway.counted() <= gateway.sent


# -- changed settings -------------------------------------------------------------------------------------------------


async def kvasir(*arguments: str, **more: str) -> tuple[int, str, str]:
    """Of a command: exit status, what it printed, and its errors."""
    environ = {**os.environ, **({"KVASIR_API_KEY": "admin-key-1"} if arguments[0] == "reload" else {}), **more}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.cli", *arguments, env=environ, stdout=pipe, stderr=pipe
    )
    said, errors = await process.communicate()
    return process.returncode or 0, said.decode(), errors.decode()


@pytest.mark.slow
async def test_changed_settings_hold_in_all_workers_or_in_none_while_they_answer(
    tmp_path: Path, own_redis: RedisProcess
) -> None:
    south = '\n[[tenants]]\nname = "south"\nkeys = ["south-key-1"]\n'
    ended = asyncio.Event()

    async def keep_asking() -> None:
        while not ended.is_set():
            assert (await gateway.ask())[0] == 200

    async def of_south() -> set[int]:
        return {(await gateway.ask(key="south-key-1"))[0] for _ in range(12)}

    async with running(tmp_path, own_redis) as gateway:
        file, url = tmp_path / "data" / "kvasir.toml", gateway.server.url
        async with asyncio.TaskGroup() as clients:
            for _ in range(4):
                clients.create_task(keep_asking())
            await until(lambda: len(gateway.engine.by_gateway) == 2, LIMIT_S)
            file.write_text(CONFIG + south)
            gateway.server.process.send_signal(signal.SIGHUP)
            await asyncio.to_thread(gateway.server.wait_for_line, "settings reloaded; changed: tenants.south added")
            assert await of_south() == {200}
            # A broken file, as at the start.
            file.write_text(CONFIG + south.replace("south-key-1", "short"))
            status, said, errors = await kvasir("reload", "--url", url)
            assert (status, said) == (2, "")
            started = await kvasir("gateway", "--config", str(file), "--port", "0")
            assert started == (2, "", errors.replace("kvasir reload:", "kvasir gateway:"))
            assert "tenants.2.keys.0" in errors
            assert await of_south() == {200}
            ended.set()
        # A worker that is started again has what the others have.
        os.kill(gateway.workers[0], signal.SIGKILL)
        await asyncio.to_thread(gateway.server.wait_for_line, "worker . ended with status -9")
        await gateway.all_run(restarts=1)
        assert await of_south() == {200}
        file.write_text(CONFIG)
        assert await kvasir("reload", "--url", url) == (0, "changed: tenants.south removed\n", "")
        assert await of_south() == {401}
        changes = (await gateway.get("/admin/audit"))["changes"]
        assert [(one["which"]["settings"], one["from"]) for one in changes] == [
            ("tenants.south removed", "127.0.0.1"),
            ("tenants.south added", ""),
        ]


@pytest.mark.slow
async def test_all_workers_speak_https_with_the_certificate_that_is_there_now(
    tmp_path: Path, own_redis: RedisProcess
) -> None:
    """And commands speak it to them, with the CA that the environment names."""
    authority = Authority()
    folder = authority.issue(tmp_path / "tls")
    files = ("--tls-cert", str(folder / "tls.crt"), "--tls-key", str(folder / "tls.key"))

    def serial() -> int:
        pem = ssl.get_server_certificate(("127.0.0.1", port))
        return x509.load_pem_x509_certificate(pem.encode()).serial_number

    async with running(tmp_path, own_redis, *files) as gateway:
        url, port = gateway.server.url, int(gateway.server.url.rpartition(":")[2])
        assert url.startswith("https://")
        assert any(f'base_url="{url}/v1"' in line for line in gateway.server.lines)
        reload = ("reload", "--url", url)
        assert await kvasir(*reload, SSL_CERT_FILE=str(folder / "ca.crt")) == (0, "nothing has changed\n", "")
        status, _, errors = await kvasir(*reload, SSL_CERT_FILE="")
        assert (status, len(errors.splitlines())) == (1, 1)
        assert "certificate" in errors
        first = serial()
        authority.issue(folder)
        # Which worker gets a connection is chance.
        await until(lambda: first not in {serial() for _ in range(20)}, LIMIT_S)
    (folder / "tls.key").unlink()
    server = Server(tmp_path / "data", "--workers", "2", "--redis-url", own_redis.url, *files, command="gateway")
    with pytest.raises(TimeoutError, match="cannot be read"):
        server.__enter__()
    assert server.lines == [f"kvasir gateway: tls: {folder}/tls.key cannot be read: No such file or directory"]


class FakePeer:
    """A worker's end, which says why it cannot use settings, and notes what it is told."""

    def __init__(self, why: str | None = None, *, hangs: bool = False) -> None:
        self.why, self.hangs = why, hangs
        self.told: list[tuple[str, int]] = []

    async def ask(self, what: str, value: Settings, *, timeout_s: float) -> str | None:
        self.told.append((what, value.limits.requests_per_minute))
        if self.hangs:
            raise TimeoutError
        return self.why if what == "prepare" else None


def told(*peers: FakePeer) -> Workers:
    """Workers that are up, at these."""
    places = [Place(Settings(), own_engines=False, redis_url="", engine_urls={}, name="g") for _ in peers]
    workers = Workers(places, [[] for _ in peers], set(), print, lambda error: pytest.fail(str(error)))
    for worker, peer in zip(workers._workers, peers, strict=True):
        worker.peer, worker.up, worker.has = cast("Peer", peer), True, worker.place.settings
    return workers


def settings_with(limit: int, workers: int) -> list[Settings]:
    return [Settings(limits=LimitSettings(requests_per_minute=limit)) for _ in range(workers)]


async def test_settings_that_one_worker_cannot_use_reach_none() -> None:
    for bad, error in ((FakePeer("no key"), ConfigError), (FakePeer(hangs=True), OverloadedError)):
        good = FakePeer()
        workers = told(good, bad)
        with pytest.raises(error):
            await workers.use(settings_with(7, 2))
        assert good.told == bad.told == [("prepare", 7)]
        assert [worker.place.settings.limits.requests_per_minute for worker in workers._workers] == [0, 0]


async def test_a_worker_that_is_being_started_gets_what_the_others_have_when_it_is_up() -> None:
    peers = FakePeer(), FakePeer()
    workers = told(*peers)
    workers._workers[1].up = False
    await workers.use(settings_with(7, 2))
    assert peers[0].told == [("prepare", 7), ("use", 7)]
    assert peers[1].told == []
    await workers._answer(workers._workers[1], "up", None)
    assert peers[1].told == [("use", 7)]
    await workers._answer(workers._workers[1], "up", None)
    assert peers[1].told == [("use", 7)], "it has them"


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_a_signal_lets_streams_end(tmp_path: Path, own_redis: RedisProcess) -> None:
    body = {"model": "demo", "max_tokens": 30, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    async with running(tmp_path, own_redis, interval_s=0.05) as gateway:
        url = gateway.server.url + CHAT
        async with gateway.session.post(url, json=body, headers=_bearer("none-key-1")) as answer:
            first = await answer.content.readline()
            gateway.server.process.terminate()
            await asyncio.to_thread(gateway.server.wait_for_line, "shutting down")
            rest = await answer.content.read()
        assert first.startswith(b"data: ")
        assert rest.rstrip().endswith(b"data: [DONE]")
        assert await asyncio.to_thread(gateway.server.process.wait, LIMIT_S) == 0


async def test_a_second_signal_ends_workers_at_once(tmp_path: Path, own_redis: RedisProcess) -> None:
    async with running(tmp_path, own_redis, silent=True) as gateway:
        asking = asyncio.create_task(gateway.ask())
        await until(lambda: bool(gateway.engine.submits))
        workers = gateway.workers
        gateway.server.process.terminate()
        await asyncio.to_thread(gateway.server.wait_for_line, "shutting down")
        gateway.server.process.terminate()
        with pytest.raises(aiohttp.ClientError):
            await asking
        assert await asyncio.to_thread(gateway.server.process.wait, LIMIT_S) == 0
        assert not any(map(_runs, workers))


async def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path, own_redis: RedisProcess) -> None:
    async with running(tmp_path, own_redis) as gateway:
        workers = gateway.workers
        gateway.server.process.kill()
        await until(lambda: not any(_runs(pid) for pid in workers), LIMIT_S)


def _runs(pid: int) -> bool:
    try:
        return "gateway.worker" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


# -- what they share --------------------------------------------------------------------------------------------------


async def test_workers_share_what_gateways_share(tmp_path: Path, own_redis: RedisProcess) -> None:
    async with running(tmp_path, own_redis, "--response-cache-mode", "on", finish="stop") as gateway:
        async with Redis.from_url(own_redis.url) as redis:
            await _answers_are_remembered_and_removed_everywhere(gateway, redis)
        await _a_tenant_has_its_limits_once(gateway)
        await _a_batch_runs_once(gateway)


async def _answers_are_remembered_and_removed_everywhere(gateway: Running, redis: Redis) -> None:
    once = {"temperature": 0, "max_tokens": 4}
    await gateway.ask("what is it", **once)

    async def stored() -> bool:  # behind the end of the answer, which does not wait for Redis
        return bool(await redis.keys("kvasir:{answers:*}:*"))

    await until(stored, LIMIT_S)
    for _ in range(12):
        assert (await gateway.ask("what is it", **once))[1]["x-kvasir-cache"] == "exact"
    assert len(gateway.engine.submits) == 1
    asked = {"tenant": "anonymous"}
    shown = await gateway.post("/admin/cache/invalidate", asked)
    assert shown["would_remove"] == 1
    removed = await gateway.post("/admin/cache/invalidate", {**asked, "confirm": shown["confirm"]})
    assert removed["removed"] == 1

    async def all_forgot() -> bool:
        stats = await gateway.get("/admin/stats")
        return bool(stats["response_cache"]["entries"] == 0)

    await until(all_forgot)


async def _a_tenant_has_its_limits_once(gateway: Running) -> None:
    answers = [(await gateway.ask(key="north-key-1"))[0] for _ in range(12)]
    assert answers.count(200) == 7
    assert answers.count(429) == 5
    stats = await gateway.get("/admin/stats")
    assert sum(stats["limits"]["tenants"]["north"]["refused"].values()) == 5


async def _a_batch_runs_once(gateway: Running) -> None:
    row = {"custom_id": "a", "method": "POST", "url": CHAT}
    row["body"] = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    lines = "\n".join(json.dumps({**row, "custom_id": str(number)}) for number in range(6))
    key, before = "none-key-1", len(gateway.engine.submits)
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", lines.encode(), filename="rows.jsonl")
    url = gateway.server.url
    async with gateway.session.post(f"{url}/v1/files", data=form, headers=_bearer(key)) as answer:
        file_id = (await answer.json())["id"]
    for _ in range(8):
        assert await gateway.get(f"/v1/files/{file_id}", key) == await gateway.get(f"/v1/files/{file_id}", key)
    batch = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    made = await gateway.post("/v1/batches", batch, key)

    async def done() -> bool:
        return bool((await gateway.get(f"/v1/batches/{made['id']}", key))["status"] == "completed")

    await until(done, LIMIT_S)
    assert len(gateway.engine.submits) == before + 6
    assert (await gateway.metrics())['kvasir_batch_lines_total{outcome="succeeded"}'] == 6


# -- what is wrong from the start -------------------------------------------------------------------------------------


def test_a_worker_has_its_part_of_every_limit_that_is_not_in_redis() -> None:
    upstream = UpstreamSettings(name="u", url="http://u/v1", models=("m",), max_in_flight=5)
    server = ServerSettings(workers=3)
    settings = Settings(server=server, queue=QueueSettings(max_waiting=10), upstreams=(upstream,))
    parts = [part_of(settings, number) for number in range(3)]
    assert [part.queue.max_waiting for part in parts] == [4, 3, 3]
    assert [part.queue.slots_per_engine for part in parts] == [0, 0, 0]
    assert [part.upstreams[0].max_in_flight for part in parts] == [2, 2, 1]
    assert sum(part.server.max_bodies_bytes for part in parts) == settings.server.max_bodies_bytes
    assert parts[0].limits == settings.limits


def test_a_limit_that_is_less_than_the_workers_is_refused() -> None:
    settings = Settings(server=ServerSettings(workers=2), queue=QueueSettings(max_waiting=1))
    with pytest.raises(ConfigError, match=r"^queue\.max_waiting: 1 cannot be shared out among 2 workers$"):
        part_of(settings, 0)


def test_a_port_that_is_in_use_is_refused_though_sockets_share_theirs() -> None:
    sockets = bind("127.0.0.1", 0, 2)
    try:
        port = sockets[0][0].getsockname()[1]
        assert [own[0].getsockname()[1] for own in sockets] == [port, port]
        sockets[0][0].listen()
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            bind("127.0.0.1", port, 2)
    finally:
        for own in sockets:
            own[0].close()


@pytest.mark.parametrize(("status", "tries"), [(2, 1), (1, FIRST_TRIES)])
async def test_a_worker_that_dies_at_start_is_fatal(status: int, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FIRST_RESTART_S", 0.01)
    fatal: list[ChildStartError] = []
    place = Place(Settings(), own_engines=False, redis_url="unix:///nowhere", engine_urls={}, name="g")
    command = (sys.executable, "-c", f"raise SystemExit({status})")
    with socket.socket() as unused:
        async with Workers([place], [[unused]], set(), print, fatal.append, command) as workers:
            await until(lambda: bool(fatal))
            assert workers.children[0].restarts == tries - 1
    assert str(fatal[0]).startswith("worker 0 ")


async def test_a_worker_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOOK_S": 0.01, "ASK_S": 0.01, "MAX_SILENT": 3}.items():
        monkeypatch.setattr(workers_module, name, value)
    place = Place(Settings(), own_engines=False, redis_url="unix:///nowhere", engine_urls={}, name="g")
    with socket.socket() as unused:
        command = (sys.executable, "-c", HANGS)
        async with Workers([place], [[unused]], set(), print, pytest.fail, command) as workers:
            await until(lambda: workers.children[0].restarts == 1)


def test_without_a_redis_there_is_one_line_and_an_exit_status(tmp_path: Path) -> None:
    server = Server(tmp_path, "--workers", "2", command="gateway")
    with pytest.raises(TimeoutError, match=r"set redis\.url"):
        server.__enter__()
    assert server.process.returncode == 2
    assert server.lines == ["kvasir gateway: server.workers: 2 workers share what they know in Redis; set redis.url"]


def test_a_replica_whose_key_is_missing_is_one_line_and_an_exit_status(tmp_path: Path) -> None:
    config = "[redis]\nurl = 'redis://127.0.0.1:9'\n"
    config += "[[replicas]]\nname = 'r'\nkind = 'vllm'\nurl = 'http://127.0.0.1:9'\napi_key_env = 'NO_SUCH_KEY'\n"
    server = Server(tmp_path, "--workers", "2", command="gateway", config=config)
    with pytest.raises(TimeoutError, match="NO_SUCH_KEY"):
        server.__enter__()
    assert server.process.returncode == 2
    assert server.lines == ["kvasir gateway: replicas: api_key_env of 'r': NO_SUCH_KEY is not set, or no key"]
