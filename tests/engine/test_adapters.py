"""Blocks of LoRA adapters are found by sequences of the same adapter alone, in every tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.config import EngineSettings
from engine.protocol import Hello, Sampling, Submit, adapter_salt, decode, encode
from gateway.types.tenants import Scope
from tests.fakes.disk_engine import Engine
from tests.fakes.fake_engine import make_hello
from tests.fakes.scheduler_bench import NAMESPACE, SIZE, make, prompt

FIRST, OTHER = "f" * 32, "f" * 31 + "e"  # one bit apart


def test_blocks_of_an_adapter_are_found_by_it_alone() -> None:
    bench, tokens = make(adapters=(FIRST, OTHER)), prompt(5 * SIZE)
    cached = []
    for seq, adapter in enumerate((FIRST, "", OTHER, FIRST, "", OTHER)):
        bench.submit(seq, tokens, adapter=adapter)
        bench.finish()
        cached.append(bench.of(seq)[0].cached_tokens)
    assert cached == [0, 0, 0, 4 * SIZE, 4 * SIZE, 4 * SIZE]


def test_a_forged_digest_finds_nothing_of_another_adapter() -> None:
    bench, tokens = make(adapters=(FIRST, OTHER)), prompt(5 * SIZE)
    first = bench.submit(1, tokens, adapter=FIRST)
    assert first is not None
    assert first.adapter == 1
    bench.finish()
    for seq, adapter in enumerate((OTHER, ""), 2):
        bench.submit(seq, tokens, adapter=adapter, digests=b"".join(first.digests[:5]))
        bench.finish()
        assert bench.of(seq)[0].cached_tokens == 0


def test_an_adapter_that_the_engine_has_not_is_refused() -> None:
    bench = make(adapters=(FIRST,))
    assert bench.submit(1, prompt(5), adapter=OTHER) is None
    assert bench.of(1)[0].error == f"this engine has no adapter {OTHER}"


def test_no_tenant_can_spell_the_salt_of_an_adapter() -> None:
    own = adapter_salt(FIRST)
    honest = Scope(tenant="acme").salt
    for forged in (Scope(tenant="acme" + own), Scope(tenant="acme;" + own), Scope(tenant="acme", cache_salt=own)):
        assert forged.salt != honest + own
        assert replace(NAMESPACE, salt=forged.salt).root() != replace(NAMESPACE, salt=honest, adapter=FIRST).root()
    assert replace(NAMESPACE, salt=honest + own).root() == replace(NAMESPACE, salt=honest, adapter=FIRST).root()


def test_on_disk_too_blocks_are_of_one_adapter(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    assert engine.ask(1, salt="s" + adapter_salt(FIRST)) == 0
    engine.pump()
    engine.kill()
    again = Engine(tmp_path)
    assert [again.ask(1, salt="s" + salt) for salt in (adapter_salt(OTHER), "")] == [0, 0]
    assert again.ask(1, salt="s" + adapter_salt(FIRST)) > 0


def test_the_wire_carries_adapters_and_says_nothing_where_there_are_none() -> None:
    plain = make_hello()
    assert not {"adapters", "parent"} & plain.to_json().keys()
    hello = replace(plain, adapters=(("a", FIRST), ("b", OTHER)))
    assert decode(encode(hello)) == hello
    one = hello.named("b")
    assert (one.model, one.parent, one.namespace) == ("b", plain.model, replace(plain.namespace, adapter=OTHER))
    assert hello.named("b") is one
    assert hello.named("c") is hello
    assert Hello.from_json(one.to_json()) == one
    submit = Submit(1, b"", b"", Sampling(max_tokens=1), adapter=FIRST)
    assert decode(encode(submit)) == submit


def test_adapters_are_told_as_text_as_a_list_or_as_a_table() -> None:
    want = {"a": Path("/x/a"), "b": Path("b=c")}
    for lora in ("a=/x/a, b=b=c", ["a=/x/a", "b=b=c"], {"a": "/x/a", "b": "b=c"}):
        settings = EngineSettings(lora=lora)  # type: ignore[arg-type]
        assert settings.adapters == want
        assert EngineSettings(lora=settings.lora) == settings
    for wrong in ("a", "=x", "a b=x", "a=x,a=y", 3):
        with pytest.raises(ValidationError, match="name=folder"):
            EngineSettings(lora=wrong)  # type: ignore[arg-type]
