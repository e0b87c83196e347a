"""Settings that are read again while requests are answered: each change holds at once, and not one request fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.config import ConfigError, load
from gateway.config import Reloaded, Settings, differences, mixed
from gateway.errors import OverloadedError
from gateway.reload import Reloading
from tests.fakes.server import Server, inside
from tests.fakes.upstream import StubUpstream, upstream
from tests.fakes.waiting import until
from tests.fakes.whole import LIMIT_S, Whole, whole

CHAT = "/v1/chat/completions"
ADMIN, STEADY = "admin-key-1", "steady-key-1"
LOADED = ("demo", "hosted", "usual")
"""Models that are asked all the time: an engine's, an upstream's, and an alias."""


class Running:
    """A gateway, what its file says, and clients that ask all the time."""

    def __init__(
        self, gateway: Whole, session: aiohttp.ClientSession, file: Path, base: str, stub: StubUpstream
    ) -> None:
        self.whole, self.session, self.file, self.base, self.stub = gateway, session, file, base, stub
        self.answered = 0
        self.failed: list[Any] = []

    async def ask(self, model: str = "demo", key: str = STEADY, **more: Any) -> int:
        body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}], **more}
        headers = {"Authorization": f"Bearer {key}"}
        async with self.session.post(self.whole.url + CHAT, json=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    async def admin(self, method: str, path: str, key: str = ADMIN) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.session.request(method, self.whole.url + path, headers=headers) as answer:
            return answer.status, await answer.json()

    async def change(self, more: str, base: str | None = None) -> list[str]:
        """The file says this besides its base. What the gateway says that it changed."""
        self.file.write_text((self.base if base is None else base) + more)
        status, answer = await self.admin("POST", "/admin/reload")
        assert status == 200, answer
        assert answer["needs_restart"] == []
        changed: list[str] = answer["changed"]
        return changed

    async def load(self) -> None:
        for model in cycle(LOADED):
            try:
                if (status := await self.ask(model)) != 200:
                    self.failed.append((model, status))
            except aiohttp.ClientError as error:
                self.failed.append((model, error))
            self.answered += 1


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Running]:
    """Inside, six clients ask; at the end none of their requests has failed, and some came after the last change."""
    async with upstream() as stub:
        base = f"""
            [auth]
            admin_keys = ["{ADMIN}"]
            [[tenants]]
            name = "steady"
            keys = ["{STEADY}"]
            [[upstreams]]
            name = "kept"
            url = "{stub.url}/v1"
            models = ["hosted"]
            [[aliases]]
            name = "usual"
            target = "hosted"
        """
        file = folder / "kvasir.toml"
        file.write_text(base)

        def read() -> Settings:
            return load(Settings, file=file, environ={}, flags={})

        settings = read()
        sections = {name: getattr(settings, name) for name in settings.model_fields_set}
        async with whole(sections=sections) as gateway, aiohttp.ClientSession() as session:

            async def use(changed: Settings) -> None:
                gateway.gateway.plan(changed, {})()

            gateway.gateway.reload = Reloading(read, settings, gateway.gateway.settings, use).reload
            found = Running(gateway, session, file, base, stub)
            clients = [asyncio.create_task(found.load()) for _ in range(6)]
            try:
                await until(lambda: found.answered > 12, LIMIT_S)
                yield found
                before = found.answered
                await until(lambda: found.answered > before + 12, LIMIT_S)
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.wait(clients)
            assert found.failed == []


def tenant(name: str, *keys: str, **more: Any) -> str:
    lines = [f"{key} = {str(value).lower() if isinstance(value, bool) else value}" for key, value in more.items()]
    return "\n".join(["", "[[tenants]]", f'name = "{name}"', f"keys = {list(keys)}", *lines])


async def test_a_tenant_comes_and_goes(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        assert await gateway.ask(key="south-key-1") == 401
        assert await gateway.change(tenant("south", "south-key-1")) == ["tenants.south added"]
        assert await gateway.ask(key="south-key-1") == 200
        assert await gateway.change("") == ["tenants.south removed"]
        assert await gateway.ask(key="south-key-1") == 401
        assert await gateway.change("") == []


async def test_keys_of_tenants_and_admins_change(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        await gateway.change(tenant("south", "south-key-1"))
        assert await gateway.change(tenant("south", "south-key-2")) == ["tenants.south.keys"]
        assert [await gateway.ask(key=key) for key in ("south-key-1", "south-key-2")] == [401, 200]
        base = gateway.base.replace(ADMIN, "admin-key-2")
        assert await gateway.change(tenant("south", "south-key-2"), base) == ["auth.admin_keys"]
        assert (await gateway.admin("GET", "/admin/stats"))[0] == 401
        status, log = await gateway.admin("GET", "/admin/audit", "admin-key-2")
        assert status == 200
        shown = [one["which"] for one in log["changes"]]
        assert shown[0] == {"settings": "auth.admin_keys"}
        assert "key-2" not in str(log)


async def test_limits_of_all_and_of_one_change_and_what_was_taken_is_given_back(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        await gateway.change(tenant("south", "south-key-1"))
        assert {await gateway.ask(key="south-key-1") for _ in range(3)} == {200}
        limited = tenant("south", "south-key-1", requests_per_minute=1, max_in_flight=1)
        changed = await gateway.change(limited)
        assert changed == ["tenants.south.requests_per_minute", "tenants.south.max_in_flight"]
        assert [await gateway.ask(key="south-key-1") for _ in range(2)] == [200, 429]
        assert await gateway.change(tenant("south", "south-key-1") + "\n[limits]\nmax_in_flight = 100") == [
            "tenants.south.requests_per_minute",
            "tenants.south.max_in_flight",
            "limits.max_in_flight",
        ]
        assert {await gateway.ask(key="south-key-1") for _ in range(3)} == {200}

        async def none_left() -> bool:
            _, stats = await gateway.admin("GET", "/admin/stats")
            south = stats["limits"]["tenants"]["south"]["in_flight"]
            return bool(south == {"limit": 100, "of_this_gateway": 0})

        await until(none_left, LIMIT_S)


async def test_an_upstream_comes_changes_and_goes(tmp_path: Path) -> None:
    async with upstream() as other, running(tmp_path) as gateway:
        more = f"""
            [[upstreams]]
            name = "more"
            url = "{other.url}/v1"
            models = ["added"]
        """
        assert await gateway.ask("added") == 404
        assert await gateway.change(more) == ["upstreams.more added"]
        assert await gateway.ask("added") == 200
        assert await gateway.change(more.replace('"added"', '"renamed"')) == ["upstreams.more.models"]
        assert [await gateway.ask(model) for model in ("added", "renamed")] == [404, 200]
        moved = gateway.base.replace(gateway.stub.url, other.url)
        asked = len(other.got)
        assert await gateway.change("", moved) == ["upstreams.kept.url", "upstreams.more removed"]
        assert await gateway.ask("hosted") == 200
        assert len(other.got) > asked
        assert await gateway.ask("renamed") == 404


async def test_an_alias_means_another_model_at_once_though_its_answers_were_remembered(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        alias = '\n[[aliases]]\nname = "mine"\ntarget = "hosted"'
        assert await gateway.change(alias) == ["aliases.mine added"]
        asked = len(gateway.whole.submits)
        assert await gateway.ask("mine", temperature=0) == 200
        assert await gateway.change(alias.replace("hosted", "demo")) == ["aliases.mine.target"]
        assert await gateway.ask("mine", temperature=0) == 200
        assert len(gateway.whole.submits) > asked
        assert await gateway.change("") == ["aliases.mine removed"]
        assert await gateway.ask("mine") == 404


async def test_a_price_counts_from_then_on(tmp_path: Path) -> None:
    async def cost(gateway: Running) -> Any:
        _, ledger = await gateway.admin("GET", "/admin/ledger?tenant=south&group_by=")
        return ledger["total"]["used"]["cost"]

    south = tenant("south", "south-key-1")
    async with running(tmp_path) as gateway:
        await gateway.change(south)
        await gateway.ask(key="south-key-1")
        assert await cost(gateway) is None
        price = '\n[[prices]]\nmodel = "demo"\ninput = 0\noutput = 1'
        assert await gateway.change(south + price) == ["prices.demo added"]
        await gateway.ask(key="south-key-1")
        assert await cost(gateway) == {"USD": "0.000002"}
        assert await gateway.change(south + price.replace("output = 1", "output = 10")) == ["prices.demo.output"]
        await gateway.ask(key="south-key-1")
        assert await cost(gateway) == {"USD": "0.000022"}
        assert await gateway.change(south) == ["prices.demo removed"]


BROKEN = {
    "cannot be read as TOML": "[[tenants]",
    "tenants.1.keys.0": tenant("south", "short"),
    "is also in tenant 'steady'": tenant("south", STEADY),
    "which is no tenant": '\n[[aliases]]\nname = "x"\ntarget = "y"\ntenants = ["nobody"]',
    "NOT_SET is not set": '\n[[upstreams]]\nname = "x"\nurl = "http://x"\nmodels = ["y"]\nkey_env = "NOT_SET"',
}


async def test_a_budget_changes_and_prices_that_it_could_not_add_up_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        price = "\n[[prices]]\nmodel = 'demo'\ninput = 1_000_000\noutput = 1_000_000"

        async def statuses(budget: float) -> list[int]:
            await gateway.change(tenant("south", "south-key-1", budget=budget) + price)
            return [await gateway.ask(key="south-key-1") for _ in range(2)]

        assert await statuses(1) == [200, 429]
        assert await statuses(1000) == [200, 200]
        assert await statuses(2) == [429, 429]
        await gateway.change(tenant("south", "south-key-1") + price)
        assert await gateway.ask(key="south-key-1") == 200
        await gateway.whole.gateway.directory.make_key("south", "laptop", None, (), {"budget": 5.0})
        both = price + price.replace("demo", "other") + "\ncurrency = 'EUR'"
        gateway.file.write_text(gateway.base + tenant("south", "south-key-1") + both)
        status, answer = await gateway.admin("POST", "/admin/reload")
        assert status == 400
        assert "budgets of tenants or keys made at run time cannot add up EUR, USD" in answer["error"]["message"]
        assert [one.model for one in gateway.whole.gateway.settings.prices] == ["demo"]


async def test_settings_that_cannot_be_used_change_nothing_and_say_why(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        for why, text in BROKEN.items():
            gateway.file.write_text(gateway.base.replace('"usual"', '"other"') + text)
            status, answer = await gateway.admin("POST", "/admin/reload")
            assert (status, answer["error"]["code"]) == (400, "invalid_settings")
            assert why in answer["error"]["message"]
            assert [await gateway.ask(model) for model in ("usual", "other")] == [200, 404]
        assert (await gateway.admin("GET", "/admin/audit"))[1]["changes"] == []


# -- what may change --------------------------------------------------------------------------------------------------


def settings(**sections: Any) -> Settings:
    return Settings.model_validate(sections)


NORTH = {"name": "north", "keys": ["north-key-1"]}
SOUTH = {"name": "south", "keys": ["south-key-1"]}


def test_what_needs_a_restart_is_named_and_left_as_it_was() -> None:
    old = settings(tenants=[NORTH], queue={"max_waiting": 5})
    read = settings(tenants=[NORTH, SOUTH], queue={"max_waiting": 6}, auth={"admin_content": True})
    found = mixed(old, read)
    assert found == settings(tenants=[NORTH, SOUTH], queue={"max_waiting": 5})
    assert differences(old, found) == ("tenants.south added",)
    assert differences(found, read) == ("auth.admin_content", "queue.max_waiting")


def test_an_open_server_does_not_become_a_closed_one() -> None:
    found = mixed(settings(), settings(tenants=[NORTH]))
    assert found == settings()
    assert differences(found, settings(tenants=[NORTH])) == ("tenants.north added",)


def test_a_semantic_cache_that_is_not_there_needs_a_restart() -> None:
    old, read = settings(tenants=[NORTH]), settings(tenants=[NORTH | {"semantic_cache": "on", "weight": 2}])
    found = mixed(old, read)
    assert differences(old, found) == ("tenants.north.weight",)
    assert differences(found, read) == ("tenants.north.semantic_cache",)
    on = settings(tenants=[NORTH], semantic_cache={"mode": "ask"})
    assert mixed(on, read).tenants == read.tenants


def test_a_tenant_that_something_needs_until_the_restart_cannot_go() -> None:
    warm = {"model": "demo", "tenants": ["south"], "text": "Once."}
    old = settings(tenants=[NORTH, SOUTH], warm=[warm])
    with pytest.raises(ConfigError, match=r"'south', which is no tenant .*restart"):
        mixed(old, settings(tenants=[NORTH]))


def test_another_order_is_a_change_and_secrets_are_never_told() -> None:
    tables = [{"model": "gpt-*", "input": 1}, {"model": "gpt-5*", "input": 2}]
    assert differences(settings(prices=tables), settings(prices=tables[::-1])) == ("prices in another order",)
    changed = differences(settings(tenants=[NORTH]), settings(tenants=[NORTH | {"keys": ["other-key-1"]}]))
    assert changed == ("tenants.north.keys",)


# -- signals ----------------------------------------------------------------------------------------------------------


async def test_a_hangup_reads_the_settings_again_and_ends_nothing() -> None:
    found = [settings()]
    notes: list[Reloaded] = []

    async def use(changed: Settings) -> None:
        if changed.limits.requests_per_minute == 13:
            raise OverloadedError("A worker does not answer.")

    async def note(report: Reloaded) -> None:
        notes.append(report)

    reloading = Reloading(lambda: found[0], found[0], found[0], use)
    reloading.at_hangup(lambda: pytest.fail("it is to go on"), note)
    try:
        found[0] = settings(limits={"requests_per_minute": 13})
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(OverloadedError):
            await reloading.reload()
        found[0] = settings(limits={"requests_per_minute": 14})
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: bool(notes))
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    assert Reloaded(("limits.requests_per_minute",), ()) in notes


@pytest.mark.slow
async def test_a_gateway_that_is_hung_up_goes_on_with_what_its_file_says(tmp_path: Path) -> None:
    file = tmp_path / "data" / "kvasir.toml"
    admin = f'[auth]\nadmin_keys = ["{ADMIN}"]\n'
    config = admin + tenant("steady", STEADY)
    server = Server(tmp_path / "data", command="gateway", config=config)

    async def change(text: str, line: str) -> None:
        file.write_text(text)
        told = len(server.lines)
        server.process.send_signal(signal.SIGHUP)
        await asyncio.to_thread(server.wait_for_line, line, after=told)

    async with inside(server), aiohttp.ClientSession() as session:

        async def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with session.get(f"{server.url}/v1/models", headers=headers) as answer:
                return answer.status

        assert [await status(key) for key in (STEADY, "south-key-1")] == [200, 401]
        await change(config + tenant("south", "south-key-1"), "settings reloaded; changed: tenants.south added")
        assert [await status(key) for key in (STEADY, "south-key-1")] == [200, 200]
        await change(config + "[[", "settings are not reloaded, and stay as they were: .*cannot be read as TOML")
        assert [await status(key) for key in (STEADY, "south-key-1")] == [200, 200]
        restart = config + tenant("south", "south-key-1") + "\n[server]\nkeep_alive_s = 5"
        await change(restart, "changed settings that need a restart: server.keep_alive_s")
        headers = {"Authorization": f"Bearer {ADMIN}"}
        async with session.get(f"{server.url}/admin/audit", headers=headers) as answer:
            (logged,) = (await answer.json())["changes"]
    assert (logged["who"], logged["which"]) == ("signal", {"settings": "tenants.south added"})
