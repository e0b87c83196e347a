"""The compiled grammars of an engine: each in a worker process, so that none can hurt the engine or another.

    open -> waiting, turns by tenant -> compiling -> kept while sequences follow it, and until others need its place
                                            '-----> refused: it cannot be carried out, or is beyond a limit

A worker that crashes, is too slow or takes too much memory ends alone; sequences that followed its grammar have it
compiled again. What a tenant's grammars are is no other tenant's business: the salt of a sequence is part of the key.
Used by the loop's thread alone; no call waits, and `pump` hears of what the processes did. engine/scheduler.py opens,
engine/sampling/grammar_worker.py asks masks.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import OrderedDict
from itertools import count
from multiprocessing.connection import wait
from typing import Final

from engine.protocol import Grammar, Lane
from engine.sampling.fork_server import ForkServer
from engine.sampling.grammar_frames import Options, memory_reason
from engine.sampling.grammar_jobs import GrammarJobs, Job, Key
from engine.sampling.grammar_worker import GrammarWorker, Matcher, Refusal

log = logging.getLogger(__name__)

COMPILE_S: Final = 10.0
"""Processor seconds of one grammar. 5,000 properties take some 4."""
LATE_S: Final = 45.0
"""Without a word of a worker that compiles, which the kernel ends after 3 times COMPILE_S, or of a fork server that
loads the tokeniser, the fork server hangs."""
MASK_S: Final = 5.0
"""Processor seconds of one mask; the compiler's own limits end almost all after some 20 ms."""
MEMORY_BYTES: Final = 256 << 20
"""Of one worker; 5,000 properties take 40 MiB."""
ALL_MEMORY_BYTES: Final = 2 << 30
"""Of all workers: past it the largest one ends."""
STACK_BYTES: Final = 64 << 20
TENANT_KEPT: Final = 0.5
"""Share of the workers that one tenant may have."""
MAX_TRIES: Final = 2
"""A grammar whose compilation is cut short, because the fork server is lost, is tried so often."""

