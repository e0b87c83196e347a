"""The tokeniser of a server, read from its files without transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from engine.compute.model_files import read_tokenizer
from engine.protocol import TokenizerFiles
from gateway.config import ReplicaSettings
from gateway.replicas import tokenizer_files
from gateway.replicas.base import ServerFacts
from gateway.replicas.calls import ServerError
from gateway.replicas.tokenizer_files import load_tokenizer, read_folder
from tests.fakes import tokenisers
from tests.fakes.replica_server import DEMO

MORE = {
    "90000": {"content": "<|x|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False},
    "90001": {"content": "a word", "special": False, "lstrip": True, "rstrip": False, "single_word": True},
}
"""Tokens that only a tokenizer_config.json has."""


def settings(**more: Any) -> ReplicaSettings:
    return ReplicaSettings.model_validate({"name": "r", "kind": "vllm", "url": "http://h:1", **more})


def facts(root: str = "", tokenizer: str = "") -> ServerFacts:
    return ServerFacts("vllm", "0.32.0", ("m",), root, 2048, tokenizer=tokenizer)


def folder_of(files: TokenizerFiles, folder: Path, **config: Any) -> Path:
    """A model's folder with these files."""
    (folder / "tokenizer.json").write_text(files.tokenizer_json)
    table = {"tokenizer_class": "PreTrainedTokenizerFast", **files.special_tokens, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    if files.chat_template is not None:
        (folder / "chat_template.jinja").write_text(files.chat_template)
    return folder


def test_the_demo_model_has_the_fingerprint_that_its_engine_announces() -> None:
    found = read_folder(str(DEMO))
    files, _ = read_tokenizer(DEMO)
    assert found.files == files
    assert found.files.fingerprint() == files.fingerprint()
    assert (found.eos_ids, found.vocab_size) == ((2, 0), 4096)


@pytest.mark.parametrize("name", ["llama3", "qwen", "gemma", "llama2", "wordpiece"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True, "add_eos_token": True},
        {"pad_token": "<|a new one|>"},
        {"added_tokens_decoder": MORE},
    ],
    ids=["as it is", "with words that count no more", "with a token more", "with tokens of the configuration"],
)
def test_other_tokenisers_come_out_as_transformers_reads_them(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    made: TokenizerFiles = getattr(tokenisers, name)()
    folder = folder_of(made, tmp_path, **config)
    found, (files, eos) = read_folder(str(folder)), read_tokenizer(folder)
    assert json.loads(found.files.tokenizer_json) == json.loads(files.tokenizer_json)
    assert found.files == files
    assert found.eos_ids == (() if eos is None else (eos,))


def test_templates_are_found_in_all_their_places(tmp_path: Path) -> None:
    made = tokenisers.qwen()
    folder = folder_of(TokenizerFiles(made.tokenizer_json, None, {}, False), tmp_path)
    assert read_folder(str(folder)).files.chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of json"}))
    assert read_folder(str(folder)).files.chat_template == "of json"
    several = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "of config"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert read_folder(str(folder)).files.chat_template == "of config"
    (folder / "chat_template.jinja").write_text("of jinja")
    assert read_folder(str(folder)).files.chat_template == "of jinja"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, (5,)),
        ({}, {"eos_token_id": [6, 7, 6]}, (6, 7, 0)),
        ({}, {"text_config": {"eos_token_id": 8, "vocab_size": 77}}, (8, 0)),
    ],
)
def test_ids_that_end_a_text_are_the_generation_configs_else_the_models(
    generation: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_folder(str(tmp_path))
    assert found.eos_ids == expected
    assert found.vocab_size == (77 if "text_config" in config else 4096)


async def test_the_settings_come_before_what_the_server_names() -> None:
    assert (await load_tokenizer(settings(tokenizer=str(DEMO)), facts("/nowhere"))).vocab_size == 4096
    assert (await load_tokenizer(settings(), facts("/nowhere", str(DEMO)))).vocab_size == 4096
    assert (await load_tokenizer(settings(), facts(str(DEMO)))).vocab_size == 4096


HINT = "; set tokenizer to a folder with its tokenizer.json, or to a hub id (owner/name)"


async def test_a_tokeniser_that_is_not_there_is_one_line_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def line(own: ReplicaSettings, root: str = "") -> str:
        with pytest.raises(ServerError) as raised:
            await load_tokenizer(own, facts(root))
        said = str(raised.value)
        assert said.startswith("replica r (http://h:1): ")
        assert said.endswith(HINT)
        assert "\n" not in said
        return said.removeprefix("replica r (http://h:1): ").removesuffix(HINT)

    assert await line(settings(), "/models/llama") == (
        "the tokeniser that the server names, '/models/llama': "
        "there is no such folder on this machine, and it is no hub id"
    )
    assert "the server names no model folder" in await line(settings())
    assert await line(settings(tokenizer=str(tmp_path))) == f"its tokenizer '{tmp_path}': it has no tokenizer.json"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "its tokenizer" in await line(settings(tokenizer=str(tmp_path)))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert "its tokenizer_config.json is no JSON object" in await line(settings(tokenizer=str(tmp_path)))
    monkeypatch.setattr(tokenizer_files, "MAX_FILE_BYTES", 1)
    assert "is larger than" in await line(settings(tokenizer=str(tmp_path)))

    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("cannot be reached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert await line(settings(tokenizer="owner/name")) == (
        "its tokenizer 'owner/name': there is no such folder, and the hub cannot be reached"
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "a hub id needs `pip install huggingface_hub`" in await line(settings(tokenizer="owner/name"))
    monkeypatch.setattr(tokenizer_files, "LOAD_TIMEOUT_S", 0.0)
    assert "not read within 0 s" in await line(settings(tokenizer=str(DEMO)))


def test_a_gateway_reads_a_tokeniser_without_transformers_and_torch() -> None:
    code = (
        "import sys; from gateway.replicas.tokenizer_files import read_folder; "
        f"read_folder({str(DEMO)!r}); print(sorted({{'torch', 'transformers', 'zmq', 'msgspec'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
