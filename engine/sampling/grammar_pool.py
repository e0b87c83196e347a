"""The compiled grammars of an engine: each in a worker process, so that none can hurt the engine or another.

    open -> waiting, turns by tenant -> compiling -> kept while sequences follow it, and until others need its place
                                            '-----> refused: it cannot be carried out, or is beyond a limit

A worker that crashes, is too slow or takes too much memory ends alone; sequences that followed its grammar have it
compiled again. What a tenant's grammars are is no other tenant's business: the salt of a sequence is part of the key.
Used by the loop's thread alone; no call waits. engine/intake.py opens, engine/sampling/constrain.py asks for masks.
"""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from engine.protocol import LANES, Grammar, Lane
from engine.sampling.fork_server import ForkServer
from engine.sampling.grammar_frames import Options, memory_reason
from engine.sampling.grammar_worker import GrammarWorker, Matcher, Refusal
from engine.sampling.socket_watcher import SocketWatcher

log = logging.getLogger(__name__)

COMPILE_S: Final = 10.0
"""Processor seconds of one grammar. 5,000 properties take some 4."""
MASK_S: Final = 5.0
"""Processor seconds of one mask; the compiler's own limits end almost all after some 20 ms."""
MEMORY_BYTES: Final = 256 << 20
"""Of one worker; 5,000 properties take 40 MiB."""
ALL_MEMORY_BYTES: Final = 2 << 30
"""Of all workers: past it the largest one ends."""
STACK_BYTES: Final = 64 << 20
WAITING_BYTES: Final = 64 << 20
"""Texts of grammars that wait to be compiled."""
TENANT_KEPT: Final = 0.5
"""Share of the workers that one tenant may have."""
TENANT_WAITING: Final = 0.5
"""The same of the sequences and bytes that wait."""
MAX_TRIES: Final = 2
"""A grammar that is being compiled when the fork server is lost is tried so often."""

_STACK_SIGNALS: Final = (signal.SIGSEGV, signal.SIGBUS)
_TIME_SIGNALS: Final = (signal.SIGPROF, signal.SIGALRM)

Key = tuple[str, Grammar]


@dataclass(eq=False, slots=True)
class _Job:
    """A grammar that is to be compiled, or is."""

    key: Key
    tenant: str
    lane: Lane
    waiting: dict[Matcher, None] = field(default_factory=dict)  # none: it is not wanted any more
    worker: GrammarWorker | None = None
    tries: int = 0


