"""The queue in front of the model: turns, batches, limits, failures, and clients that leave."""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.config import EmbeddingSettings
from gateway.errors import DeadlineError, EmbedderError, QueueFullError
from gateway.responses.embedding.embedder import Embedder
from gateway.types import EmbeddingInput
from tests.fakes.embedding import LIMIT_S, FakeTextModel, fake_embedder
from tests.fakes.waiting import until


@pytest.fixture
def model() -> Iterator[FakeTextModel]:
    fake = FakeTextModel()
    yield fake
    fake.go_on()


def texts(*tokens: tuple[int, ...]) -> list[EmbeddingInput]:
    return [EmbeddingInput(one, FakeTextModel.dimensions) for one in tokens]


def soon() -> float:
    return time.monotonic() + LIMIT_S


async def begun(model: FakeTextModel) -> None:
    assert await asyncio.to_thread(model.begun.acquire, timeout=LIMIT_S)


async def queued(embedder: Embedder, tokens: int) -> None:
    await until(lambda: embedder.waiting_tokens == tokens)


def floats(vectors: list[bytes]) -> list[list[float]]:
    return [array("f", vector).tolist() for vector in vectors]


async def test_vectors_come_in_the_order_of_their_texts(model: FakeTextModel) -> None:
    embedder = fake_embedder(model, batch_tokens=4)
    vectors = await embedder.embed(texts((9, 8, 7), (5,), (6, 6), (4, 4, 4, 4, 4)), soon(), tenant="north")
    assert floats(vectors) == [[9, 8, 7], [5], [6, 6], [4, 4, 4, 4]]
    assert embedder.stats.texts == 4
    assert embedder.waiting_tokens == 0


async def test_a_full_queue_refuses_and_says_when_to_come_again(model: FakeTextModel) -> None:
    embedder = fake_embedder(model, batch_tokens=1, max_request_tokens=3, max_waiting_tokens=3)
    model.hold()
    running = asyncio.create_task(embedder.embed(texts((1,)), soon(), tenant="north"))
    await begun(model)
    waiting = asyncio.create_task(embedder.embed(texts((2,), (3,)), soon(), tenant="north"))
    await queued(embedder, 2)
    with pytest.raises(QueueFullError, match=r"2 tokens wait.* 2 more; at most 3 may") as refused:
        await embedder.embed(texts((4, 4)), soon(), tenant="north")
    assert refused.value.retry_after_s == pytest.approx(2e-3)
    model.go_on()
    await asyncio.gather(running, waiting)
    assert embedder.figures()["refused"] == 1


async def test_tenants_take_turns_whatever_number_of_requests_they_have(model: FakeTextModel) -> None:
    embedder = fake_embedder(model, batch_tokens=2)
    model.hold()
    tasks = [asyncio.create_task(embedder.embed(texts((1,)), soon(), tenant="first"))]
    await begun(model)
    tasks += [asyncio.create_task(embedder.embed(texts((n,)), soon(), tenant="north")) for n in (2, 3, 4)]
    await queued(embedder, 3)
    tasks.append(asyncio.create_task(embedder.embed(texts((5,), (6,)), soon(), tenant="south")))
    await queued(embedder, 5)
    model.go_on()
    await asyncio.gather(*tasks)
    assert model.batches == [[(1,)], [(2,), (5,)], [(3,), (6,)], [(4,)]]


async def test_one_tenant_cannot_fill_the_queue(model: FakeTextModel) -> None:
    embedder = fake_embedder(model, batch_tokens=1, max_request_tokens=2, max_waiting_tokens_per_tenant=2)
    model.hold()
    tasks = [asyncio.create_task(embedder.embed(texts((1,)), soon(), tenant="north"))]
    await begun(model)
    tasks.append(asyncio.create_task(embedder.embed(texts((2,), (3,)), soon(), tenant="north")))
    await queued(embedder, 2)
    with pytest.raises(QueueFullError, match="of this tenant"):
        await embedder.embed(texts((4,)), soon(), tenant="north")
    tasks.append(asyncio.create_task(embedder.embed(texts((5,)), soon(), tenant="south")))
    await queued(embedder, 3)
    model.go_on()
    await asyncio.gather(*tasks)


async def test_after_the_end_nothing_hangs(model: FakeTextModel) -> None:
    embedder = fake_embedder(model, batch_tokens=1)
    model.hold()
    tasks = [asyncio.create_task(embedder.embed(texts((n,), (n,)), soon(), tenant="north")) for n in (1, 2)]
    await begun(model)
    embedder.close()
    model.go_on()
    for answer in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(answer, EmbedderError)
    assert embedder.waiting_tokens == 0


async def test_a_batch_that_fails_fails_its_requests_and_no_other(model: FakeTextModel) -> None:
    embedder = fake_embedder(model, batch_tokens=2)
    model.broken = {13}
    model.hold()
    good = asyncio.create_task(embedder.embed(texts((1, 1)), soon(), tenant="north"))
    await begun(model)
    bad = asyncio.create_task(embedder.embed(texts((13, 13), (14, 14, 14)), soon(), tenant="north"))
    await queued(embedder, 5)
    later = asyncio.create_task(embedder.embed(texts((2, 2)), soon(), tenant="north"))
    await queued(embedder, 7)
    model.go_on()
    with pytest.raises(EmbedderError, match="RuntimeError"):
        await bad
    assert floats(await good) == [[1, 1]]
    assert floats(await later) == [[2, 2]]
    assert model.batches == [[(1, 1)], [(13, 13)], [(2, 2)]], "the rest of a failed request is not computed"
    assert (embedder.stats.failed, embedder.waiting_tokens) == (1, 0)


