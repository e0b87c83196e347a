"""The program that grammars are compiled in: a fork server with the tokeniser, and one worker process per grammar.

The fork server is small and has one thread. It loads the tokeniser once; every worker is a fork of it, so it has the
tokeniser without loading or copying it. A worker compiles one grammar and then computes masks for all sequences that
follow it. It has limits of memory, stack and time, all enforced by the kernel, because native code may hang or crash.
Nothing outlives the engine: the fork server ends when its socket is closed, workers with it.

    python -m engine.sampling.grammar_server OPTIONS    what engine/sampling/grammar_pool.py starts

engine/sampling/grammar_frames.py has what is said. Knows nothing of sequences and of when to end what.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, Final

from engine.protocol import Grammar
from engine.sampling.grammar import GrammarError, Grammars, GrammarState
from engine.sampling.grammar_frames import (
    COMPILED,
    CONTROL,
    EXITED,
    FAILED,
    FORGET,
    NUMBER,
    READY,
    REFUSED,
    ROW,
    ROW_ASKED,
    SPAWN,
    Options,
    memory_reason,
)

_FLUSH_S: Final = 0.001
"""Rows are sent together as long as they take less than this, so that quick ones do not wait for slow ones."""
_WALL: Final = 3
"""Processor time is what a grammar may use; on a busy machine it gets that within so many times as many seconds."""
_NICE: Final = 5
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # of a terminal; the engine says when to end
        signal.signal(number, signal.SIG_IGN)
    libc = _load_libc()
    _die_with_parent(libc, os.getppid())
    control = socket.socket(fileno=options.control_fd)
    try:
        with open(options.tokenizer_fd, encoding="utf-8") as file:
            grammars = Grammars(file.read(), options.vocab_size, options.eos_ids)
    except GrammarError as error:
        reason = error.reason.encode()
        control.sendall(CONTROL.pack(FAILED, len(reason), 0) + reason)
        return
    gc.collect()
    gc.freeze()  # what workers share stays shared
    control.sendall(CONTROL.pack(READY, 0, 0))
    ServerProcess(control, grammars, options, libc).run()


class ServerProcess:
    def __init__(self, control: socket.socket, grammars: Grammars, options: Options, libc: Any) -> None:
        self._control = control
        self._grammars = grammars
        self._options = options
        self._libc = libc
        self._pids: dict[int, int] = {}  # pid -> id of the worker
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Until the engine closes the socket."""
        buffer, fds = bytearray(), list[int]()
        while True:
            select.select([self._control.fileno(), self._wake], [], [])
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
            self._reap()
            if not select.select([self._control], [], [], 0)[0]:
                continue
            data, received, _, _ = socket.recv_fds(self._control, 4096, 64)
            if not data:
                return
            buffer += data
            fds += received
            while len(buffer) >= CONTROL.size:
                kind, number, _ = CONTROL.unpack_from(buffer)
                del buffer[: CONTROL.size]
                if kind == SPAWN:
                    self._spawn(number, fds.pop(0), fds)
                else:
                    self._kill(number)

    def _spawn(self, number: int, fd: int, others: list[int]) -> None:
        own = os.getpid()
        pid = os.fork()
        if pid:
            self._pids[pid] = number
            os.close(fd)
            return
        try:
            _die_with_parent(self._libc, own)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for unused in others:
                os.close(unused)
            with contextlib.suppress(EOFError, OSError):  # the engine has closed the socket, or is gone
                WorkerProcess(Connection(fd), self._grammars, self._options).run()
        finally:
            os._exit(0)

    def _kill(self, number: int) -> None:
        """Of a worker that has ended already nothing is left: its number is found until it is reaped here."""
        for pid, its_number in self._pids.items():
            if its_number == number:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ended = -os.waitstatus_to_exitcode(status)
            self._control.sendall(CONTROL.pack(EXITED, self._pids.pop(pid), ended))


