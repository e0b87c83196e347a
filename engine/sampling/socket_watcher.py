"""A thread that says when a socket can be read or written, so that the engine's loop need not wait for one.

It reads and writes nothing itself. Each socket is looked at until it is ready once; who is told reads, and asks again.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable

Call = Callable[[], object]


class SocketWatcher:
    """post  brings a call to the loop's thread"""

    def __init__(self, post: Callable[[Call], object]) -> None:
        self._post = post
        self._tasks: deque[Call] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="grammar-watcher", daemon=True)
        self._thread.start()

    def run(self, task: Call) -> None:
        """Runs it on this thread."""
        self._tasks.append(task)
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            self._wake.send(b"x")

    def watch(self, sock: socket.socket, call: Call, *, write: bool = False) -> None:
        """Posts the call once, when the socket can be read, or written if that is asked for, too."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        self.run(lambda: self._register(sock, events, call))

    def close_socket(self, sock: socket.socket) -> None:
        """Forgets it first: its number may be another socket's at once."""
        self.run(lambda: self._forget(sock))

    def stop(self) -> None:
        """Ends the thread after the task that it is at."""
        self._stopping = True
        self.run(lambda: None)
        self._thread.join()
        for task in self._tasks:  # sockets that are to be closed
            task()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _register(self, sock: socket.socket, events: int, call: Call) -> None:
        if sock.fileno() < 0:
            return
        try:
            self._selector.register(sock, events, call)
        except KeyError:
            self._selector.modify(sock, events, call)

    def _forget(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()

    def _main(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                else:
                    self._selector.unregister(key.fileobj)
                    self._post(key.data)
            while self._tasks and not self._stopping:
                self._tasks.popleft()()
