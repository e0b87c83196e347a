"""Sends what one tenant should not be able to hurt others with, and measures what another tenant notices.

    python -m tests.chaos.attacks [--tree PATH] [--only TEXT] [--fuzz 50] [--seed 1] [--seconds 20]

A gateway in a process of its own (of the tree at PATH, so that an older commit can be compared), in front of an engine
without a model, so that what is slow is the gateway. While each attack is sent, again and again for a moment, another
tenant asks for /health/liveness and for a small chat, one after the other. A row is printed for each:

    stop      the longest that liveness took, in ms: about as long as the event loop stood still
    p99       of the small chats, in ms
    peak      MiB of memory of the gateway, above what it had before the attack
    statuses  what the attacker got

Bounded: loopback only, one attack at a time, `--seconds` for each. More attacks are more entries of ATTACKS: a name and
a function that makes a path and a body.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

MIB: Final = 1 << 20
MOST: Final = 31 * MIB
"""Bytes of a body, below server.max_body_bytes."""

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
"""
HEADERS: Final = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
SMALL: Final = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()

CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
GENERATE, EMBEDDINGS = "/v1beta/models/demo:generateContent", "/v1/embeddings"
MESSAGE_BATCHES = "/v1/messages/batches"


LIMIT_S: Final = 60.0
"""That another tenant waits for an answer."""
HURT_MS: Final = 2000.0
"""A gateway that stood still for so long is started again, so that the next attack is measured by itself."""


LOG_CHARS: Final = 8000
"""Of the log of a gateway that died or failed, that are shown."""
QUIET: Final = "(a small chat)"
"""What is measured first, of each gateway."""


class Sent(NamedTuple):
    """One request of the attacker."""

    path: str
    body: bytes
    compressed: bool = False
    at_once: int = 1


@dataclass
class Seen:
    """What became of one attack."""

    stop_ms: float = 0.0
    p99_ms: float = 0.0
    peak_mib: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    died: bool = False


# -- what is sent -----------------------------------------------------------------------------------------------------


def repeat(one: bytes, times: int) -> bytes:
    """An array's inside."""
    return b",".join([one] * times)


