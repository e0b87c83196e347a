"""A real redis-server for tests and benchmarks, on a socket file, that can be killed and started again."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import redis

from gateway.redis_server import find_binary

START_LIMIT_S = 30.0


class RedisProcess:
    """Context manager. `url` stays the same over `kill` and `start`."""

    def __init__(self, folder: Path, *options: str) -> None:
        """`folder` holds the socket and the data; `options` are redis-server's own, as in `--maxmemory 1mb`."""
        self.socket = folder / "r.sock"
        self.url = f"unix://{self.socket}"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisProcess:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        """Returns when it answers. Raises TimeoutError when it does not."""
        command = [str(find_binary()), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self._folder)]
        command += ["--save", "", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        tick = threading.Event()
        for _ in range(int(START_LIMIT_S / 0.01)):
            try:
                with redis.Redis(unix_socket_path=str(self.socket)) as client:
                    client.ping()
                return
            except redis.RedisError:
                tick.wait(0.01)
        raise TimeoutError("redis-server does not answer")

    def kill(self) -> None:
        """As a crash would: nothing is saved, every connection is cut. Returns when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Killed and started again, empty."""
        self.kill()
        self.start()
