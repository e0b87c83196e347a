"""What a client may ask of the cache, with the real openai SDK against `kvasir serve` and the demo model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.server import Server

BOOK = " ".join(f"Rule {number}: a passenger of class {number % 3} may take {number % 5} bags." for number in range(60))


def ask(server: Server, first: str, key: str = "north-key-123", **options: Any) -> openai.types.CompletionUsage:
    """The usage of an answer to a prompt that begins with `first`, which no other test uses, and the book."""
    answer = server.client(key).chat.completions.create(
        model="demo", messages=[{"role": "user", "content": f"{first} {BOOK}"}], max_tokens=2, temperature=0, **options
    )
    assert answer.usage is not None
    return answer.usage


def cached(usage: openai.types.CompletionUsage) -> int:
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def test_a_key_and_a_salt_separate_the_requests_of_one_tenant(tenants: Server) -> None:
    scopes: list[dict[str, Any]] = [{}, {"prompt_cache_key": "users-1"}, {"extra_body": {"cache_salt": "users-1"}}]
    assert [cached(ask(tenants, "Keys.", **scope)) for scope in scopes] == [0, 0, 0]
    assert all(cached(ask(tenants, "Keys.", **scope)) > 100 for scope in scopes)


def session(server: Server, key: str, session_id: str, **options: Any) -> openai.types.responses.Response:
    """The first turn of an agent that sends its session's id as the key, as Codex does."""
    return server.client(key).responses.create(
        model="demo",
        instructions=f"Sessions. {BOOK}",
        input=f"List the files. I am {session_id}.",
        max_output_tokens=16,
        prompt_cache_key=session_id,
        include=["reasoning.encrypted_content"],
        **options,
    )


