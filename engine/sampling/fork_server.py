"""The engine's end of the fork server: a process that has the tokeniser and forks a worker for each grammar.

It ends with the thread that started it, which is the main one or the loop's. No call waits for it but those that end
it. engine/sampling/grammar_server.py is the program, engine/sampling/grammar_pool.py asks for workers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
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
    All are called by `pump`, the last one by `lose`, too.
    """

    def __init__(
        self,
        *,
        on_ready: Callable[[str | None], object],
        on_exited: Callable[[int, int], object],
        on_lost: Callable[[], object],
    ) -> None:
        self._on_ready = on_ready
        self._on_exited = on_exited
        self._on_lost = on_lost
        self.socket, self._child_socket = socket.socketpair()
        self.socket.setblocking(False)
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()
        self._ended = False

    def start(self, tokenizer_json: str, options: Options) -> None:
        """Does not wait until it has begun. One that cannot be started is lost when `pump` looks."""
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

    def spawn(self, number: int) -> Connection:
        """A new worker. Raises OSError: ConnectionError when this server has ended,
        BlockingIOError when it reads nothing."""
        own, its = socket.socketpair()
        try:
            socket.send_fds(self.socket, [CONTROL.pack(SPAWN, number, 0)], [its.fileno()])
        except OSError:
            own.close()
            raise
        finally:
            its.close()
        return connect(own)

    def kill(self, number: int) -> None:
        """Ends a worker, whatever it is at. on_exited follows."""
        try:
            self.socket.send(CONTROL.pack(KILL, number, 0))
        except OSError:  # it does not read: then it is of no use
            self.end()

    def end(self) -> None:
        """Ends the process and every worker. on_lost follows."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Ends it for good, without a call of on_lost."""
        self._ended = True
        self.end()
        if self._process is not None:
            self._process.wait()
        self.socket.close()

    def lose(self) -> None:
        """It has ended, or is of no use: ends it and every worker, and calls on_lost, once."""
        if not self._ended:
            self.close()
            self._on_lost()

    def pump(self) -> None:
        """Reads what is there."""
        while not self._ended:
            try:
                data = self.socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._buffer += data
            self._take()
            if not data:
                self.lose()

    def _take(self) -> None:
        while len(self._buffer) >= CONTROL.size and not self._ended:
            kind, number, ended = CONTROL.unpack_from(self._buffer)
            size = CONTROL.size + (number if kind == FAILED else 0)
            if len(self._buffer) < size:
                return
            text = self._buffer[CONTROL.size : size].decode()
            del self._buffer[:size]
            if kind == EXITED:
                self._on_exited(number, ended)
            else:
                self._on_ready(None if kind == READY else text)
