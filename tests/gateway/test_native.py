"""A panic in a native library fails the request that it happened in, and nothing else."""

from __future__ import annotations

import ast
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.demo import MODEL_DIR
from gateway.config import PromptSettings
from gateway.errors import EmbedderError, KvasirError, NativeError
from gateway.native import no_panic
from gateway.prompt import byte_level, decode, guard, tokenizer
from gateway.prompt.stage import PromptStage
from gateway.prompt.tokenizer import Link, Tokenizer
from gateway.queues.batch.base import Counts
from gateway.queues.batch.folder import JobFolder
from gateway.replicas import tokenizer_files
from gateway.responses.embedding import bert, text_model
from gateway.responses.embedding.text_model import TextModel
from gateway.responses.flights import Flight
from gateway.types import EmbeddingInput
from tests.fakes import tokenisers
from tests.fakes.batches import FakeRunner, Lane, rows
from tests.fakes.embedding import FakeTextModel, fake_embedder
from tests.fakes.gateway import running
from tests.fakes.panic import Panic, Panicking, panics
from tests.fakes.pipeline import FakePipeline
from tests.test_architecture import SOURCES, imports

LIMIT_S = 30.0


def test_a_panic_becomes_an_error_and_one_line_without_its_message(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NativeError), no_panic("tokenizers"):
        panics()
    (line,) = caplog.messages
    assert "tokenizers panicked (Panic)" in line
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "error", [ValueError(), asyncio.CancelledError(), GeneratorExit(), KeyboardInterrupt(), SystemExit()]
)
def test_what_python_raises_itself_passes(error: BaseException) -> None:
    with pytest.raises(type(error)), no_panic():
        raise error


