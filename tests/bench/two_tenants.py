"""What a backlog of one tenant costs the chats of another: first tokens and whole answers beside long prefills.

    python -m tests.bench.two_tenants [--rounds 3] [--chats 8] [--prompts 64] [--tokens 7950]

The engine's loop with the demo model, without a gateway. One tenant's prompts arrive at once; when the first step with
them has run, another's chats come one after the other. Rounds with the whole budget of a step for prefills and with
SHARED_PREFILL_TOKENS take turns, so that a machine whose speed drifts does not decide. Printed: seconds to first tokens
and to ends of chats, and the tokens that were prefilled in a second meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import statistics
import time
from array import array
from collections import defaultdict
from unittest import mock

from engine import planner
from engine.config import EngineSettings
from engine.loop import EngineLoop
from engine.protocol import Sampling, StepFrame, Submit
from engine.serving import load, make_hello, make_loop

LIMIT_S = 120.0
CHAT_TOKENS, ANSWER_TOKENS = 18, 8
LARGE = 1 << 20
NUMBERS = itertools.count(1)


class Tenants:
    """Submits, and reads what comes back."""

    def __init__(self, loop: EngineLoop, frames: queue.Queue[dict[str, StepFrame]]) -> None:
        self.loop, self.frames = loop, frames

    @property
    def prefilled(self) -> int:
        return int(self.loop.stats()["prefilled_tokens"])

    def submit(self, tenant: str, count: int, max_tokens: int) -> None:
        seq = next(NUMBERS)
        tokens = array("I", (5 + (seq * 7919 + index * 31) % 4000 for index in range(count))).tobytes()
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.loop.submit(tenant, Submit(seq, tokens, b"", sampling, salt=str(seq), tenant=tenant))

    def chat(self) -> tuple[float, float]:
        """Seconds to the first token, and to the end."""
        began_s, first_s = time.monotonic(), 0.0
        self.submit("chats", CHAT_TOKENS, ANSWER_TOKENS)
        while True:
            frame = self.frames.get(timeout=LIMIT_S).get("chats")
            for update in frame.updates if frame else ():
                first_s = first_s or time.monotonic() - began_s
                if update.finish:
                    return first_s, time.monotonic() - began_s


def run_round(args: argparse.Namespace, parts: tuple, shared_tokens: int) -> tuple[list[tuple[float, float]], float]:
    settings, hello, model, runner = parts
    frames: queue.Queue[dict[str, StepFrame]] = queue.Queue()
    with mock.patch.object(planner, "SHARED_PREFILL_TOKENS", shared_tokens):
        loop = make_loop(settings, hello, model.tokenizer, runner, frames.put, lambda events: None)
    loop.start()
    tenants = Tenants(loop, frames)
    tenants.chat()
    before = tenants.prefilled
    for _ in range(args.prompts):
        tenants.submit("backlog", args.tokens, 1)
    while tenants.prefilled == before:
        frames.get(timeout=LIMIT_S)
    before, began_s = tenants.prefilled, time.monotonic()
    chats = [tenants.chat() for _ in range(args.chats)]
    rate = (tenants.prefilled - before) / (time.monotonic() - began_s)
    loop.abort_owner("backlog")
    loop.stop()
    return chats, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, count in (("rounds", 3), ("chats", 8), ("prompts", 64), ("tokens", 7950)):
        parser.add_argument(f"--{name}", type=int, default=count)
    args = parser.parse_args()
    settings = EngineSettings()
    model, runner = load(settings)
    parts = settings, make_hello(settings, model, runner.num_blocks), model, runner
    kinds = {"whole steps": LARGE, "small steps": planner.SHARED_PREFILL_TOKENS}
    chats: dict[str, list[tuple[float, float]]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for kind, shared_tokens in kinds.items():
            found, rate = run_round(args, parts, shared_tokens)
            chats[kind] += found
            rates[kind].append(rate)
    for kind in kinds:
        print(kind)
        for name, values in zip(("first token", "whole answer"), zip(*chats[kind], strict=True), strict=True):
            print(f"  {name}, s: {min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f}")
        print(f"  prefilled: {' '.join(f'{rate:.0f}' for rate in rates[kind])} tokens/s")


if __name__ == "__main__":
    main()
