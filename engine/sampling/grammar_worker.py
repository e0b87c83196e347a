"""The engine's end of one worker process: a compiled grammar, the sequences that follow it, and their masks in a step.

No call waits: the worker reads when something is sent to it, and answers are read when they are there.
engine/sampling/grammar_server.py is the other end, engine/sampling/grammar_pool.py decides which workers there are.

A mask depends on the tokens that were sampled already and not on the step that is being computed. So the masks of a
step are asked for before the model computes, and taken when the logits are there (`StepMasks`); the workers compute
them meanwhile. A mask that is late keeps its sequence out of the step and no other. Used by the loop's thread alone.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from engine.protocol import Grammar, Lane
from engine.sampling.grammar_frames import COMPILED, FORGET, NUMBER, REFUSED, ROW, ROW_ASKED
from engine.sequence import MASK_LATE, NO_TOKEN, Sequence

if TYPE_CHECKING:
    from engine.sampling.grammar_pool import GrammarPool

QUICK_MICROS: Final = 1_000
"""A mask that takes less comes while the model computes a step."""
LEAST_PENALTY: Final = 16
MOST_PENALTY: Final = 4_096
"""So many quick masks in a row until a worker whose mask was late is waited for again; twice as many each time."""
MAX_CRASHES: Final = 2
"""A sequence that was waiting for its mask so often when its worker ended is ended itself."""


@dataclass(frozen=True)
class Refusal:
    """Why a grammar is not compiled. `path` leads to the reason inside of it; None where it is not the grammar's fault:
    then it may work later, or on another engine."""

    path: str | None
    reason: str


class GrammarWorker:
    """
    number  of the process, for the fork server
    late_s  monotonic second at which its grammar should be compiled
    slow    whether no step waits for its masks: its sequences are in a step when their masks are here
    """

    def __init__(
        self, number: int, grammar: Grammar, tenant: str, salt: str, connection: Connection, late_s: float
    ) -> None:
        self.number, self.late_s = number, late_s
        self.key = (salt, grammar)
        self.tenant = tenant
        self.connection = connection
        self.slow = False
        self.ended = False  # the process is gone, or about to be
        self.start_bits: bytes | None = None  # None before the grammar is compiled
        self.refusal: Refusal | None = None
        self.grown_bytes = 0
        self.matchers: dict[int, Matcher] = {}
        self._unsent = bytearray()  # rows, for when those that were sent are answered
        self._num_unsent = self._num_unanswered = 0
        self._quick_rows, self._penalty = 0, LEAST_PENALTY // 2

    @property
    def compiles(self) -> bool:
        """Whether its grammar is not compiled yet, nor refused."""
        return self.start_bits is None and self.refusal is None

    @property
    def waited_for(self) -> bool:
        """Whether an answer is to come."""
        return self.compiles or self._num_unanswered > 0

    def ask(self, row: bytes) -> None:
        """Adds a row to what is sent next. See `flush`."""
        self._unsent += row
        self._num_unsent += 1

    def flush(self) -> None:
        """Sends the rows, if all before them are answered; else they follow by themselves."""
        if self._num_unsent and not self._num_unanswered:
            self._num_unanswered, self._num_unsent = self._num_unsent, 0
            rows, self._unsent = self._unsent, bytearray()
            self._send(rows)

    def pump(self) -> None:
        """Reads what is there, and hands it to those whom it is for."""
        try:
            while not self.ended and self.connection.poll():
                self._take(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.ended = True

    def _send(self, message: bytes | bytearray) -> None:
        try:
            if not self.ended:
                self.connection.send_bytes(message)
        except OSError:
            self.ended = True

    def be_late(self) -> None:
        """A step has waited for a mask in vain, or would have."""
        if not self.slow:
            self.slow, self._quick_rows = True, 0
            self._penalty = min(2 * self._penalty, MOST_PENALTY)

    def drop(self, matcher: Matcher) -> None:
        """A sequence has ended."""
        if self.matchers.pop(matcher.number, None) is not None and matcher.was_asked:
            self._unsent += ROW_ASKED.pack(matcher.number, FORGET)

    def _take(self, message: bytes) -> None:
        if not message:
            _, grammar = self.key
            self._send(json.dumps({"kind": grammar.kind, "text": grammar.text}).encode())
        elif self.start_bits is not None:
            self._take_rows(message, self.start_bits)
        elif message.startswith(REFUSED):
            path, reason = json.loads(message[1:])
            self.refusal = Refusal(path, reason)
        else:
            assert message.startswith(COMPILED), "a worker compiles before all else"
            self.grown_bytes = NUMBER.unpack_from(message, 1)[0] << 10
            self.start_bits = message[1 + NUMBER.size :]

    def _take_rows(self, message: bytes, start_bits: bytes) -> None:
        self.grown_bytes, place = NUMBER.unpack_from(message)[0] << 10, NUMBER.size
        while place < len(message):
            number, micros, alive = ROW.unpack_from(message, place)
            place += ROW.size
            bits = message[place : place + len(start_bits)] if alive else None
            place += len(start_bits) if alive else 0
            self._num_unanswered -= 1
            self._quick_rows = self._quick_rows + 1 if micros < QUICK_MICROS else 0
            if number in self.matchers:
                self.matchers[number].take(bits)
        if self.slow and self._quick_rows >= self._penalty:
            self.slow = False
        self.flush()


class Matcher:
    """Where one sequence is in its grammar: what its worker was told, and the mask that came back. It is made when the
    sequence arrives, before the grammar is compiled, and closed when the sequence ends.

    on_ready  called when the grammar is compiled, or with why it is not
    failure   why the sequence cannot go on
    """

    def __init__(self, pool: GrammarPool, number: int, grammar: Grammar, tenant: str, salt: str, lane: Lane) -> None:
        self.number = number
        self.grammar = grammar
        self.tenant = tenant
        self.salt = salt
        self.lane = lane
        self.failure: Refusal | None = None
        self.worker: GrammarWorker | None = None
        self.on_ready: Callable[[Refusal | None], object] = self._compiled_again
        self._pool = pool
        self._num_sent = 0  # generated tokens that the worker knows of
        self._asked: int | None = None  # generated tokens that the mask follows which was asked for
        self._found: int | None = None  # the same, of the mask that is here
        self._bits: bytes | None = None
        self._crashes = 0

    @property
    def waits(self) -> bool:
        """Whether a mask was asked for that is not here."""
        return self._asked is not None

    @property
    def was_asked(self) -> bool:
        """Whether its worker has a state of it."""
        return self._num_sent > 0

    def join(self, worker: GrammarWorker) -> None:
        """Its grammar is compiled there."""
        self.worker, self._num_sent, self._asked = worker, 0, None
        if self._found is None:
            self._found, self._bits = 0, worker.start_bits
        worker.matchers[self.number] = self

    def lose(self, reason: str | None) -> None:
        """Its worker has ended. `reason` is why, where the grammar may be to blame."""
        self.worker = None
        if self.waits and reason is not None:
            self._crashes += 1
            if self._crashes == MAX_CRASHES:
                self.failure = Refusal("", reason)
        self._asked = None

    def prepare(self, tokens: array[int], num_prompt: int) -> bool:
        """Whether the sequence may be in the next step: its mask is here, or is quick enough to come with the step.
        If not, it is on its way now."""
        count = len(tokens) - num_prompt
        if self._found == count or self.failure is not None:
            return True
        if self.worker is None:
            self._pool.compile(self)
        worker = self.worker
        if worker is None:
            return self.failure is not None
        if worker.ended or self.waits:
            return False
        if not worker.slow:
            return True
        worker.ask(self.ask(tokens, num_prompt))
        worker.flush()
        return False

    def ask(self, tokens: array[int], num_prompt: int) -> bytes:
        """What is to be sent to its worker for its next mask."""
        fresh = tokens[num_prompt + self._num_sent :]
        self._num_sent = self._asked = len(tokens) - num_prompt
        return ROW_ASKED.pack(self.number, len(fresh)) + fresh.tobytes()

    def take(self, bits: bytes | None) -> None:
        """The mask that was asked for; None when nothing may come."""
        self._found, self._asked, self._bits = self._asked, None, bits
        if bits is None:
            self.failure = self.failure or Refusal("", "it became too complex to go on with")

    def find(self, count: int) -> bytes | None:
        """The mask behind so many generated tokens, if it is here."""
        return self._bits if self._found == count else None

    def compile(self, on_ready: Callable[[Refusal | None], object]) -> None:
        """Calls `on_ready` when the grammar is compiled, or with why it is not; perhaps at once."""

        def once(refusal: Refusal | None) -> None:
            self.on_ready = self._compiled_again
            on_ready(refusal)

        self.on_ready = once
        self._pool.compile(self)

    def close(self) -> None:
        """The sequence has ended: nobody is called any more."""
        self._pool.drop(self)

    def _compiled_again(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            self.failure = refusal


WAIT_S: Final = 0.01
"""A step waits so long for masks behind its logits, or as long as it took so far; and then for those of the same
grammar not again until they have been quick for some time."""

Mask = npt.NDArray[np.bool_]
Masks = dict[int, Mask | int]
"""Row -> (vocab_size,) bool, which tokens may come next; NO_TOKEN where the grammar has failed, MASK_LATE where the
mask is not here. Free rows are missing."""


class StepMasks:
    """`begin` and `take` in turn, from the thread that runs the model."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[tuple[int, Matcher, int]] = []  # row, matcher, generated tokens
        self._began_s = 0.0

    def begin(self, sequences: Seq[Sequence]) -> None:
        """Asks for the masks of those that have a grammar. Waits for nothing."""
        self._rows = []
        asked = set[GrammarWorker]()
        for row, s in enumerate(sequences):
            matcher = s.matcher
            if matcher is None:
                continue
            self._rows.append((row, matcher, s.num_generated))
            worker = matcher.worker
            here = matcher.find(s.num_generated) is not None or matcher.failure is not None
            if worker is not None and not worker.ended and not here and not matcher.waits:
                worker.ask(matcher.ask(s.tokens, s.num_prompt))
                asked.add(worker)
        for worker in asked:
            worker.flush()
        self._began_s = time.perf_counter()

    def take(self) -> Masks:
        """The masks. Waits WAIT_S for them, or as long as it is since `begin`."""
        rows, self._rows = self._rows, []
        if not rows:
            return {}
        self._wait(rows)
        return {row: self._mask(matcher, count) for row, matcher, count in rows}

    def _wait(self, rows: list[tuple[int, Matcher, int]]) -> None:
        now_s = time.perf_counter()
        limit_s = now_s + max(WAIT_S, now_s - self._began_s)
        while waiting := _read(rows):
            left_s = limit_s - time.perf_counter()
            if left_s <= 0 or all(worker.slow for worker in waiting):
                break
            wait([worker.connection for worker in waiting], left_s)
        for worker in waiting:
            worker.be_late()

    def _mask(self, matcher: Matcher, count: int) -> Mask | int:
        bits = matcher.find(count)
        if matcher.failure is not None:
            return NO_TOKEN
        if bits is None:
            return MASK_LATE
        found = np.unpackbits(np.frombuffer(bits, np.uint8), count=self._vocab_size, bitorder="little")
        return found.view(np.bool_)


def _read(rows: list[tuple[int, Matcher, int]]) -> set[GrammarWorker]:
    """Takes the masks that are here. Returns the workers of those that are not."""
    for worker in _waited_for(rows):
        worker.pump()
    return _waited_for(rows)


def _waited_for(rows: list[tuple[int, Matcher, int]]) -> set[GrammarWorker]:
    return {one.worker for _, one, _ in rows if one.waits and one.worker is not None and not one.worker.ended}