class GrammarPool:
    """
    tokenizer_json  the file of the tokenizers library
    vocab_size      rows of the model's logits
    max_kept        workers, and so compiled grammars
    max_waiting     sequences that wait for their grammars
    at_once         grammars that are compiled at the same time
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        *,
        max_kept: int,
        max_waiting: int,
        at_once: int | None = None,
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._options = Options(
            -1, -1, vocab_size, eos_ids, COMPILE_S, MASK_S, memory_bytes=MEMORY_BYTES, stack_bytes=STACK_BYTES
        )
        self._max_kept = max_kept
        self._max_waiting = max_waiting
        self._at_once = at_once or min(4, max(2, (os.cpu_count() or 1) // 2))
        self._tenant_at_once = max(1, self._at_once - 1)  # one is always another tenant's
        self._post: Callable[[Callable[[], object]], object] | None = None
        self._watcher: SocketWatcher | None = None
        self._server: ForkServer | None = None
        self._ready = False
        self._unusable: Refusal | None = None
        self._numbers = count(1)
        self._workers: OrderedDict[Key, GrammarWorker] = OrderedDict()  # compiled; the last used at the end
        self._by_number: dict[int, GrammarWorker] = {}
        self._jobs: dict[Key, _Job] = {}
        self._turns: OrderedDict[tuple[Lane, str], OrderedDict[Key, _Job]] = OrderedDict()  # (lane, tenant) -> jobs
        self._compiling: Counter[str] = Counter()  # by tenant
        self._num_waiting: Counter[str] = Counter()  # sequences by tenant
        self._text_bytes: Counter[str] = Counter()  # of jobs, by tenant

    # -- for the engine's loop ----------------------------------------------------------------------------------------

    def start(self, post: Callable[[Callable[[], object]], None]) -> None:
        """Begins to load the tokeniser. `post` brings a call to the loop's thread. Once."""
        self._post = post
        self._watcher = SocketWatcher(post)
        self._start_server()

    def close(self) -> None:
        """Ends all processes."""
        if self._watcher is not None:
            self._watcher.stop()
            for worker in self._by_number.values():
                worker.socket.close()
            if self._server is not None:
                self._server.close()
        self._watcher = self._server = None

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their grammars."""
        return self._num_waiting.total()

    def find_refusal(self, tenant: str, grammar: Grammar) -> str | None:
        """Why no more sequences of this tenant may wait."""
        size = len(grammar.text)
        if self.num_waiting >= self._max_waiting or self._text_bytes.total() + size > WAITING_BYTES:
            return "the engine is full: too many sequences wait for their grammars"
        num_own, own_bytes = self._num_waiting[tenant] + 1, self._text_bytes[tenant] + size
        if num_own > max(1, TENANT_WAITING * self._max_waiting) or own_bytes > TENANT_WAITING * WAITING_BYTES:
            return "the engine is full: too many sequences of this tenant wait for their grammars"
        return None

    def open(self, grammar: Grammar, *, tenant: str, salt: str, lane: Lane) -> Matcher:
        """For a new sequence; it is to be compiled next."""
        return Matcher(self, next(self._numbers), grammar, tenant, salt, lane)

    def compile(self, matcher: Matcher) -> None:
        """Calls the matcher's on_ready when its grammar is compiled, or with why it is not; perhaps at once."""
        key = (matcher.salt, matcher.grammar)
        worker = self._workers.get(key)
        if worker is not None and not worker.ended:
            self._workers.move_to_end(key)
            matcher.join(worker)
            matcher.on_ready(None)
            return
        if self._unusable is not None:
            matcher.on_ready(self._unusable)
            return
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(key, matcher.tenant, matcher.lane)
            self._text_bytes[job.tenant] += len(matcher.grammar.text)
            self._queue(job)
        if matcher not in job.waiting:
            matcher.grammar = job.key[1]  # equal texts are kept once
            job.waiting[matcher] = None
            self._num_waiting[matcher.tenant] += 1
        self._compile_next()

    def drop(self, matcher: Matcher) -> None:
        """Its sequence has ended. A grammar that nobody waits for is not compiled any more."""
        if matcher.worker is not None:
            matcher.worker.drop(matcher)
            matcher.worker = None
        job = self._jobs.get((matcher.salt, matcher.grammar))
        if job is not None and matcher in job.waiting:
            self._unwait(job, matcher)
            if not job.waiting:
                self._end_job(job)
                if job.worker is not None:
                    self._end_worker(job.worker)
        self._compile_next()

    def __len__(self) -> int:
        """Compiled grammars that are kept."""
        return len(self._workers)

    # -- turns --------------------------------------------------------------------------------------------------------

    def _queue(self, job: _Job) -> None:
        self._turns.setdefault((job.lane, job.tenant), OrderedDict())[job.key] = job

    def _unqueue(self, job: _Job) -> None:
        turn = (job.lane, job.tenant)
        jobs = self._turns.get(turn, OrderedDict())
        jobs.pop(job.key, None)
        if not jobs:
            self._turns.pop(turn, None)

    def _compile_next(self) -> None:
        """Begins to compile what may be compiled now: each tenant has its turn, online ones first."""
        if self._watcher is None:
            return
        if not self._ready:
            if self._jobs and self._server is None:
                self._start_server()
            return
        while self._compiling.total() < self._at_once:
            job = self._choose_job()
            if job is None:
                return
            self._unqueue(job)
            if (turn := (job.lane, job.tenant)) in self._turns:
                self._turns.move_to_end(turn)
            self._begin(job)

    def _choose_job(self) -> _Job | None:
        for wanted in LANES:
            for (lane, tenant), jobs in self._turns.items():
                if lane == wanted and self._compiling[tenant] < self._tenant_at_once and self._make_place(tenant):
                    return next(iter(jobs.values()))
        return None

    def _make_place(self, tenant: str) -> bool:
        """Whether one more worker may begin for a tenant. Ends one that nobody uses for it."""
        own = [worker for worker in self._by_number.values() if worker.tenant == tenant]
        if len(own) >= max(1, int(TENANT_KEPT * self._max_kept)):
            return self._evict(tenant)
        return len(self._by_number) < self._max_kept or self._evict(None)

    def _evict(self, tenant: str | None) -> bool:
        """Ends the least recently used worker that no sequence uses, of a tenant or of all."""
        for worker in self._workers.values():
            if not worker.matchers and tenant in (None, worker.tenant):
                self._end_worker(worker)
                return True
        return False

    def _begin(self, job: _Job) -> None:
        assert self._server is not None, "grammars are compiled while there is a fork server"
        number = next(self._numbers)
        try:
            sock = self._server.spawn(number)
        except OSError as error:
            log.error("a process for a grammar could not be started: %s", error)
            self._answer(job, Refusal(None, "the engine could not start a process for the grammar"))
            return
        salt, grammar = job.key
        worker = job.worker = GrammarWorker(number, grammar, job.tenant, salt, sock)
        worker.watch = partial(self._watch, worker)
        self._by_number[number] = worker
        self._compiling[job.tenant] += 1
        worker.watch()

    # -- what workers say ---------------------------------------------------------------------------------------------

    def _watch(self, worker: GrammarWorker) -> None:
        if self._watcher is not None and not worker.watched and not worker.ended:
            worker.watched = True
            self._watcher.watch(worker.socket, partial(self._look, worker), write=worker.has_unsent)

    def _look(self, worker: GrammarWorker) -> None:
        """There is something to read, or room to write."""
        worker.watched = False
        if self._by_number.get(worker.number) is not worker:
            return
        worker.pump()
        job = self._jobs.get(worker.key)
        if job is not None and job.worker is worker:
            self._look_at_compiling(job, worker)
        self._bound_memory()
        self._compile_next()
        if worker.waited_for:
            self._watch(worker)

    def _look_at_compiling(self, job: _Job, worker: GrammarWorker) -> None:
        if worker.refusal is not None:
            self._end_worker(worker)
            self._answer(job, worker.refusal)
        elif worker.start_bits is not None:
            self._workers[worker.key] = worker
            self._answer(job, None)

    def _answer(self, job: _Job, refusal: Refusal | None) -> None:
        """The grammar is compiled, or is not going to be."""
        waiting = list(job.waiting)
        for matcher in waiting:
            self._unwait(job, matcher)
            if refusal is None and job.worker is not None:
                matcher.join(job.worker)
        self._end_job(job)
        for matcher in waiting:
            matcher.on_ready(refusal)

    def _unwait(self, job: _Job, matcher: Matcher) -> None:
        del job.waiting[matcher]
        self._num_waiting[matcher.tenant] -= 1
        if not self._num_waiting[matcher.tenant]:
            del self._num_waiting[matcher.tenant]

    def _end_job(self, job: _Job) -> None:
        self._unqueue(job)
        del self._jobs[job.key]
        self._text_bytes[job.tenant] -= len(job.key[1].text)
        if not self._text_bytes[job.tenant]:
            del self._text_bytes[job.tenant]
        self._stop_compiling(job)

    def _stop_compiling(self, job: _Job) -> None:
        if job.worker is not None:
            self._compiling[job.tenant] -= 1
            if not self._compiling[job.tenant]:
                del self._compiling[job.tenant]

    # -- how workers end ----------------------------------------------------------------------------------------------

    def _end_worker(self, worker: GrammarWorker) -> None:
        """Its place is free at once; the process is ended by force, whatever it is at."""
        self._forget(worker)
        if self._server is not None:
            self._server.kill(worker.number)

    def _forget(self, worker: GrammarWorker) -> None:
        worker.ended = True
        self._by_number.pop(worker.number, None)
        if self._workers.get(worker.key) is worker:
            del self._workers[worker.key]
        if self._watcher is not None:
            self._watcher.close_socket(worker.socket)

    def _exited(self, number: int, ended: int) -> None:
        """A process has ended by itself, or we ended it and know of it."""
        worker = self._by_number.get(number)
        if worker is None:
            return
        worker.pump()  # what it said before
        log.info("the process of a grammar ended (%s)", signal.strsignal(ended) if ended > 0 else f"status {-ended}")
        job = self._jobs.get(worker.key)
        self._lose(worker, _reason(ended, compiling=job is not None and job.worker is worker))
        self._compile_next()

    def _lose(self, worker: GrammarWorker, reason: str | None) -> None:
        """`reason` is None where the grammar is not to blame."""
        self._forget(worker)
        for matcher in list(worker.matchers.values()):
            matcher.lose(reason)
        worker.matchers.clear()
        job = self._jobs.get(worker.key)
        if job is None or job.worker is not worker:
            return
        job.tries += 1
        if reason is not None or job.tries == MAX_TRIES:
            refusal = Refusal("", reason) if reason is not None else Refusal(None, "the grammar could not be compiled")
            self._answer(job, worker.refusal or refusal)
        else:
            self._stop_compiling(job)
            job.worker = None
            self._queue(job)

    def _bound_memory(self) -> None:
        while sum(worker.grown_bytes for worker in self._by_number.values()) > ALL_MEMORY_BYTES:
            if self._evict(None):
                continue
            largest = max(self._by_number.values(), key=lambda worker: worker.grown_bytes)
            for matcher in largest.matchers.values():
                matcher.failure = f"the grammars of this engine need more than {ALL_MEMORY_BYTES >> 20} MiB of memory"
            self._lose(largest, "the grammars of this engine need too much memory")
            if self._server is not None:
                self._server.kill(largest.number)

    # -- the fork server ----------------------------------------------------------------------------------------------

    def _start_server(self) -> None:
        assert self._watcher is not None, "the pool is started"
        assert self._post is not None, "the pool is started"
        self._ready = False
        self._server = ForkServer(self._watcher, on_ready=self._loaded, on_exited=self._exited, on_lost=self._lost)
        self._server.start(self._tokenizer_json, self._options)

    def _loaded(self, reason: str | None) -> None:
        if reason is None:
            self._ready = True
            self._compile_next()
            return
        log.warning("structured output is not possible with this model: %s", reason)
        self._unusable = Refusal("", reason)
        for job in list(self._jobs.values()):
            self._answer(job, self._unusable)

    def _lost(self) -> None:
        was_ready, self._ready, self._server = self._ready, False, None
        if self._unusable is not None:
            return
        log.error("the process that forks those of grammars ended%s", "" if was_ready else " before it had begun")
        for worker in list(self._by_number.values()):
            worker.pump()
            self._lose(worker, None)
        if not was_ready:
            for job in list(self._jobs.values()):
                self._answer(job, Refusal(None, "the engine could not start the process that compiles grammars"))
        self._compile_next()


def _reason(ended: int, *, compiling: bool) -> str:
    """Why a worker ended, as its client is told."""
    what, limit_s = ("it takes", COMPILE_S) if compiling else ("one of its masks takes", MASK_S)
    if ended in _TIME_SIGNALS:
        return f"{what} more than {limit_s:g} s to compute"
    if ended in _STACK_SIGNALS:
        return "it is nested too deeply, or its rules or references lead on too often, for the compiler"
    if ended == signal.SIGABRT:
        return memory_reason(MEMORY_BYTES)
    return "the process that it ran in was ended"
