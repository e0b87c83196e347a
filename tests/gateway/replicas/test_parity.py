"""Whether a server makes our tokens of a conversation, shape by shape."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Hello, Namespace
from gateway.config import PromptSettings, ReplicaKind, ReplicaSettings
from gateway.prompt.stage import PromptStage
from gateway.replicas import parity
from gateway.replicas.calls import open_session
from gateway.replicas.parity import (
    CANARIES,
    Parity,
    TokenSource,
    check_parity,
    encoder,
    first_difference,
    shapes_of,
    wire_body,
)
from gateway.replicas.servers import find_facts
from gateway.replicas.tokenizer_files import load_tokenizer, speller
from gateway.types import ChatPrompt, TextPrompt, TokenPrompt
from tests.fakes import replica_server as replica_server_module
from tests.fakes.replica_server import DEMO, ReplicaServer, replica_server


async def parity_of(settings: ReplicaSettings, template: str | None = None) -> Parity:
    """The server's parity with the files that its settings name, or the server itself; with another template of ours
    where there is one."""
    async with open_session(settings, None) as session:
        facts = await find_facts(session, settings)
        model = await load_tokenizer(settings, facts)
        files = model.files if template is None else replace(model.files, chat_template=template)
        hello = Hello(
            incarnation="r-0-1",
            model="demo",
            namespace=Namespace("w", "", "", 16),
            context_tokens=2048,
            vocab_size=model.vocab_size,
            num_blocks=1,
            max_sequences=1,
            eos_ids=model.eos_ids,
            tokenizer=files.fingerprint(),
            created=0,
        )
        stage = PromptStage(PromptSettings())
        try:
            await stage.load(hello, files)
            source = TokenSource(session, settings, facts)
            return await check_parity(source, encoder(stage.encode, hello), speller(model.files))
        finally:
            stage.close()


PROOF: Any = CANARIES["turns"].messages  # type: ignore[union-attr] - asked for twice


@asynccontextmanager
async def checked(kind: ReplicaKind = "vllm", **more: Any) -> AsyncIterator[tuple[Parity, ReplicaServer]]:
    """A server's parity with the demo model's own files."""
    replica_server_module.load_tokenizer(more.get("tokenizer", DEMO))  # takes longer than a server may
    async with replica_server(kind, **more) as server:
        yield await parity_of(server.settings(tokenizer=str(DEMO))), server


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_every_shape_of_the_same_files_is_equal(kind: ReplicaKind) -> None:
    async with checked(kind) as (found, server):
        assert found.unchecked == {}
        assert found.different == {}
        asked = [path for path, body in server.got if "tokenize" in path and body.get("messages") != PROOF]
        assert len(asked) == len(CANARIES) - 1


async def test_a_server_with_another_template_differs_where_it_does(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    template = (DEMO / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(
        template.replace("{%- if tools -%}", "{%- if tools -%}{{- 'Tools:' -}}")
    )
    async with checked("vllm", tokenizer=folder) as (found, _server):
        assert found.different.keys() == {"tools", "bare_tools", "calls", "parallel_calls"}
        assert found.different["tools"].startswith("token 0: 1 '<|im_start|>' here, ")
        assert "at the server (" in found.different["tools"]
        assert found.reason(CANARIES["plain"]) is None
        assert found.reason(CANARIES["tools"]) == f"tools: {found.different['tools']}"


async def test_what_only_one_side_refuses_is_different(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    refusing = "{% for one in messages if one.role == 'system' %}{{ raise_exception('no system') }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(refusing + (DEMO / "chat_template.jinja").read_text())
    async with checked("vllm", tokenizer=folder) as (found, _server):
        assert found.different.keys() == {"system", "unicode"}
        assert "refused by the server: " in found.different["system"]
        assert "answered HTTP 400; no system" in found.different["system"]


async def test_a_tensorrt_llm_is_asked_for_texts_alone() -> None:
    async with checked("tensorrt-llm") as (found, _server):
        assert found.different == {}
        assert found.unchecked.keys() == CANARIES.keys() - {"text"}
        assert found.unchecked["tools"] == "the server says the number of its tokens alone, which is the same"


async def test_a_server_that_hangs_leaves_shapes_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "CHECK_TIMEOUT_S", 0.2)
    async with checked("vllm", stalled={"/tokenize"}) as (found, _server):
        assert (found.different, found.unchecked) == ({}, dict.fromkeys(CANARIES, "no time within 0.2 s"))


def test_every_canary_has_its_shape() -> None:
    for shape, prompt in CANARIES.items():
        assert shape in shapes_of(prompt)
    assert shapes_of(CANARIES["plain"]) == {"plain"}
    assert shapes_of(CANARIES["text"]) == {"text"}
    assert shapes_of(CANARIES["continuation"]) == {"plain", "continuation"}
    assert shapes_of(CANARIES["parallel_calls"]) == {"plain", "turns", "tools", "calls", "parallel_calls"}
    assert shapes_of(TextPrompt("ü")) == {"text", "unicode"}
    assert shapes_of(TokenPrompt(b"\1\0\0\0")) == set()
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    assert shapes_of(ChatPrompt([call])) == {"plain", "calls"}


def test_a_request_is_sent_as_the_servers_api_has_it() -> None:
    facts = parity.ServerFacts("vllm", "0.32.0", ("m",), "", 1)
    body = wire_body(facts, CANARIES["calls"])
    assert body["messages"][1]["content"] is None
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"place":"Paris","unit":"celsius"}'
    assert body["add_generation_prompt"] is True
    assert CANARIES["calls"].messages[1]["content"] == ""  # type: ignore[union-attr]


def test_the_first_difference_is_said_with_both_texts() -> None:
    spell = "abcdefgh".__getitem__
    assert first_difference([1, 2, 3], [1, 2, 3], spell) is None
    assert first_difference([], [], spell) is None
    assert first_difference([1, 2, 3], [1, 4, 3], spell) == "token 1: 2 'c' here, 4 'e' at the server (3 and 3 tokens)"
    assert first_difference([1], [1, 4], spell) == "token 1: the end here, 4 'e' at the server (1 and 2 tokens)"
    assert first_difference([1, 4], [1], spell) == "token 1: 4 'e' here, the end at the server (2 and 1 tokens)"


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_there_is_a_difference_exactly_where_the_tokens_differ(ours: list[int], theirs: list[int]) -> None:
    found = first_difference(ours, theirs, str)
    assert (found is None) == (ours == theirs)
    if found is not None:
        at = int(found.partition(":")[0].removeprefix("token "))
        assert ours[:at] == theirs[:at]
        assert ours[at : at + 1] != theirs[at : at + 1]