_STACK_SIGNALS: Final = (signal.SIGSEGV, signal.SIGBUS)
_TIME_SIGNALS: Final = (signal.SIGPROF, signal.SIGALRM)


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
        at_once = at_once or min(4, max(2, (os.cpu_count() or 1) // 2))
        self._jobs = GrammarJobs(max_waiting=max_waiting, at_once=at_once)
        self._server: ForkServer | None = None
        self._server_late_s = 0.0
        self._started = self._ready = False
        self._unusable: Refusal | None = None
        self._numbers = count(1)
        self._workers: OrderedDict[Key, GrammarWorker] = OrderedDict()  # compiled; the last used at the end
        self._by_number: dict[int, GrammarWorker] = {}

    # -- for the engine's loop ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to load the tokeniser. Once."""
        self._started = True
        self._start_server()

    def close(self) -> None:
        """Ends all processes."""
        self._started = False
        for worker in self._by_number.values():
            worker.connection.close()
        if self._server is not None:
            self._server.close()
        self._server = None

    @property
    def waits(self) -> bool:
        """Whether a process is to say something, so that `pump` is to be called soon."""
        starts = self._server is not None and not self._ready
        return starts or len(self._jobs) > 0 or any(worker.waited_for for worker in self._by_number.values())

    def pump(self) -> None:
        """Hears what the processes have said, and ends what hangs."""
        if self._server is not None:
            self._server.pump()
        for number in [worker.number for worker in self._find_ready(0)]:
            if (worker := self._by_number.get(number)) is not None:
                self._look(worker)
        self._bound_memory()
        self._end_hanging()
        self._compile_next()

    def _find_ready(self, timeout_s: float) -> list[GrammarWorker]:
        """Workers of which something is to be read, as soon as there are any or the fork server says something."""
        waiting = [worker for worker in self._by_number.values() if worker.waited_for and not worker.ended]
        sockets = [worker.connection for worker in waiting]
        if not sockets and not timeout_s:
            return []
        ready = wait([*sockets, *([] if self._server is None else [self._server.socket])], timeout_s)
        return [worker for worker in waiting if worker.connection in ready]

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their grammars."""
        return self._jobs.num_waiting

    def find_refusal(self, tenant: str, grammar: Grammar) -> str | None:
        """Why no more sequences of this tenant may wait."""
        return self._jobs.find_refusal(tenant, grammar)

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
        self._jobs.wait(matcher)
        self._compile_next()

    def drop(self, matcher: Matcher) -> None:
        """Its sequence has ended. A grammar that nobody waits for is not compiled any more."""
        if matcher.worker is not None:
            matcher.worker.drop(matcher)
            matcher.worker = None
        job = self._jobs.unwait(matcher)
        if job is not None and job.worker is not None:
            self._end_worker(job.worker)
        self._compile_next()

    def __len__(self) -> int:
        """Compiled grammars that are kept."""
        return len(self._workers)

    # -- how workers begin --------------------------------------------------------------------------------------------

    def _compile_next(self) -> None:
        """Begins to compile what may be compiled now."""
        if not self._started:
            return
        if self._server is None and len(self._jobs):
            self._start_server()
        while self._ready and (job := self._jobs.choose(self._make_place)) is not None:
            self._begin(job)

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

    def _begin(self, job: Job) -> None:
        server, number = self._server, next(self._numbers)
        assert server is not None, "grammars are compiled while there is a fork server"
        try:
            sock = server.spawn(number)
        except (ConnectionError, BlockingIOError):  # it has ended, or reads nothing: another one is started
            server.lose()
            self._try_again(job)
            return
        except OSError as error:
            log.error("a process for a grammar could not be started: %s", error)
            self._answer(job, Refusal(None, "the engine could not start a process for the grammar"))
            return
        salt, grammar = job.key
        worker = GrammarWorker(number, grammar, job.tenant, salt, sock, time.monotonic() + LATE_S)
        self._jobs.begin(job, worker)
        self._by_number[number] = worker

    def _try_again(self, job: Job) -> None:
        if job.tries + 1 < MAX_TRIES:
            self._jobs.put_back(job)
        else:
            self._answer(job, Refusal(None, "the grammar could not be compiled"))

    # -- what workers say ---------------------------------------------------------------------------------------------

    def _look(self, worker: GrammarWorker) -> None:
        """There is something to read."""
        worker.pump()
        job = self._find_job(worker)
        if job is not None and worker.refusal is not None:
            self._end_worker(worker)
            self._answer(job, worker.refusal)
        elif job is not None and worker.start_bits is not None:
            self._workers[worker.key] = worker
            self._answer(job, None)

    def _find_job(self, worker: GrammarWorker) -> Job | None:
        """What it is compiling."""
        job = self._jobs.find(worker.key)
        return job if job is not None and job.worker is worker else None

    def _answer(self, job: Job, refusal: Refusal | None) -> None:
        """The grammar is compiled, or is not going to be."""
        waiting = self._jobs.end(job)
        if refusal is None and job.worker is not None:
            for matcher in waiting:
                matcher.join(job.worker)
        for matcher in waiting:
            matcher.on_ready(refusal)

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
        worker.connection.close()

    def _exited(self, number: int, ended: int) -> None:
        """A process has ended by itself, or we ended it and know of it."""
        worker = self._by_number.get(number)
        if worker is None:
            return
        worker.pump()  # what it said before
        log.info("the process of a grammar ended (%s)", signal.strsignal(ended) if ended > 0 else f"status {-ended}")
        self._lose(worker, _reason(ended, compiling=self._find_job(worker) is not None))
        self._compile_next()

    def _lose(self, worker: GrammarWorker, reason: str | None) -> None:
        """`reason` is None where the grammar is not to blame."""
        self._forget(worker)
        for matcher in list(worker.matchers.values()):
            matcher.lose(reason)
        worker.matchers.clear()
        job = self._find_job(worker)
        if job is not None and reason is not None:
            self._answer(job, worker.refusal or Refusal("", reason))
        elif job is not None:
            self._try_again(job)

    def _bound_memory(self) -> None:
        while sum(worker.grown_bytes for worker in self._by_number.values()) > ALL_MEMORY_BYTES:
            if self._evict(None):
                continue
            largest = max(self._by_number.values(), key=lambda worker: worker.grown_bytes)
            reason = f"the grammars of this engine need more than {ALL_MEMORY_BYTES >> 20} MiB of memory"
            for matcher in largest.matchers.values():
                matcher.failure = Refusal(None, reason)
            self._lose(largest, "the grammars of this engine need too much memory")
            if self._server is not None:
                self._server.kill(largest.number)

    # -- the fork server ----------------------------------------------------------------------------------------------

    def _start_server(self) -> None:
        self._ready, self._server_late_s = False, time.monotonic() + LATE_S
        self._server = ForkServer(on_ready=self._loaded, on_exited=self._exited, on_lost=self._lost)
        self._server.start(self._tokenizer_json, self._options)

    def _end_hanging(self) -> None:
        """Ends a fork server that has not forked a worker in time, or not begun."""
        late = [worker.late_s for worker in self._by_number.values() if worker.compiles]
        late += [] if self._ready else [self._server_late_s]
        if self._server is not None and late and time.monotonic() >= min(late):
            log.error("the process that forks those of grammars has said nothing for %g s", LATE_S)
            self._server.lose()

    def _loaded(self, reason: str | None) -> None:
        if reason is None:
            self._ready = True
            self._compile_next()
            return
        log.warning("structured output is not possible with this model: %s", reason)
        self._unusable = Refusal("", reason)
        for job in self._jobs.all():
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
            for job in self._jobs.all():
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
