"""Kills gateway, engine and Redis at random, with SIGKILL, while a batch runs: each line has to end with exactly one
result, no file may be there that nobody asked for, and no job may be stuck.

    python -m tests.chaos.batch [--lines 2000] [--kills 30] [--seed 1] [--max-tokens 4]

Processes are real ones: `kvasir serve` with the demo model. Something is killed each time that another share of the
lines is done, so that all kills meet a job that runs. A gateway that is killed takes its engine with it; its Redis goes
on and is ended by the next one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from tests.fakes.server import Server

FLAGS = (
    *("--kv-cache-bytes", str(64 << 20), "--dtype", "float32"),
    *("--batches-lease-s", "2", "--batches-max-attempts", "50"),
)
LOOK_S = 0.1
STUCK_S = 180.0
"""Without a line more that is done, a job is stuck."""

WHAT = ("gateway", "engine", "redis")


@dataclass
class Outcome:
    """What the job came to."""

    batch: Any
    results: Counter[str]
    succeeded: int
    files: set[str]
    left_on_disk: list[str]
    kills: Counter[str] = field(default_factory=Counter)
    took_s: float = 0.0


class Chaos:
    """One job on one data folder, and whoever serves it at the moment."""

    def __init__(self, data_dir: Path, *, lines: int, kills: int, seed: int, max_tokens: int) -> None:
        self._data_dir = data_dir
        self._lines = lines
        self._dice = random.Random(seed)
        self._max_tokens = max_tokens
        # Each of the three is among the kills as often as the others, in a random order.
        self._order = [WHAT[number % len(WHAT)] for number in range(kills)]
        self._dice.shuffle(self._order)
        self._kills: Counter[str] = Counter()
        self._server = Server(data_dir, *FLAGS)
        self._pause = threading.Event()

    def run(self) -> Outcome:
        """Returns when the job has ended. Raises TimeoutError when it is stuck."""
        began_s = time.monotonic()
        self._server.__enter__()
        try:
            batch_id, input_id = self._submit()
            for number, what in enumerate(self._order, 1):
                self._wait(batch_id, number * self._lines // (len(self._order) + 1))
                self._kill(what)
            batch = self._wait(batch_id, self._lines + 1)
            outcome = self._collect(batch, input_id)
        finally:
            self._server.__exit__()
        outcome.kills, outcome.took_s = self._kills, time.monotonic() - began_s
        return outcome

    def _submit(self) -> tuple[str, str]:
        client = self._server.client()
        rows = b"".join(json.dumps(self._row(number)).encode() + b"\n" for number in range(self._lines))
        stored = client.files.create(file=("in.jsonl", rows), purpose="batch")
        batch = client.batches.create(input_file_id=stored.id, endpoint="/v1/chat/completions", completion_window="24h")
        return batch.id, stored.id

    def _row(self, number: int) -> dict[str, Any]:
        document = f"Document {self._dice.randrange(20)}. The sea was calm and the ships lay in the harbour. " * 5
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": f"{document} Question {number}?"}],
            "max_tokens": self._max_tokens,
        }
        return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}

    def _wait(self, batch_id: str, done: int) -> Any:
        """The batch, when so many lines are done or it has ended."""
        last, give_up_s = -1, time.monotonic() + STUCK_S
        while time.monotonic() < give_up_s:
            try:
                batch = self._server.client().batches.retrieve(batch_id)
            except openai.APIError:  # whoever was killed is not back yet
                self._pause.wait(LOOK_S)
                continue
            counts = batch.request_counts
            now_done = 0 if counts is None else counts.completed + counts.failed
            if now_done >= done or batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            if now_done > last:
                last, give_up_s = now_done, time.monotonic() + STUCK_S
            self._pause.wait(LOOK_S)
        raise TimeoutError(f"stuck with {last} lines done; the server printed:\n" + "\n".join(self._server.lines[-50:]))

    def _kill(self, what: str) -> None:
        if what == "gateway":
            self._server.process.kill()
            self._server.__exit__()
            self._server = Server(self._data_dir, *FLAGS)
            self._server.__enter__()
        else:
            pids = self._server.children({"engine": "engine", "redis": "unixsocket"}[what])
            for pid in pids[:1]:  # none while it is being started again
                os.kill(pid, signal.SIGKILL)
            if not pids:
                return
        self._kills[what] += 1

    def _collect(self, batch: Any, input_id: str) -> Outcome:
        client = self._server.client()
        rows = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                rows += [json.loads(row) for row in client.files.content(file_id).text.splitlines()]
        told = {input_id, batch.output_file_id, batch.error_file_id} - {None}
        folder = self._data_dir / "batches"

        def cleaned() -> bool:
            return not [path for path in folder.rglob("*") if path.is_file()]

        self._server.wait_until(cleaned, "the job's folder is empty")
        return Outcome(
            batch=batch,
            results=Counter(row["custom_id"] for row in rows),
            succeeded=sum((row["response"] or {}).get("status_code") == 200 for row in rows),
            files={stored.id for stored in client.files.list()} - told,
            left_on_disk=sorted(str(path) for path in (self._data_dir / "files").rglob("*.part")),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvasir-chaos-") as folder:
        chaos = Chaos(Path(folder), lines=args.lines, kills=args.kills, seed=args.seed, max_tokens=args.max_tokens)
        outcome = chaos.run()
    twice = {name: count for name, count in outcome.results.items() if count != 1}
    print(f"killed       {dict(outcome.kills)} in {outcome.took_s:.0f} s")
    print(f"job          {outcome.batch.status}, {outcome.batch.request_counts}")
    print(f"results      {len(outcome.results)} of {args.lines} lines, {outcome.succeeded} of them answers")
    print(f"twice        {twice or 'none'}")
    print(f"orphan files {sorted(outcome.files) + outcome.left_on_disk or 'none'}")


if __name__ == "__main__":
    main()