class WorkerProcess:
    """One grammar, in a process of its own."""

    def __init__(self, connection: Connection, grammars: Grammars, options: Options) -> None:
        self._connection = connection
        self._grammars = grammars
        self._options = options
        self._start: GrammarState | None = None
        self._matchers: dict[int, GrammarState] = {}
        self._base_bytes = _address_bytes()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if os.path.exists("/proc/self/statm") else -1

    def run(self) -> None:
        """Until the engine closes the socket: then it raises EOFError or OSError."""
        self._limit()
        self._connection.send_bytes(b"")
        self._compile(self._connection.recv_bytes())
        while True:
            self._answer(self._connection.recv_bytes())

    def _limit(self) -> None:
        os.nice(_NICE)
        options = self._options
        _set_limit(resource.RLIMIT_CORE, 0)
        _set_limit(resource.RLIMIT_STACK, options.stack_bytes)
        if self._base_bytes:
            _set_limit(resource.RLIMIT_AS, self._base_bytes + options.memory_bytes)

    def _compile(self, body: bytes) -> None:
        grammar = Grammar(**json.loads(body))
        try:
            _allow(self._options.compile_s)
            self._start = self._grammars.compile(grammar)
            bits = self._start.copy().bits() or b""
            answer = COMPILED + self._grown() + bits
        except GrammarError as error:
            answer = REFUSED + json.dumps([error.path, error.reason]).encode()
        except MemoryError:
            answer = REFUSED + json.dumps(["", memory_reason(self._options.memory_bytes)]).encode()
        except BaseException as error:
            reason = f"the compiler failed ({type(error).__name__})"
            answer = REFUSED + json.dumps(["", reason]).encode()
        _allow(0)
        self._connection.send_bytes(answer)

    def _answer(self, body: bytes) -> None:
        out, place, flushed_s = bytearray(), 0, time.perf_counter()
        while place < len(body):
            number, count = ROW_ASKED.unpack_from(body, place)
            place += ROW_ASKED.size
            if count == FORGET:
                self._matchers.pop(number, None)
                continue
            tokens = struct.unpack_from(f"<{count}I", body, place)
            place += 4 * count
            began_s = time.perf_counter()
            _allow(self._options.mask_s)
            bits = self._mask(number, tokens)
            now_s = time.perf_counter()
            micros = min(int((now_s - began_s) * 1e6), 2**32 - 1)
            out += ROW.pack(number, micros, bits is not None) + (bits or b"")
            if now_s - flushed_s > _FLUSH_S and place < len(body):
                self._connection.send_bytes(self._grown() + out)
                out, flushed_s = bytearray(), now_s
        _allow(0)
        self._connection.send_bytes(self._grown() + out)

    def _mask(self, number: int, tokens: tuple[int, ...]) -> bytes | None:
        assert self._start is not None, "masks are asked for before the grammar is compiled"
        try:
            matcher = self._matchers.get(number)
            if matcher is None:
                matcher = self._matchers[number] = self._start.copy()
            matcher.consume(tokens)
            return matcher.bits()
        except BaseException:
            return None

    def _grown(self) -> bytes:
        """Bytes that this process takes up beside what it shares, in KiB."""
        if self._statm < 0:
            return NUMBER.pack(0)
        pages = int(os.pread(self._statm, 64, 0).split()[0])
        return NUMBER.pack(max(0, pages * resource.getpagesize() - self._base_bytes) >> 10)


def _allow(seconds: float) -> None:
    """The kernel ends this process after so much processor time, and after _WALL times as long in any case. 0: never.
    No handler would do: the signal may come while native code runs."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * _WALL)


def _set_limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(which, (value, hard))


def _address_bytes() -> int:
    """0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _load_libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent(libc: Any, parent: int) -> None:
    """Elsewhere than on Linux the closed socket ends a process, when it looks."""
    if libc is not None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    return


if __name__ == "__main__":
    main()