LIBRARIES = {"tokenizers", "tiktoken", "safetensors", "llguidance"}
"""Rust through pyo3. orjson is Rust, too, but is built so that a panic of it ends the process, and has none known."""
HANDLES = {"_hf", "hf", "_encoding", "bare", "nfc", "original", "tokenizer"}
"""Names of objects of these libraries, and of nothing else."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _is_guard(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "no_panic"


def native_calls(path: Path) -> list[tuple[str, str, bool]]:
    """Of a file: function, what it calls, and whether within no_panic."""
    text = path.read_text(encoding="utf-8")
    if not any(library in text for library in LIBRARIES):
        return []
    tree, names, found = ast.parse(text), set[str](), list[tuple[str, str, bool]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            names |= {name.asname or name.name for name in node.names}
        elif isinstance(node, ast.Import):
            names |= {name.asname or name.name for name in node.names if name.name.split(".")[0] in LIBRARIES}

    def visit(node: ast.AST, function: str, guarded: bool) -> None:
        if isinstance(node, _Function):
            function, guarded = node.name, any(map(_is_guard, node.decorator_list))
        elif isinstance(node, ast.With):
            guarded = guarded or any(_is_guard(item.context_expr) for item in node.items)
        elif isinstance(node, ast.Call):
            first, *rest = ast.unparse(node.func).split(".")
            if first in names or HANDLES & {first, *rest[:-1]}:
                found.append((function, ast.unparse(node.func), guarded))
        for inner in ast.iter_child_nodes(node):
            visit(inner, function, guarded)

    visit(tree, "", False)
    return found if names else []


LOADING = {"int4_folder.py", "lora.py", "model_files.py"}
"""Of an engine before it serves anybody: a panic ends its start, as every other error there does."""
CALLS = [
    (path.name, *call)
    for path in SOURCES
    if path.parent.name != "demo"  # which is trained by whoever builds it, of texts in this repository
    and path.name not in LOADING
    for call in native_calls(path)
]


def test_every_call_of_rust_through_pyo3_is_guarded() -> None:
    """The compiler of grammars runs in a process of its own, which takes whatever is raised for a refusal."""
    unguarded = {(file, function, call) for file, function, call, guarded in CALLS if not guarded}
    assert {file for file, _, _ in unguarded} <= {"grammar.py"}
    importing = [path.name for path in SOURCES if "engine.sampling.grammar" in set(imports(path))]
    assert importing == ["grammar_server.py"]


def loaded(name: str = "qwen") -> Tokenizer:
    files = tokenisers.ALL[name]()
    return Tokenizer(files.tokenizer_json, template=files.chat_template or "")


def _with(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: Callable[[], Any]) -> Any:
    monkeypatch.setattr(module, name, Panicking())
    return call()


def _broken(*, fast: bool = False) -> Tokenizer:
    broken = loaded()
    if fast:
        assert broken._fast is not None
        broken._fast._encoding = Panicking()  # type: ignore[assignment]
    else:
        broken._fast = None
    broken._hf = Panicking()
    return broken


def _spec() -> Any:
    return json.loads(tokenisers.qwen().tokenizer_json)


def _bert(patch: pytest.MonkeyPatch, folder: Path) -> Any:
    patch.setattr(bert, "_check", lambda *_: None)
    patch.setattr(bert, "_pooling", lambda *_: "mean")
    patch.setattr(bert, "safe_open", panics)
    (folder / "config.json").write_text("{}")
    return bert.Bert(folder)


def _files(patch: pytest.MonkeyPatch, folder: Path) -> Any:
    (folder / "tokenizer.json").write_text("{}")
    return _with(patch, text_model, "Tokenizer", lambda: text_model._tokenizer(folder / "tokenizer.json"))


def _spelled(patch: pytest.MonkeyPatch, _: Path) -> Any:
    patch.setattr(tokenizer_files, "Tokenizer", SimpleNamespace(from_str=lambda _: Panicking()))
    return tokenizer_files.speller(tokenisers.qwen())(1)


SITES: dict[tuple[str, str], Callable[[pytest.MonkeyPatch, Path], Any]] = {
    ("tokenizer.py", "_encode_slowly"): lambda *_: _broken().encode([Link("Hello", 5)]),
    ("byte_level.py", "_encode"): lambda *_: _broken(fast=True).encode([Link("Hello", 5)]),
    ("tokenizer.py", "_count_by_offsets"): lambda *_: _broken().count_before(Link("Hello", 5), b"\0" * 8, 3),
    ("tokenizer.py", "_hears_specials"): lambda *_: _broken()._hears_specials(),
    ("tokenizer.py", "_encode_whole"): lambda *_: loaded()._encode_whole("Hello", Panicking()),  # type: ignore[arg-type]
    ("tokenizer.py", "_prefix"): lambda *_: tokenizer._prefix(Panicking()),  # type: ignore[arg-type]
    ("tokenizer.py", "__init__"): lambda patch, _: _with(patch, tokenizer, "HfTokenizer", loaded),
    ("guard.py", "build"): lambda patch, _: _with(patch, guard, "HfTokenizer", lambda: guard.build(_spec())),
    ("byte_level.py", "__init__"): lambda patch, _: _with(
        patch, byte_level, "tiktoken", lambda: byte_level.ByteLevelBpe(_spec())
    ),
    ("byte_level.py", "_split_by_use"): lambda patch, _: _with(
        patch, byte_level, "models", lambda: byte_level._split_by_use(_spec()["model"], {}, {"ab": 1})
    ),
    ("byte_level.py", "_odd_marks"): lambda patch, _: _with(
        patch, byte_level, "normalizers", byte_level._odd_marks.__wrapped__
    ),
    ("decode.py", "_decode_each"): lambda *_: decode._decode_each(Panicking()),  # type: ignore[arg-type]
    ("text_model.py", "tokens"): lambda *_: TextModel(Panicking(), None, "", 16, (), ()).tokens("Hello"),  # type: ignore[arg-type]
    ("text_model.py", "_around"): lambda *_: text_model._around(Panicking()),  # type: ignore[arg-type]
    ("text_model.py", "_tokenizer"): _files,
    ("bert.py", "__init__"): _bert,
    ("tokenizer_files.py", "read_folder"): lambda patch, _: _with(
        patch, tokenizer_files, "Tokenizer", lambda: tokenizer_files.read_folder(str(MODEL_DIR))
    ),
    ("tokenizer_files.py", "_complete"): lambda *_: tokenizer_files._complete(Panicking(), {}, {}),  # type: ignore[arg-type]
    ("tokenizer_files.py", "tokenizer"): lambda patch, _: _with(
        patch, tokenizer_files, "Tokenizer", lambda: tokenizer_files.speller(tokenisers.qwen())(1)
    ),
    ("tokenizer_files.py", "spell"): _spelled,
}


def test_there_is_a_panic_at_every_native_call() -> None:
    assert {(file, function) for file, function, _, _ in CALLS if file != "grammar.py"} == set(SITES)


@pytest.mark.parametrize("site", SITES, ids=".".join)
def test_a_panic_at_a_native_call_is_an_error_of_ours(
    site: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises((NativeError, ValueError)):
        SITES[site](monkeypatch, tmp_path)
    assert "panicked" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("module", [tokenizer, guard])
async def test_an_engine_whose_tokeniser_panics_is_refused(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HfTokenizer", Panicking())
    stage = PromptStage(PromptSettings())
    with pytest.raises((ValueError, KvasirError)):
        await stage.load(tokenisers.hello(tokenisers.qwen()), tokenisers.qwen())
    stage.close()


VERSION = {"anthropic-version": "2023-06-01"}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}),
    "responses": ("/v1/responses", {"model": "demo", "input": "Hi"}),
    "anthropic": (
        "/v1/messages",
        {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
    ),
    "gemini": ("/v1beta/models/demo:generateContent", {"contents": [{"parts": [{"text": "Hi"}]}]}),
}


@pytest.mark.parametrize("dialect", ASKS)
async def test_a_panic_online_is_a_500_of_the_dialect_and_the_next_request_is_answered(
    dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, body = ASKS[dialect]
    pipeline = FakePipeline(fails_before=Panic("a secret prompt"))  # type: ignore[arg-type]
    async with running(pipeline) as gateway:
        status, told, _ = await gateway.post(path, body, headers=VERSION)
        assert (status, "error" in told, pipeline.open) == (500, True, 0)
        pipeline.fails_before = None
        assert (await gateway.post(path, body, headers=VERSION))[0] == 200
    assert "panicked" in caplog.text
    assert "Traceback" not in caplog.text
    assert "secret" not in caplog.text


async def test_a_panic_within_a_stream_ends_it_with_an_error_event() -> None:
    path, body = ASKS["openai"]
    pipeline = FakePipeline(fails_after=Panic("a secret prompt"))  # type: ignore[arg-type]
    async with (
        running(pipeline) as gateway,
        gateway.session.post(gateway.url + path, json={**body, "stream": True}) as answer,
    ):
        told = await answer.text()
    assert '"error"' in told
    assert "secret" not in told


async def test_lines_that_panic_fail_and_free_their_slots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lane, runner = Lane(tmp_path), FakeRunner()
    num_lines = 2 * lane.settings.max_in_flight
    first = await lane.create([{"id": f"p{number}", "panics": True} for number in range(num_lines)])
    async with lane.gateway(runner) as worker:
        first = await lane.ended(first)
        assert worker.in_flight == 0
        second = await lane.ended(await lane.create(rows(5)))
    assert (first.state, first.counts) == ("completed", Counts(num_lines, failed=num_lines))
    assert second.counts == Counts(5, succeeded=5)
    assert "panicked" in caplog.text


async def test_a_line_whose_result_panics_is_failed_and_frees_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = Lane(tmp_path)
    job = await lane.create(rows(1))
    monkeypatch.setattr(JobFolder, "append", panics)
    async with lane.gateway(FakeRunner()) as worker:
        assert (await lane.ended(job)).counts == Counts(1, failed=1)
        assert worker.in_flight == 0


async def test_a_flight_that_panics_fails_all_of_its_readers() -> None:
    async def work(flight: Flight[int]) -> None:
        await flight.add(panics())

    leader: Any = None
    flight = Flight[int]({}, "key", leader, max_bytes=10, size=lambda item: 1)
    flight.start(work)
    with pytest.raises(NativeError):
        [item async for item in flight.read()]


async def test_vectors_that_panic_fail_their_texts_and_the_next_are_embedded() -> None:
    model = FakeTextModel()
    embedder = fake_embedder(model)
    vectors, model.vectors = model.vectors, panics  # type: ignore[method-assign]
    texts = [EmbeddingInput((1, 2), 2)]
    with pytest.raises(EmbedderError):
        await embedder.embed(texts, time.monotonic() + LIMIT_S, tenant="a")
    model.vectors = vectors  # type: ignore[method-assign]
    assert len(await embedder.embed(texts, time.monotonic() + LIMIT_S, tenant="a")) == 1
    embedder.close()
