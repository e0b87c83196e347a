"""A gateway that is attacked, and what another tenant notices of it. attacks.py has what is sent."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

MIB: Final = 1 << 20
HERE: Final = Path(__file__).parent.parent.parent
ATTACKER, OTHER, PROBER = "attacker-key", "another-key-", "prober-key--"
CONFIG: Final = f"""
[[tenants]]
name = "attacker"
keys = ["{ATTACKER}"]
[[tenants]]
name = "other"
keys = ["{OTHER}"]
[server]
log_level = "WARNING"
[response_cache]
upstreams = "on"
"""
UPSTREAM_MODELS: Final = {"openai": "up-1", "anthropic": "up-2", "gemini": "up-3"}
"""By the dialect of their upstream. All are answered by one process."""

HEADERS: Final = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
SMALL: Final = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()

CHATS: Final = "/v1/chat/completions"

LIMIT_S: Final = 60.0
"""That another tenant waits for an answer."""
HURT_MS: Final = 2000.0
"""A gateway that stood still for so long is started again, so that the next attack is measured by itself."""


LOG_CHARS: Final = 8000
"""Of the log of a gateway that died or failed, that are shown."""


class Sent(NamedTuple):
    """One request of the attacker."""

    path: str
    body: bytes
    compressed: bool = False
    at_once: int = 1


Make = Callable[[], Sent | tuple[Sent, ...]]
"""One request, or several that are sent by turns."""


@dataclass
class Seen:
    """What became of one attack."""

    stop_ms: float = 0.0
    own_ms: float | None = None
    p99_ms: float = 0.0
    peak_mib: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    died: bool = False


# -- who it is sent to ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def gateway(tree: Path) -> Iterator[tuple[int, int]]:
    """One of that tree, before an engine without a model: its process id, and its port."""
    with tempfile.TemporaryDirectory(prefix="kvasir-attacks-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        environ = {**os.environ, "PYTHONPATH": str(tree)}
        hosted = ["-m", "tests.chaos.upstream_process"]
        here = {**environ, "PYTHONPATH": str(HERE)}
        upstream = stack.enter_context(_process(hosted, HERE, here, folder / "upstream.log"))
        port = _found(upstream, folder / "upstream.log", r"(\d+)\n")
        (folder / "kvasir.toml").write_text(CONFIG + "".join(_upstream(dialect, port) for dialect in UPSTREAM_MODELS))
        engine = f"unix:{folder / 'engine.sock'}"
        model = str(tree / "engine/demo/model")
        fake = ["-m", "tests.fakes.fake_engine", "--listen", engine, "--tokenizer", model, "--tokens-per-step", "4"]
        stack.enter_context(_process([*fake, "--vocab-size", "8192"], tree, environ, folder / "engine.log"))
        ours = ["-m", "gateway.cli", "gateway", "--config", str(folder / "kvasir.toml"), "--port", "0"]
        ours += ["--engine-urls", engine, "--data-dir", str(folder / "data")]
        log = folder / "gateway.log"
        process = stack.enter_context(_process(ours, tree, environ, log))
        try:
            port = _found(process, log, r"on http://127\.0\.0\.1:(\d+)")
            _joined(port)
            yield process.pid, port
        finally:
            if process.poll() is not None or "Traceback" in log.read_text():
                sys.stderr.write(log.read_text()[-LOG_CHARS:])


@contextlib.contextmanager
def _process(arguments: list[str], tree: Path, environ: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=tree, env=environ, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _upstream(dialect: str, port: int) -> str:
    url = f"http://127.0.0.1:{port}{'/v1' if dialect == 'openai' else ''}"
    told = f'name = "{dialect}"\ndialect = "{dialect}"\nurl = "{url}"\nmodels = ["{UPSTREAM_MODELS[dialect]} = theirs"]'
    return f'[[upstreams]]\n{told}\nhints = ["*"]\nmeter = ["*"]\n'


def _found(process: subprocess.Popen[bytes], log: Path, pattern: str) -> int:
    """The port that it writes into its log."""
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s and process.poll() is None:
        if found := re.search(pattern, log.read_text()):
            return int(found[1])
        time.sleep(0.1)
    raise RuntimeError(f"it did not start: {log.read_text()[-2000:]}")


def _joined(port: int) -> None:
    """Returns when its engine serves."""
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {OTHER}"})
            if b'"demo"' in connection.getresponse().read():
                return
        time.sleep(0.1)
    raise RuntimeError("its engine did not join")


# -- measuring --------------------------------------------------------------------------------------------------------


class Probe(threading.Thread):
    """Asks the same again and again, and notes how long each took, in ms."""

    def __init__(self, port: int, method: str, path: str, body: bytes | None, pause_s: float) -> None:
        super().__init__(daemon=True)
        self.took_ms: list[float] = []
        self.failed = 0
        self._asked = (method, path, body)
        self._port = port
        self._pause_s = pause_s
        self.over = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)
        headers = {**HEADERS, "Authorization": f"Bearer {OTHER}"}
        while not self.over.is_set():
            begun_s = time.perf_counter()
            try:
                connection.request(*self._asked, headers)
                answer = connection.getresponse()
                answer.read()
                self.failed += answer.status != 200
            except OSError:
                self.failed += 1
                connection.close()
            self.took_ms.append((time.perf_counter() - begun_s) * 1e3)
            time.sleep(self._pause_s)
        connection.close()


def memory_mib(pid: int) -> float:
    """Resident now; 0 of a process that is gone."""
    with contextlib.suppress(OSError):
        if found := re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
            return int(found[1]) / 1024
    return 0.0


def own_lags(port: int) -> dict[float, int]:
    """How often the gateway's own event loop was late: the end of a bucket in ms -> so often within it. Empty of a
    commit without this metric, or of a gateway that died."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException):
        return {}
    finally:
        connection.close()
    lines = re.findall(r'^kvasir_event_loop_own_lag_seconds_bucket\{le="(.*)"\} (\S+)$', text, re.MULTILINE)
    ends = [(float(end) * 1e3, int(float(count))) for end, count in lines]
    return {end: count - before for (end, count), (_, before) in zip(ends, [(0.0, 0), *ends], strict=False)}