def read(response: openai.types.responses.Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def test_the_second_session_of_an_agent_reuses_the_first_ones_prompt_where_the_key_is_a_hint(tenants: Server) -> None:
    sessions = [session(tenants, "agents-key-123", name, store=False) for name in ("session-1", "session-2")]
    assert read(sessions[0]) == 0
    assert read(sessions[1]) > 1000
    salted = session(tenants, "agents-key-123", "session-3", store=False, extra_body={"cache_salt": "x"})
    assert read(salted) == 0


def test_a_miss_for_another_key_is_counted_and_logged_and_told_in_diagnostics(tenants: Server) -> None:
    first = session(tenants, "north-key-123", "session-1")
    compared: Any = {"comparison_response_id": first.id}
    second = session(tenants, "north-key-123", "session-2", prompt_cache_options=compared)
    assert (read(first), read(second)) == (0, 0)
    told: Any = second.prompt_cache_diagnostics
    assert told.reason == "prompt_cache_key_changed"
    tenants.wait_for_line('tenant north reused none of .* another prompt_cache_key.*cache_key = "hint"')
    series = 'kvasir_prompt_cache_key_misses_total{model="demo",tenant="north"} 1.0'
    assert series in tenants.get("/metrics", "admin-key-123").splitlines()


def test_tenants_share_what_they_put_into_a_namespace_and_nothing_else(tenants: Server) -> None:
    shared: Any = {"extra_headers": {"x-kvasir-namespace": "handbook"}}
    assert cached(ask(tenants, "Shared.", "north-key-123", **shared)) == 0
    assert cached(ask(tenants, "Shared.", "south-key-123", **shared)) > 100
    assert cached(ask(tenants, "Shared.", "south-key-123")) == 0
    with pytest.raises(openai.PermissionDeniedError):
        ask(tenants, "Shared.", "south-key-123", extra_headers={"x-kvasir-namespace": "norths"})


def marked(first: str, question: str, ttl: str | None = "5m") -> Any:
    """The book with a breakpoint right after it, and a question."""
    point = {"mode": "explicit"} | ({"ttl": ttl} if ttl else {})
    book = {"type": "text", "text": f"{first} {BOOK}", "prompt_cache_breakpoint": point}
    return {"role": "user", "content": [book, {"type": "text", "text": question}]}


def details(answer: Any) -> tuple[int, int, str | None]:
    """cached_tokens, cache_write_tokens and cache_lease."""
    found = answer.parse().usage.prompt_tokens_details.model_dump()
    return found["cached_tokens"], found["cache_write_tokens"], found.get("cache_lease")


def create(server: Server, message: Any, *, key: str = "north-key-123", **options: Any) -> Any:
    return server.client(key).chat.completions.with_raw_response.create(
        model="demo", messages=[message], max_tokens=2, temperature=0, **options
    )


def test_what_one_request_writes_is_what_the_next_reads(tenants: Server) -> None:
    first = create(tenants, marked("Leases.", " How many bags?"))
    read, written, lease = details(first)
    assert (read, lease) == (0, "kept")
    assert written > 100
    assert first.headers["x-kvasir-lease"] == f"kept; tokens={written}; ttl=300"
    second = create(tenants, marked("Leases.", " And which class?"))
    assert details(second) == (written, 0, "kept")
    assert written - tenants.block_tokens < int(second.headers["x-kvasir-cached-tokens"]) <= written
    # Somebody who asks for no breakpoint reads the lease as well.
    third = create(tenants, {"role": "user", "content": f"Leases. {BOOK} Why?"})
    assert details(third)[0] >= written
    assert details(third)[2] is None


def test_explicit_mode_without_a_breakpoint_uses_no_cache(tenants: Server) -> None:
    message = {"role": "user", "content": f"Nothing. {BOOK}"}
    for _ in range(2):
        assert details(create(tenants, message, prompt_cache_options={"mode": "explicit"})) == (0, 0, None)
    assert details(create(tenants, message))[0] == 0


def test_an_implicit_breakpoint_has_a_ttl_or_is_none(tenants: Server) -> None:
    message = {"role": "user", "content": f"Implicit. {BOOK}"}
    assert details(create(tenants, message, prompt_cache_options={"mode": "implicit"}))[2] is None
    asked = create(tenants, message, prompt_cache_options={"ttl": "30m"})
    assert details(asked)[2] == "kept"
    assert asked.headers["x-kvasir-lease"].endswith("; ttl=1800")
    with pytest.raises(openai.BadRequestError, match="'5m', '30m', '1h', '12h'") as refused:
        create(tenants, message, extra_body={"prompt_cache_options": {"ttl": "24h"}})
    assert refused.value.param == "prompt_cache_options.ttl"


def test_leases_are_in_the_stats_and_the_metrics(tenants: Server) -> None:
    before = leases(tenants)["granted"]
    create(tenants, marked("Figures.", " How many?"))
    tenants.wait_until(lambda: bool(leases(tenants)["granted"] > before), "the lease is counted")
    assert leases(tenants)["tenants"]["north"]["blocks"] > 0
    metrics = tenants.get("/metrics")
    for part in (
        'kvasir_engine_leases{engine="engine-0",model="demo",state="kept"}',
        "kvasir_engine_tenant_leased_blocks{",
    ):
        assert part in metrics


def engine(server: Server) -> Any:
    """The one engine in the stats. The admin's key opens a server without keys too."""
    (found,) = server.get("/admin/stats", key="admin-key-123")["engines"]
    return found


def leases(server: Server) -> Any:
    return engine(server)["leases"]


def test_past_the_budget_a_lease_degrades_and_says_so(no_room: Server) -> None:
    answer = create(no_room, marked("Budget.", " Why?", None), key="none")
    assert details(answer) == (0, 0, "degraded")
    assert answer.headers["x-kvasir-lease"] == "degraded"
    # Ordinary reuse is there all the same.
    again = create(no_room, marked("Budget.", " Why?", None), key="none")
    assert details(again)[0] > 100


@pytest.mark.slow
@pytest.mark.parametrize("disk_bytes", [0, pytest.param(256 << 20, marks=pytest.mark.slow)])
def test_what_is_leased_outlives_a_flood_until_its_time_is_over(tmp_path: Path, disk_bytes: int) -> None:
    shares = ("--engine-lease-share", "0.8", "--engine-lease-tenant-share", "0.8", "--leases-ttls", "5m,3s")
    sizes = ("--kv-cache-bytes", str(40 << 20), "--engine-disk-bytes", str(disk_bytes), "--dtype", "float32")
    with Server(tmp_path, *shares, *sizes) as server:
        blocks = engine(server)["blocks"]
        for first, ttl in (("Kept.", "5m"), ("Briefly.", "3s")):
            assert details(create(server, marked(first, " Why?", ttl), key="none"))[2] == "kept"
        plain = {"role": "user", "content": f"Plain. {BOOK}"}
        assert details(create(server, plain, key="none"))[2] is None
        server.wait_until(lambda: bool(engine(server)["leases"]["expired"] == 1), "the short lease is over")

        flood(server, 2 * blocks["total"] * blocks["tokens_per_block"])

        kept = create(server, marked("Kept.", " Well?", "5m"), key="none")
        assert details(kept)[0] > 100
        assert int(kept.headers["x-kvasir-cached-tokens"]) > 100
        server.wait_until(lambda: bool(engine(server)["evictions"] > blocks["total"]), "a flood drove much out")
        if not disk_bytes:
            assert details(create(server, marked("Briefly.", " Well?", "5m"), key="none"))[0] == 0
            assert details(create(server, plain, key="none"))[0] == 0


@pytest.mark.slow
def test_a_lease_outlives_an_engine_that_is_killed_and_a_flood_after_that(tmp_path: Path) -> None:
    shares = ("--engine-lease-share", "0.8", "--engine-lease-tenant-share", "0.8")
    sizes = ("--kv-cache-bytes", str(24 << 20), "--engine-disk-bytes", str(24 << 20), "--dtype", "float32")
    with Server(tmp_path, *shares, *sizes) as server:
        plain = {"role": "user", "content": f"Plain. {BOOK}"}
        assert details(create(server, plain, key="none"))[2] is None
        assert details(create(server, marked("Kept.", " Why?", "5m"), key="none"))[2] == "kept"
        server.wait_until(lambda: bool(list(tmp_path.rglob("*.leases"))), "the lease is written")
        (process,) = server.children("engine")
        os.kill(process, signal.SIGKILL)
        server.wait_for_line("engine engine-0 joined", after=len(server.lines))
        server.wait_until(lambda: bool(engine(server)["leases"]["restored"] == 1), "the lease is kept again")
        assert "leases_restored_total{" in server.get("/metrics")

        blocks = engine(server)["blocks"]
        flood(server, 2 * blocks["total"] * blocks["tokens_per_block"])
        server.wait_until(
            lambda: bool(engine(server)["tiers"]["disk"]["evictions"] > blocks["total"] // 2), "a flood went to disk"
        )

        kept = create(server, marked("Kept.", " Well?", "5m"), key="none")
        assert details(kept)[0] > 100
        assert int(kept.headers["x-kvasir-cached-tokens"]) > 100
        assert details(create(server, plain, key="none"))[0] == 0, "what was not leased is gone"


def flood(server: Server, num_tokens: int) -> None:
    """Prompts that have nothing in common, until so many tokens have gone through the cache."""
    length = 500
    for number in range(num_tokens // length + 1):
        prompt = [(number * 31 + index * 7 + number * index) % 400 + 50 for index in range(length)]
        server.client().completions.create(model="demo", prompt=prompt, max_tokens=1)


def test_what_is_in_which_tier_is_in_the_stats_and_the_metrics(tenants: Server) -> None:
    create(tenants, {"role": "user", "content": f"Tiers. {BOOK}"})
    tenants.wait_until(lambda: bool(engine(tenants)["tiers"]["disk"]["saved"]), "blocks were copied to disk")
    tiers = engine(tenants)["tiers"]
    assert 0 < tiers["device"]["blocks"] * 16 * 1024 < tiers["device"]["bytes"] <= tiers["device"]["capacity_bytes"]
    metrics = tenants.get("/metrics")
    for name in (
        "blocks",
        "bytes",
        "capacity_bytes",
        "saved_blocks_total",
        "restored_blocks_total",
        "torn_blocks_total",
    ):
        assert f'kvasir_engine_tier_{name}{{engine="engine-0",model="demo",tier="disk"}} ' in metrics
