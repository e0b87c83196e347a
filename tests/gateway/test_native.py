"""A panic in a native library fails the request that it happened in, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config import PromptSettings
from gateway.errors import EmbedderError, KvasirError, NativeError
from gateway.native import no_panic
from gateway.prompt import decode, guard, tokenizer
from gateway.prompt.stage import PromptStage
from gateway.prompt.tokenizer import Link, Tokenizer
from gateway.queues.batch.base import Counts
from gateway.queues.batch.folder import JobFolder
from gateway.responses.embedding.text_model import TextModel
from gateway.responses.flights import Flight, Flights
from gateway.types import EmbeddingInput
from tests.fakes import tokenisers
from tests.fakes.batches import FakeRunner, Lane, rows
from tests.fakes.embedding import FakeTextModel, fake_embedder
from tests.fakes.gateway import running
from tests.fakes.panic import Panic, Panicking, panics
from tests.fakes.pipeline import FakePipeline
from tests.test_architecture import SOURCES, foreign, imports

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


def test_every_file_that_calls_rust_through_pyo3_guards_its_calls() -> None:
    calling = [
        path
        for path in SOURCES
        if "gateway" in path.parts and foreign(path) & {"tokenizers", "tiktoken", "safetensors"}
    ]
    unguarded = [path.name for path in calling if "gateway.native" not in set(imports(path))]
    assert calling
    assert not unguarded


def loaded(name: str = "qwen") -> Tokenizer:
    files = tokenisers.ALL[name]()
    return Tokenizer(files.tokenizer_json, template=files.chat_template or "")


def _batch() -> Any:
    broken = loaded()
    broken._fast, broken._hf = None, Panicking()
    return broken.encode([Link("Hello", 5)])


def _both_libraries() -> Any:
    broken = loaded()
    assert broken._fast is not None
    broken._fast._encoding, broken._hf = Panicking(), Panicking()  # type: ignore[assignment]
    return broken.encode([Link("Hello", 5)])


def _offsets() -> Any:
    broken = loaded()
    broken._fast, broken._hf = None, Panicking()
    return broken.count_before(Link("Hello", 5), b"\0" * 8, 3)


SITES: dict[str, Callable[[], Any]] = {
    "tokenizers, a batch": _batch,
    "tiktoken, then tokenizers": _both_libraries,
    "tokenizers, offsets": _offsets,
    "tokenizers, decoding": lambda: decode._WindowText(Panicking(), [1], frozenset()).feed([5]),  # type: ignore[arg-type]
    "tokenizers, spelling": lambda: decode._spell_alone(Panicking(), [1], 5),  # type: ignore[arg-type]
    "tokenizers, questions": lambda: TextModel(Panicking(), None, "", 16, (), ()).tokens("Hello"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("site", SITES)
def test_a_panic_at_a_native_call_is_an_error_of_ours(site: str) -> None:
    with pytest.raises(NativeError):
        SITES[site]()


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
    flight = Flights[int](10, lambda item: 1).launch("key", leader)
    flight.start(work, "flight")
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