async def test_nothing_is_begun_for_a_client_that_left(model: FakeTextModel) -> None:
    embedder = fake_embedder(model, batch_tokens=1)
    model.hold()
    left = asyncio.create_task(embedder.embed(texts((1,), (2,), (3,)), soon(), tenant="north"))
    await begun(model)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert embedder.waiting_tokens == 0
    model.go_on()
    assert floats(await embedder.embed(texts((4,)), soon(), tenant="north")) == [[4]]
    assert model.batches == [[(1,)], [(4,)]]


async def test_a_deadline_ends_the_waiting(model: FakeTextModel) -> None:
    embedder = fake_embedder(model, batch_tokens=1)
    model.hold()
    with pytest.raises(DeadlineError, match="request_timeout_s"):
        await embedder.embed(texts((1,), (2,)), time.monotonic() + 0.05, tenant="north")
    assert embedder.waiting_tokens == 0


async def test_the_model_is_loaded_once_and_in_a_thread() -> None:
    threads: list[str] = []

    def load(folder: Path) -> Any:
        threads.append(threading.current_thread().name)
        return FakeTextModel()

    embedder = Embedder(EmbeddingSettings(), load=load, find_folder=lambda configured: Path("fake"))
    assert threads == []
    await asyncio.gather(*(embedder.embed(texts((number,)), soon(), tenant="north") for number in range(5)))
    assert len(threads) == 1
    assert threads[0].startswith("embed")


async def test_a_model_that_cannot_be_loaded_is_an_error_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[Path] = []

    def load(folder: Path) -> Any:
        tries.append(folder)
        if len(tries) == 1:
            raise ValueError("half a file")
        return FakeTextModel()

    embedder = Embedder(EmbeddingSettings(), load=load, find_folder=lambda configured: Path("fake"))
    answers = await asyncio.gather(*(embedder.model() for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [EmbedderError] * 3
    assert "half a file" in caplog.text
    assert await embedder.tokens(["a"]) == [[1, ord("a"), 2]]
    assert len(tries) == 2


async def test_long_texts_are_tokenised_in_a_thread(model: FakeTextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    monkeypatch.setattr(model, "tokens", lambda text: threads.append(threading.current_thread().name) or [1])
    embedder = fake_embedder(model, thread_chars=10)
    await embedder.tokens(["12345", "12345"])
    assert threads == [threading.current_thread().name] * 2
    await embedder.tokens(["12345", "123456"])
    assert all(name.startswith("embed") for name in threads[2:])


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["north", "south", "west"]),
        st.lists(st.integers(1, 9), min_size=1, max_size=6),  # tokens of each text
        st.sampled_from(["stays", "stays", "leaves", "breaks"]),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(requests=REQUESTS, threads=st.integers(1, 3), batch_tokens=st.integers(1, 12), rounds=st.integers(0, 20))
def test_whatever_comes_and_leaves_every_text_is_computed_once_at_most(
    requests: list[tuple[str, list[int], str]], threads: int, batch_tokens: int, rounds: int
) -> None:
    """Each text is a token of its own, repeated: what comes back tells whose it was."""

    async def work() -> None:
        model = FakeTextModel()
        limits = {"max_request_tokens": 60, "max_waiting_tokens": 120, "max_waiting_tokens_per_tenant": 80}
        embedder = fake_embedder(model, threads=threads, batch_tokens=batch_tokens, **limits)
        first, asked, tasks = 1, [], []
        for tenant, lengths, fate in requests:
            asked.append([(first + index,) * length for index, length in enumerate(lengths)])
            first += len(lengths)
            model.broken |= {asked[-1][0][0]} if fate == "breaks" else set()
            tasks.append(asyncio.create_task(embedder.embed(texts(*asked[-1]), soon(), tenant=tenant)))
        for _ in range(rounds):
            await asyncio.sleep(0)
        for task, (_, _, fate) in zip(tasks, requests, strict=True):
            if fate == "leaves":
                task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for answer, mine, (_, _, fate) in zip(answers, asked, requests, strict=True):
            if isinstance(answer, list):
                assert fate != "breaks"
                assert floats(answer) == [list(one[: FakeTextModel.dimensions]) for one in mine]
            elif isinstance(answer, EmbedderError):
                failed = [batch for batch in model.batches if model.broken & {token for one in batch for token in one}]
                assert any(set(batch) & set(mine) for batch in failed)
            else:
                assert isinstance(answer, QueueFullError) or (fate == "leaves" and isinstance(answer, BaseException))
        await until(lambda: embedder.stats.batches + embedder.stats.failed == len(model.batches))
        computed = [one for batch in model.batches for one in batch]
        assert len(computed) == len(set(computed))
        assert all(len(batch) == 1 or sum(map(len, batch)) <= batch_tokens for batch in model.batches)
        assert embedder.waiting_tokens == 0
        assert not embedder._queue
        embedder.close()

    asyncio.run(work())
