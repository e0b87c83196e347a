"""The engine's end of the fork server: a process that has the tokeniser and forks a worker for each grammar.

A thread says when a socket can be read or written, so that the engine's loop need not wait for one. It reads and writes
nothing itself. A socket is looked at until it is ready once; the call that is posted then reads, and asks again. The
fork server is started on that thread, because it ends with the thread that started it.
engine/sampling/grammar_server.py is the program, engine/sampling/grammar_pool.py asks for workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Final

from engine.sampling.grammar_frames import CONTROL, EXITED, FAILED, KILL, READY, SPAWN, Options, connect

_ENVIRONMENT: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
"""What a process with untrusted input gets to see; no secrets."""


class ForkServer:
    """
    on_ready   it has the tokeniser, or None the reason why it cannot be used
    on_exited  the number of a worker, and the signal that ended it, or below 1 its exit status
    on_lost    it has ended, and every worker with it
    All are called on the loop's thread, to which the watcher brings them.
    """

    def __init__(
        self,
        watcher: SocketWatcher,
        *,
        on_ready: Callable[[str | None], object],
        on_exited: Callable[[int, int], object],
        on_lost: Callable[[], object],
    ) -> None:
        self._watcher = watcher
        self._on_ready = on_ready
        self._on_exited = on_exited
        self._on_lost = on_lost
        self._socket, self._child_socket = socket.socketpair()
        self._socket.setblocking(False)
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()
        self._ended = False

    def start(self, tokenizer_json: str, options: Options) -> None:
        """Returns at once."""
        self._watcher.run(lambda: self._start(tokenizer_json, options))
        self._watch()

    def spawn(self, number: int) -> Connection:
        """A new worker. Raises OSError: ConnectionError when this server has ended,
        BlockingIOError when it reads nothing."""
        own, its = socket.socketpair()
        try:
            socket.send_fds(self._socket, [CONTROL.pack(SPAWN, number, 0)], [its.fileno()])
        except OSError:
            own.close()
            raise
        finally:
            its.close()
        return connect(own)

    def kill(self, number: int) -> None:
        """Ends a worker, whatever it is at. on_exited follows."""
        try:
            self._socket.send(CONTROL.pack(KILL, number, 0))
        except OSError:  # it does not read: then it is of no use
            self.end()

    def end(self) -> None:
        """Ends the process and every worker. on_lost follows, if the loop still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Ends it for good. For when the watcher has stopped."""
        self._ended = True
        self.end()
        if self._process is not None:
            self._process.wait()
        self._socket.close()
        self._child_socket.close()

    # -- the watcher's thread -----------------------------------------------------------------------------------------

    def _start(self, tokenizer_json: str, options: Options) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file, self._child_socket as its:
            file.write(tokenizer_json)
            file.flush()
            file.seek(0)
            told = replace(options, control_fd=its.fileno(), tokenizer_fd=file.fileno())
            environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            with contextlib.suppress(OSError):  # no process, no memory: the socket's end says so
                self._process = subprocess.Popen(  # noqa: S603 - our own program
                    [sys.executable, "-P", "-m", "engine.sampling.grammar_server", told.to_json()],
                    pass_fds=(its.fileno(), file.fileno()),
                    env=environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )

    # -- the loop's thread --------------------------------------------------------------------------------------------

    def lose(self) -> None:
        """It has ended, or is of no use: ends it and every worker, and calls on_lost, once."""
        if self._ended:
            return
        self._ended = True
        self.end()
        if self._process is not None:
            self._process.wait()
        self._watcher.close_socket(self._socket)
        self._on_lost()

    def _watch(self) -> None:
        self._watcher.watch(self._socket, self._read)

    def _read(self) -> None:
        if self._ended:
            return None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return self._watch()
        except OSError:
            data = b""
        self._buffer += data
        while len(self._buffer) >= CONTROL.size and not self._ended:
            kind, number, ended = CONTROL.unpack_from(self._buffer)
            size = CONTROL.size + (number if kind == FAILED else 0)
            if len(self._buffer) < size:
                break
            text = self._buffer[CONTROL.size : size].decode()
            del self._buffer[:size]
            if kind == EXITED:
                self._on_exited(number, ended)
            else:
                self._on_ready(None if kind == READY else text)
        return self._watch() if data else self.lose()


Call = Callable[[], object]


class SocketWatcher:
    """post  brings a call to the loop's thread"""

    def __init__(self, post: Callable[[Call], object]) -> None:
        self._post = post
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grammar-watcher", daemon=True)
        self._thread.start()

    def run(self, task: Call) -> None:
        """Runs it on this thread."""
        self._loop.call_soon_threadsafe(task)

    def watch(self, sock: socket.socket | Connection, call: Call) -> None:
        """Posts the call once, when the socket can be read."""
        self.run(lambda: self._register(sock, call))

    def call_at(self, deadline_s: float, call: Call) -> None:
        """Posts the call at a time of the monotonic clock, unless it is stopped before."""
        self.run(lambda: self._loop.call_at(deadline_s, self._post, call))

    def close_socket(self, sock: socket.socket | Connection) -> None:
        """Forgets it first: its number may be another socket's at once."""
        self.run(lambda: self._forget(sock))

    def stop(self) -> None:
        """Ends the thread after the tasks that it was given."""
        self.run(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _register(self, sock: socket.socket | Connection, call: Call) -> None:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            self._loop.add_reader(number := sock.fileno(), self._ready, number, call)

    def _ready(self, number: int, call: Call) -> None:
        self._loop.remove_reader(number)
        self._post(call)

    def _forget(self, sock: socket.socket | Connection) -> None:
        with contextlib.suppress(OSError):
            self._loop.remove_reader(sock.fileno())
            sock.close()