def _longest_ms(before: dict[float, int], after: dict[float, int]) -> float | None:
    """The end of the last bucket that has more now."""
    return max((end for end, count in after.items() if count > before.get(end, 0)), default=None)


def send(port: int, sent: Sent, timeout_s: float) -> int:
    """The status; 0 where there was none."""
    headers = {**HEADERS, "Authorization": f"Bearer {ATTACKER}", "x-api-key": ATTACKER}
    if sent.compressed:
        headers["Content-Encoding"] = "gzip"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", sent.path, sent.body, headers)
        answer = connection.getresponse()
        while answer.read(1 << 16):
            pass
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def measure(pid: int, port: int, make: Make, seconds: float) -> Seen:
    """Sends it for half a second, at least twice, and at most for `seconds`."""
    made = make()
    turns, seen, own_before = (made,) if isinstance(made, Sent) else made, Seen(), own_lags(port)
    before_mib = memory_mib(pid)
    probes = [Probe(port, "GET", "/health/liveness", None, 0.002), Probe(port, "POST", CHATS, SMALL, 0.002)]
    for probe in probes:
        probe.start()
    peak, over = [before_mib], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            peak.append(memory_mib(pid))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    time.sleep(0.1)
    begun_s = time.monotonic()
    rounds = 0
    while rounds < 2 or time.monotonic() - begun_s < 0.5:
        left_s, sent = begun_s + seconds - time.monotonic(), turns[rounds % len(turns)]
        if left_s <= 0:
            break

        def once(sent: Sent = sent, left_s: float = left_s) -> None:
            seen.statuses.update([send(port, sent, left_s + 1)])

        senders = [threading.Thread(target=once) for _ in range(sent.at_once)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        rounds += 1
    for probe in probes:
        probe.over.set()
    for probe in probes:
        probe.join(LIMIT_S + 1)
    over.set()
    watcher.join()
    liveness, chats = (sorted(probe.took_ms) for probe in probes)
    seen.stop_ms, seen.p99_ms = liveness[-1], chats[min(len(chats) - 1, len(chats) * 99 // 100)]
    seen.own_ms = _longest_ms(own_before, own_lags(port))
    seen.peak_mib = max(peak) - before_mib
    seen.died = memory_mib(pid) == 0.0 or any(probe.failed for probe in probes)
    return seen
