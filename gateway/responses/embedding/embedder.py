"""Many requests' texts, embedded together: a queue with a limit, batches by tokens, threads that compute them.

The model is loaded when the first text comes, so that a gateway which embeds nothing pays nothing. Runs on the event
loop; what takes longer than a moment is done in threads. text_model.py is what they compute.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gateway.config import EmbeddingSettings
from gateway.errors import DeadlineError, EmbedderError, QueueFullError
from gateway.native import no_panic
from gateway.responses.embedding.text_model import TextModel, find_folder, load
from gateway.tasks import spawn
from gateway.types import EmbeddingInput

log = logging.getLogger(__name__)

SLICE_CHARS = 50_000
"""Characters that a thread tokenises before the next request has its turn: about 20 ms."""

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Job:
    """The texts of one request.

    tokens   of those that wait
    waiting  indices of those that no batch has taken, shortest first
    missing  texts without a vector
    """

    tenant: str
    texts: Sequence[EmbeddingInput]
    tokens: int
    waiting: deque[int]
    vectors: list[bytes]
    missing: int
    done: asyncio.Future[None]

    @property
    def next_tokens(self) -> int:
        return len(self.texts[self.waiting[0]].tokens)


@dataclass(slots=True)
class EmbedderStats:
    """Since the start, and now; for the operator.

    refused  requests that found the queue full
    failed   batches that ended with an error
    busy_s   seconds that the threads computed, together
    """

    batches: int = 0
    texts: int = 0
    tokens: int = 0
    refused: int = 0
    failed: int = 0
    busy_s: float = 0.0
    waiting_tokens: int = 0
    loaded: bool = False


@dataclass(eq=False)
class Embedder:
    """Embeds texts under one or several names. `close` it in the end."""

    settings: EmbeddingSettings
    load: Callable[[Path], TextModel] = load
    find_folder: Callable[[Path | None], Path | None] = find_folder
    stats: EmbedderStats = field(default_factory=EmbedderStats)

    def __post_init__(self) -> None:
        self._folder = self.find_folder(self.settings.folder)
        self._created = int(time.time())
        self._loading: asyncio.Task[TextModel] | None = None
        self._lines: dict[str, deque[_Job]] = {}  # tenant -> jobs with texts that wait; both in the order of turns
        self._running = 0  # batches
        self._computing = ThreadPoolExecutor(self.settings.threads, thread_name_prefix="embed")
        self._tokenising = ThreadPoolExecutor(1, thread_name_prefix="embed-tokens")

    def models(self) -> Mapping[str, int]:
        """Names that it embeds under -> Unix second of its start; empty while the extra is missing."""
        return dict.fromkeys(self.settings.names, self._created) if self._folder is not None else {}

    def figures(self) -> Mapping[str, Any]:
        """For the operator; empty while the extra is missing."""
        return asdict(self.stats) if self._folder is not None else {}

    async def model(self) -> TextModel:
        """The model, loaded by the first who asks. Raises EmbedderError when it cannot be; the next one tries again."""
        if self._loading is None:
            self._loading = spawn(self._load(), "load the embedding model")
        loading = self._loading
        try:
            return await asyncio.shield(loading)
        except Exception as error:  # whatever the libraries raise for a broken folder; it has been logged
            if self._loading is loading:
                self._loading = None
            raise EmbedderError(f"The embedding model cannot be loaded: {type(error).__name__}.") from error

    async def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text with its special tokens, however many.

        In a thread when that takes a while, a slice at a time, so that a long request does not hold up the others.
        """
        model = await self.model()
        if sum(map(len, texts)) <= self.settings.thread_chars:
            return [model.tokens(text) for text in texts]
        found: list[list[int]] = []
        for part in _slices(texts):
            found += await self._in(self._tokenising, functools.partial(_tokenised, model, part))
        return found

    async def embed(self, texts: Sequence[EmbeddingInput], deadline_s: float, *, tenant: str) -> list[bytes]:
        """The vectors in the order of the texts, little-endian float32 of length 1.

        Tenants take turns text by text, and so do the requests of one: a short one does not wait for a long one. Raises
        QueueFullError, DeadlineError at `deadline_s` (monotonic clock), and EmbedderError when a batch with a text of
        these failed.
        """
        model = await self.model()
        job = self._admit(tenant, texts)
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                self._start_batches(model)
                await job.done
        except TimeoutError:
            raise DeadlineError("The embedding took longer than a request may (server.request_timeout_s).") from None
        finally:
            self._forget(job)
        return job.vectors

    def close(self) -> None:
        """Ends the threads; what they are at is finished and thrown away."""
        for pool in (self._computing, self._tokenising):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _load(self) -> TextModel:
        if self._folder is None:
            raise ImportError("the extra is not installed")
        started_s = time.monotonic()
        model = await self._in(self._tokenising, functools.partial(self.load, self._folder))
        log.info("embedding model of %s loaded in %.1f s", self._folder, time.monotonic() - started_s)
        self.stats.loaded = True
        return model

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
        with no_panic():
            return await asyncio.get_running_loop().run_in_executor(pool, work)

    # -- the queue ----------------------------------------------------------------------------------------------------

    def _admit(self, tenant: str, texts: Sequence[EmbeddingInput]) -> _Job:
        tokens = sum(len(one.tokens) for one in texts)
        settings, line = self.settings, self._lines.get(tenant, deque())
        own = sum(job.tokens for job in line)
        for waiting, whose, limit in (
            (own, "of this tenant ", settings.max_waiting_tokens_per_tenant),
            (self.stats.waiting_tokens, "", settings.max_waiting_tokens),
        ):
            if waiting + tokens > limit:
                self.stats.refused += 1
                raise QueueFullError(
                    f"{waiting} tokens {whose}wait to be embedded, and this request has {tokens} more; at most {limit} "
                    "may wait.",
                    retry_after_s=self._wait_s(),
                )
        order = sorted(range(len(texts)), key=lambda index: len(texts[index].tokens))
        done = asyncio.get_running_loop().create_future()
        job = _Job(tenant, texts, tokens, deque(order), [b""] * len(texts), len(texts), done)
        line.append(job)
        self._lines[tenant] = line
        self.stats.waiting_tokens += tokens
        return job

    def _wait_s(self) -> float:
        """How long what waits now will take, by what was computed up to now."""
        per_token_s = self.stats.busy_s / self.stats.tokens if self.stats.tokens else 1e-3
        return self.stats.waiting_tokens * per_token_s / self.settings.threads

    def _forget(self, job: _Job) -> None:
        """Nobody waits for it any more: nothing of it is begun."""
        if job.waiting:
            self.stats.waiting_tokens -= job.tokens
            job.waiting.clear()
            self._lines[job.tenant].remove(job)
            if not self._lines[job.tenant]:
                del self._lines[job.tenant]

    def _start_batches(self, model: TextModel) -> None:
        while self._lines and self._running < self.settings.threads:
            self._running += 1
            spawn(self._run(model, self._next_batch()), "embed a batch")

    def _next_batch(self) -> list[tuple[_Job, int]]:
        """One text of each tenant in turn, up to batch_tokens; a longer text is a batch of its own."""
        batch: list[tuple[_Job, int]] = []
        room = self.settings.batch_tokens
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            tokens = line[0].next_tokens
            if batch and tokens > room:
                break
            job = line.popleft()
            batch.append((job, job.waiting.popleft()))
            room -= tokens
            job.tokens -= tokens
            self.stats.waiting_tokens -= tokens
            if job.waiting:
                line.append(job)
            del self._lines[tenant]
            if line:
                self._lines[tenant] = line
        return batch

    async def _run(self, model: TextModel, batch: Sequence[tuple[_Job, int]]) -> None:
        wanted = [job.texts[index] for job, index in batch]
        started_s = time.monotonic()
        try:
            vectors = await self._in(self._computing, lambda: model.vectors(wanted))
        except Exception as error:  # whatever it is, it is these requests' alone
            log.exception("a batch of %d texts failed", len(batch))
            self.stats.failed += 1
            self._fail({job for job, _ in batch}, error)
        else:
            self.stats.batches += 1
            self.stats.texts += len(batch)
            self.stats.tokens += sum(len(one.tokens) for one in wanted)
            self._deliver(batch, vectors)
        finally:
            self.stats.busy_s += time.monotonic() - started_s
            self._running -= 1
            self._start_batches(model)

    def _deliver(self, batch: Sequence[tuple[_Job, int]], vectors: Sequence[bytes]) -> None:
        for (job, index), vector in zip(batch, vectors, strict=True):
            job.vectors[index] = vector
            job.missing -= 1
            if not job.missing and not job.done.done():
                job.done.set_result(None)

    def _fail(self, jobs: set[_Job], error: Exception) -> None:
        for job in jobs:
            self._forget(job)
            if not job.done.done():
                job.done.set_exception(EmbedderError(f"The texts could not be embedded: {type(error).__name__}."))


def _slices(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Texts of SLICE_CHARS together, one at least."""
    start = chars = 0
    for index, text in enumerate(texts):
        if index > start and chars + len(text) > SLICE_CHARS:
            yield texts[start:index]
            start, chars = index, 0
        chars += len(text)
    yield texts[start:]


def _tokenised(model: TextModel, texts: Sequence[str]) -> list[list[int]]:
    return [model.tokens(text) for text in texts]
