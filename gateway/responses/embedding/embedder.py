"""Many requests' texts, embedded together: a queue with a limit, batches by tokens, threads that compute them.

The model is loaded when the first text comes, so that a gateway which embeds nothing pays nothing. Runs on the event
loop; what takes longer than a moment is done in threads. text_model.py is what they compute.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gateway.config import EmbeddingSettings
from gateway.errors import DeadlineError, EmbedderError, QueueFullError
from gateway.gate import FairQueue, Gate, Waiting
from gateway.native import no_panic
from gateway.responses.embedding.text_model import TextModel, find_folder, load
from gateway.tasks import spawn
from gateway.types import Ask, EmbeddingInput

log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Job(Waiting):
    """The texts of one request; its `size` is the tokens of those that wait.

    waiting  indices of those that no batch has taken, shortest first
    missing  texts without a vector
    """

    texts: Sequence[EmbeddingInput] = ()
    waiting: deque[int] = field(default_factory=deque)
    vectors: list[bytes] = field(default_factory=list)
    missing: int = 0

    @property
    def next_tokens(self) -> int:
        return len(self.texts[self.waiting[0]].tokens)


@dataclass(slots=True)
class EmbedderStats:
    """Since the start, and now; for the operator.

    failed   batches that ended with an error
    busy_s   seconds that the threads computed, together
    """

    batches: int = 0
    texts: int = 0
    tokens: int = 0
    failed: int = 0
    busy_s: float = 0.0
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
        limits = self.settings
        self._gate: Gate[list[bytes]] = Gate(limits.max_waiting_tokens, limits.max_waiting_tokens_per_tenant)
        self._queue: FairQueue[_Job] = FairQueue()  # those with texts that wait
        self._numbers = 0
        self._running = 0  # batches
        self._computing = ThreadPoolExecutor(self.settings.threads, thread_name_prefix="embed")
        self._tokenising = ThreadPoolExecutor(1, thread_name_prefix="embed-tokens")

    def models(self) -> Mapping[str, int]:
        """Names that it embeds under -> Unix second of its start; empty while the extra is missing."""
        return dict.fromkeys(self.settings.names, self._created) if self._folder is not None else {}

    def figures(self) -> Mapping[str, Any]:
        """For the operator; empty while the extra is missing."""
        now = {"waiting_tokens": self.waiting_tokens, "refused": self._gate.refused}
        return asdict(self.stats) | now if self._folder is not None else {}

    @property
    def waiting_tokens(self) -> int:
        return self._gate.waiting

    async def model(self) -> TextModel:
        """The model, loaded with the first call. Raises EmbedderError when it cannot be; the next call tries again."""
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
        """Token ids of each text with its special tokens, however many. In a thread where that takes a while."""
        model = await self.model()
        if sum(map(len, texts)) <= self.settings.thread_chars:
            return list(map(model.tokens, texts))
        return await self._in(self._tokenising, lambda: list(map(model.tokens, texts)))

    async def embed(self, texts: Sequence[EmbeddingInput], deadline_s: float, *, tenant: str) -> list[bytes]:
        """The vectors in the order of the texts, little-endian float32 of length 1.

        Tenants take turns text by text, and so do the requests of one: a short one does not wait for a long one. Raises
        QueueFullError, DeadlineError at `deadline_s` (monotonic clock), and EmbedderError when a batch with a text of
        these failed.
        """
        model = await self.model()
        job = self._admit(tenant, texts, deadline_s)
        self._start_batches(model)
        late = "The embedding took longer than a request may (server.request_timeout_s)."
        timeout_s = deadline_s - job.arrived_s
        return await self._gate.wait(job, self._queue, timeout_s, late=lambda: DeadlineError(late))

    def close(self) -> None:
        """Ends the threads; what they are at is finished and thrown away."""
        for pool in (self._computing, self._tokenising):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _load(self) -> TextModel:
        if self._folder is None:
            raise ImportError("the extra is not installed")
        started_s = time.monotonic()
        model = await self._in(self._tokenising, partial(self.load, self._folder))
        log.info("embedding model of %s loaded in %.1f s", self._folder, time.monotonic() - started_s)
        self.stats.loaded = True
        return model

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
        with no_panic():
            return await asyncio.get_running_loop().run_in_executor(pool, work)

    # -- the queue ----------------------------------------------------------------------------------------------------

    def _admit(self, tenant: str, texts: Sequence[EmbeddingInput], deadline_s: float) -> _Job:
        tokens = sum(len(one.tokens) for one in texts)
        if full := self._gate.find_full(tenant, tokens):
            waiting, own = full
            most = self.settings.max_waiting_tokens_per_tenant if own else self.settings.max_waiting_tokens
            raise QueueFullError(
                f"{waiting} tokens {'of this tenant ' if own else ''}wait to be embedded, and this request has "
                f"{tokens} more; at most {most} may wait.",
                retry_after_s=self._wait_s(),
            )
        order = sorted(range(len(texts)), key=lambda index: len(texts[index].tokens))
        job = _Job(Ask(tenant, tokens, deadline_s), time.monotonic(), cost_s=1.0, size=tokens, texts=texts)
        job.waiting, job.vectors, job.missing = deque(order), [b""] * len(texts), len(texts)
        self._queue.arrived(job)
        self._enter(job)
        self._gate.enter(job)
        return job

    def _enter(self, job: _Job) -> None:
        """Behind the tenant's other requests: they take turns, too."""
        self._numbers += 1
        job.order = (0, 0.0, self._numbers)
        self._queue.enter(job)

    def _wait_s(self) -> float:
        """How long what waits now will take, by what was computed up to now."""
        per_token_s = self.stats.busy_s / self.stats.tokens if self.stats.tokens else 1e-3
        return self._gate.waiting * per_token_s / self.settings.threads

    def _start_batches(self, model: TextModel) -> None:
        while self._queue and self._running < self.settings.threads:
            self._running += 1
            spawn(self._run(model, self._next_batch()), "embed a batch")

    def _next_batch(self) -> list[tuple[_Job, int]]:
        """One text of each tenant in turn, up to batch_tokens; a longer text is a batch of its own."""
        batch: list[tuple[_Job, int]] = []
        left = self.settings.batch_tokens
        while self._queue and (not batch or self._queue.first().next_tokens <= left):
            job = self._queue.first()
            tokens = job.next_tokens
            self._queue.remove(job)
            self._queue.took(job)
            batch.append((job, job.waiting.popleft()))
            left -= tokens
            self._gate.shrink(job, tokens)
            if job.waiting:
                self._enter(job)
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
            if not job.missing:
                self._gate.grant(job, job.vectors)

    def _fail(self, jobs: set[_Job], error: Exception) -> None:
        for job in jobs:
            failed = EmbedderError(f"The texts could not be embedded: {type(error).__name__}.")
            self._gate.fail(job, self._queue, failed)