def fitting(one: bytes, times: int) -> int:
    return min(times, MOST // (len(one) + 1))


def chat(messages: bytes, more: bytes = b"", path: str = CHATS) -> Sent:
    return Sent(path, b'{"model":"demo","max_tokens":4,"messages":[' + messages + b"]" + more + b"}")


def wrapped(before: bytes, one: bytes, times: int, after: bytes, path: str) -> Sent:
    return Sent(path, before + repeat(one, fitting(one, times)) + after)


def quoted(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


HI: Final = b'{"role":"user","content":"hi"}'
ARRAYS: Final[Mapping[str, tuple[str, bytes, bytes, bytes]]] = {
    "chat messages": (CHATS, b'{"model":"demo","max_tokens":4,"messages":[', b'{"role":"user","content":"a"}', b"]}"),
    "empty objects": (CHATS, b'{"model":"demo","max_tokens":4,"messages":[', b"{}", b"]}"),
    "empty arrays": (CHATS, b'{"model":"demo","max_tokens":4,"messages":[', b"[]", b"]}"),
    "content parts": (
        CHATS,
        b'{"model":"demo","max_tokens":4,"messages":[{"role":"user","content":[',
        b'{"type":"text","text":"a"}',
        b"]}]}",
    ),
    "tool messages": (
        CHATS,
        b'{"model":"demo","max_tokens":4,"messages":[{"role":"assistant","tool_calls":[{"id":"a","type":"function",'
        b'"function":{"name":"f","arguments":"{}"}}]},',
        b'{"role":"tool","tool_call_id":"a","content":"a"}',
        b"]}",
    ),
    "tool calls": (
        CHATS,
        b'{"model":"demo","max_tokens":4,"messages":[' + HI + b',{"role":"assistant","tool_calls":[',
        b'{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}',
        b"]}," + HI + b"]}",
    ),
    "tools": (
        CHATS,
        b'{"model":"demo","max_tokens":4,"messages":[' + HI + b'],"tools":[',
        b'{"type":"function","function":{"name":"f"}}',
        b"]}",
    ),
    "completion prompts": (COMPLETIONS, b'{"model":"demo","max_tokens":4,"prompt":[', b'"a"', b"]}"),
    "completion token ids": (COMPLETIONS, b'{"model":"demo","max_tokens":4,"prompt":[', b"5", b"]}"),
    "response items": (
        RESPONSES,
        b'{"model":"demo","max_output_tokens":16,"input":[',
        b'{"role":"user","content":"a"}',
        b"]}",
    ),
    "response calls": (
        RESPONSES,
        b'{"model":"demo","max_output_tokens":16,"input":[',
        b'{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}',
        b',{"role":"user","content":"a"}]}',
    ),
    "anthropic messages": (MESSAGES, b'{"model":"demo","max_tokens":4,"messages":[', HI, b"]}"),
    "anthropic blocks": (
        MESSAGES,
        b'{"model":"demo","max_tokens":4,"messages":[{"role":"user","content":[',
        b'{"type":"text","text":"a"}',
        b"]}]}",
    ),
    "anthropic system": (
        COUNT,
        b'{"model":"demo","messages":[' + HI + b'],"system":[',
        b'{"type":"text","text":"a"}',
        b"]}",
    ),
    "anthropic stops": (
        MESSAGES,
        b'{"model":"demo","max_tokens":4,"messages":[' + HI + b'],"stop_sequences":[',
        b'"ab"',
        b"]}",
    ),
    "message batch": (
        MESSAGE_BATCHES,
        b'{"requests":[{"custom_id":"a","params":{"model":"demo","max_tokens":4,"messages":[',
        b"{}",
        b"]}}]}",
    ),
    "gemini contents": (GENERATE, b'{"contents":[', b'{"role":"user","parts":[{"text":"a"}]}', b"]}"),
    "gemini parts": (GENERATE, b'{"contents":[{"parts":[', b'{"text":"a"}', b"]}]}"),
    "gemini turns of one role": (GENERATE, b'{"contents":[', b'{"role":"model","parts":[{"text":"ab"}]}', b"]}"),
    "gemini calls": (
        GENERATE,
        b'{"contents":[{"role":"model","parts":[',
        b'{"functionCall":{"name":"f"}}',
        b']},{"role":"user","parts":[{"text":"a"}]}]}',
    ),
    "embeddings": (EMBEDDINGS, b'{"model":"all-minilm-l6-v2","input":[', b'"a"', b"]}"),
    "unknown array": (CHATS, b'{"model":"demo","messages":[' + HI + b'],"nothing":[', b"0", b"]}"),
}
"""Name -> path, what comes before, one element, what comes behind."""

TEXTS: Final[Mapping[str, str]] = {
    "letters": "a",
    "words": "lorem ipsum ",
    "blanks": " ",
    "lines": "\n",
    "digits": "1234567890",
    "special marks": "<|im_end|>",
    "beginnings of marks": "<",
    "quotes": '"',
    "accents": "e\u0301",
    "ideographs": "\u6f22",
    "emoji": "\U0001f600",
}


def long_text(path: str, text: str, num_bytes: int) -> Sent:
    """One text of so many bytes."""
    one = len(quoted(text)) - 2
    said = quoted(text * max(1, min(num_bytes, MOST) // one))
    if path == COMPLETIONS:
        return Sent(path, b'{"model":"demo","max_tokens":4,"prompt":' + said + b"}")
    if path == RESPONSES:
        return Sent(path, b'{"model":"demo","max_output_tokens":16,"input":' + said + b"}")
    if path == GENERATE:
        return Sent(path, b'{"contents":[{"parts":[{"text":' + said + b"}]}]}")
    return chat(b'{"role":"user","content":' + said + b"}", path=path)


def stops(times: int, num_chars: int) -> Sent:
    one = quoted("ab" * (num_chars // 2))
    return chat(HI, b',"n":8,"stop":[' + repeat(one, times) + b"]")


def nested(levels: int, opened: bytes = b"[", closed: bytes = b"]") -> Sent:
    return Sent(CHATS, b'{"model":"demo","messages":' + opened * levels + b"1" + closed * levels + b"}")


def biases(times: int) -> Sent:
    return chat(HI, b',"logit_bias":{' + b",".join(b'"%d":1' % number for number in range(times)) + b"}")


def names(times: int) -> Sent:
    return chat(HI, b',"metadata":{' + b",".join(b'"%d":"a"' % number for number in range(times)) + b"}")


def arguments(times: int, inside: str = "{}") -> Sent:
    """One call whose arguments are a text that is JSON with many values."""
    written = quoted('{"a":[' + ",".join([inside] * times) + "]}")
    call = b'{"id":"a","type":"function","function":{"name":"f","arguments":' + written + b"}}"
    answer = b'{"role":"tool","tool_call_id":"a","content":"a"}'
    return chat(HI + b',{"role":"assistant","tool_calls":[' + call + b"]}," + answer)


def schema_chain(links: int) -> Sent:
    """References that lead from one to the next; the engine has its own limits, this is what the gateway does."""
    chain = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(links)} | {f"d{links}": {"type": "string"}}
    schema = {"$defs": chain, "$ref": "#/$defs/d0"}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return chat(HI, b',"response_format":' + json.dumps(wanted).encode())


def schema_properties(times: int, *, strict: bool = False) -> Sent:
    fields = {f"p{at}": {"type": "string"} for at in range(times)}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
    return chat(HI, b',"response_format":' + json.dumps(wanted).encode())


def grammar(kind: str, text: str) -> Sent:
    return chat(HI, b',"structured_outputs":' + json.dumps({kind: text}).encode())


def gemini_joins(times: int) -> Sent:
    """A large text of the model, and many small ones behind it."""
    first = b'{"role":"model","parts":[{"text":"' + b"a" * (8 * MIB) + b'"}]}'
    others = repeat(b'{"role":"model","parts":[{"text":"a"}]}', times)
    return Sent(GENERATE, b'{"contents":[' + first + b"," + others + b"]}")


def gemini_pairs(times: int) -> Sent:
    calls = repeat(b'{"functionCall":{"name":"f"}}', times)
    last = b'{"functionCall":{"name":"g"}}'
    answers = repeat(b'{"functionResponse":{"name":"g","response":{}}}', times)
    model = b'{"role":"model","parts":[' + calls + b"," + last + b"]}"
    return Sent(GENERATE, b'{"contents":[' + model + b',{"role":"user","parts":[' + answers + b"]}]}")


def of_array(name: str, times: int) -> Sent:
    path, before, one, after = ARRAYS[name]
    return wrapped(before, one, times, after, path)


def compressed(sent: Sent) -> Sent:
    return sent._replace(body=gzip.compress(sent.body, 5), compressed=True)


Make = Callable[[], Sent]

NAMED: Final[dict[str, Make]] = {
    "stop strings: 4 of 7 MB, n = 8, compressed": lambda: compressed(stops(4, 7 * MIB)),
    "900,000 chat messages, compressed": lambda: compressed(of_array("chat messages", 900_000)),
    "600,000 response items, compressed": lambda: compressed(of_array("response items", 600_000)),
    "600,000 gemini contents, compressed": lambda: compressed(of_array("gemini contents", 600_000)),
    "900,000 anthropic blocks, compressed": lambda: compressed(of_array("anthropic blocks", 900_000)),
    "300,000 tool messages, compressed": lambda: compressed(of_array("tool messages", 300_000)),
    "8 million {}, compressed": lambda: compressed(of_array("empty objects", 8_000_000)),
    "1.5 million biases, compressed": lambda: compressed(biases(1_500_000)),
    "a chat of 28 million letters": lambda: long_text(CHATS, "a", 28_000_000),
    "13 million blanks": lambda: long_text(CHATS, " ", 13_000_000),
    "16 bodies of 31 MB at once": lambda: long_text(CHATS, "lorem ipsum ", MOST)._replace(at_once=16),
    "9,000 chat messages": lambda: of_array("chat messages", 9_000),
    "a chain of 1,500 $ref": lambda: schema_chain(1_500),
    "9,000 properties, strict": lambda: schema_properties(9_000, strict=True),
    "10 million values in arguments, compressed": lambda: compressed(arguments(10_000_000)),
    "9,000 texts behind a large one (Gemini)": lambda: gemini_joins(9_000),
    "9,000 calls and answers (Gemini)": lambda: gemini_pairs(9_000),
    "a Lark grammar of 3,500 unit rules": lambda: grammar(
        "grammar", "start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(3_500)) + 'r3500: "a"\n'
    ),
    "a pattern of 100,000 groups": lambda: grammar("regex", "(a|b)" * 100_000),
}


def fuzzed(number: int, seed: int) -> dict[str, Make]:
    """So many more, of random kinds and sizes."""
    dice = random.Random(seed)
    made: dict[str, Make] = {}
    for at in range(number):
        size = round(10 ** dice.uniform(3, 7))
        kind = dice.choice(("array", "array", "array", "text", "text", "stops", "nested", "object", "arguments"))
        make, name = _one(kind, size, dice)
        squeezed = dice.random() < 0.5
        made[f"{at + 1}: {name}{', compressed' if squeezed else ''}"] = (
            (lambda make=make: compressed(make())) if squeezed else make
        )
    return made


def _one(kind: str, size: int, dice: random.Random) -> tuple[Make, str]:
    if kind == "array":
        name = dice.choice(sorted(ARRAYS))
        return lambda: of_array(name, size), f"{size:,} {name}"
    if kind == "text":
        name, path = dice.choice(sorted(TEXTS)), dice.choice((CHATS, COMPLETIONS, RESPONSES, MESSAGES, GENERATE))
        return lambda: long_text(path, TEXTS[name], size), f"{size:,} bytes of {name}, {path}"
    if kind == "stops":
        return lambda: stops(4, size), f"4 stop strings of {size:,}"
    if kind == "nested":
        opened, closed = dice.choice(((b"[", b"]"), (b'{"a":', b"}")))
        return lambda: nested(size, opened, closed), f"{size:,} levels"
    if kind == "object":
        make = dice.choice((biases, names))
        return lambda: make(min(size, 2_000_000)), f"{min(size, 2_000_000):,} {make.__name__}"
    inside = dice.choice(("{}", "[]", "0", '{\\"a\\":1}'.replace("\\", "")))
    return lambda: arguments(min(size, MOST // 8), inside), f"{min(size, MOST // 8):,} values in arguments"


# -- who it is sent to ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def gateway(tree: Path) -> Iterator[tuple[int, int]]:
    """One of that tree, before an engine without a model: its process id, and its port."""
    with tempfile.TemporaryDirectory(prefix="kvasir-attacks-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "kvasir.toml").write_text(CONFIG)
        environ = {**os.environ, "PYTHONPATH": str(tree)}
        engine = f"unix:{folder / 'engine.sock'}"
        model = str(tree / "engine/demo/model")
        fake = ["-m", "tests.fakes.fake_engine", "--listen", engine, "--tokenizer", model, "--tokens-per-step", "4"]
        stack.enter_context(_process([*fake, "--vocab-size", "8192"], tree, environ, folder / "engine.log"))
        ours = ["-m", "gateway.cli", "gateway", "--config", str(folder / "kvasir.toml"), "--port", "0"]
        ours += ["--engine-urls", engine, "--data-dir", str(folder / "data")]
        log = folder / "gateway.log"
        process = stack.enter_context(_process(ours, tree, environ, log))
        try:
            yield process.pid, _port(process, log)
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


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s and process.poll() is None:
        if found := re.search(r"on http://127\.0\.0\.1:(\d+)", log.read_text()):
            return int(found[1])
        time.sleep(0.1)
    raise RuntimeError(f"the gateway did not start: {log.read_text()[-2000:]}")


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
    sent, seen = make(), Seen()
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
        left_s = begun_s + seconds - time.monotonic()
        if left_s <= 0:
            break
        senders = [
            threading.Thread(target=lambda left_s=left_s: seen.statuses.update([send(port, sent, left_s + 1)]))
            for _ in range(sent.at_once)
        ]
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
    seen.peak_mib = max(peak) - before_mib
    seen.died = memory_mib(pid) == 0.0 or any(probe.failed for probe in probes)
    return seen


def run(attacks: Mapping[str, Make], tree: Path, seconds: float, say: Callable[[str], Any]) -> dict[str, Seen]:
    """All of them against one gateway, which is started again where one killed it."""
    found: dict[str, Seen] = {}
    left = dict(attacks)
    say("| attack | stop ms | p99 ms | peak MiB | statuses |\n| --- | --- | --- | --- | --- |")
    while left:
        with gateway(tree) as (pid, port):
            quiet = found[QUIET] = measure(pid, port, lambda: Sent(CHATS, SMALL), seconds)
            say(f"| {QUIET} | {quiet.stop_ms:.0f} | {quiet.p99_ms:.0f} | {quiet.peak_mib:.0f} | |")
            for name in list(left):
                seen = found[name] = measure(pid, port, left.pop(name), seconds)
                statuses = " ".join(f"{status}x{times}" for status, times in sorted(seen.statuses.items()))
                say(
                    f"| {name} | {seen.stop_ms:.0f} | {seen.p99_ms:.0f} | {seen.peak_mib:.0f} | "
                    f"{statuses}{' DIED' if seen.died else ''} |"
                )
                if memory_mib(pid) == 0.0 or seen.stop_ms > HURT_MS:
                    break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parent.parent.parent)
    parser.add_argument("--only", default="", help="part of the names of the attacks")
    parser.add_argument("--fuzz", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    attacks = {**NAMED, **fuzzed(options.fuzz, options.seed)}
    chosen = {name: make for name, make in attacks.items() if options.only in name}
    found = run(chosen, options.tree.resolve(), options.seconds, lambda line: print(line, flush=True))
    worst = max(found.values(), key=lambda seen: seen.stop_ms)
    died = sum(seen.died for seen in found.values())
    print(f"\n{len(found)} attacks; longest stop {worst.stop_ms:.0f} ms; {died} with failures of others")


if __name__ == "__main__":
    main()
