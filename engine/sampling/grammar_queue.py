"""Where new sequences wait while their grammars are compiled, so that nobody else waits for it.

Compiling takes milliseconds, for the hardest schemas a second, on a thread of its own; a grammar that is compiled
already is found at once. Used by the loop's thread alone, but for what the compiling thread does; engine/intake.py is
the neighbour.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from engine.protocol import Grammar
from engine.sampling.grammar import GrammarError, Grammars, Matcher

log = logging.getLogger(__name__)

Deliver = Callable[[Matcher | GrammarError], object]


class GrammarQueue:
    """Compiles one grammar after the other, in the order in which they came."""

    def __init__(self, load: Callable[[], Grammars], *, max_waiting: int) -> None:
        """
        load         called once, on the compiling thread; may take a second, and may raise GrammarError
        max_waiting  sequences that wait for their grammars
        """
        self._load = load
        self._max_waiting = max_waiting
        self._grammars: Grammars | GrammarError | None = None  # None before it is loaded
        self._waiting: dict[tuple[str, int], Deliver] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._post: Callable[[Callable[[], object]], object] = lambda call: call()

    def start(self, post: Callable[[Callable[[], object]], None]) -> None:
        """Begins to load. `post` brings a call to the loop's thread. Once."""
        self._post = post
        self._executor.submit(self._loaded)

    def find(self, grammar: Grammar) -> Matcher | None:
        """A new matcher, when the grammar is compiled already."""
        return self._grammars.find(grammar) if isinstance(self._grammars, Grammars) else None

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._max_waiting

    def put(self, owner: str, seq: int, grammar: Grammar, deliver: Deliver) -> None:
        """Compiles; `deliver` gets the matcher, or why there is none, on the loop's thread, unless it is dropped."""
        assert (owner, seq) not in self._waiting, "this sequence waits already"
        self._waiting[owner, seq] = deliver
        future = self._executor.submit(self._compile, owner, seq, grammar)
        future.add_done_callback(lambda done: self._post(partial(self._done, owner, seq, done)))

    def __contains__(self, sequence: tuple[str, int]) -> bool:
        return sequence in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def drop(self, owner: str, seq: int) -> bool:
        """Nobody waits for this one any more. False when it does not wait."""
        return self._waiting.pop((owner, seq), None) is not None

    def drop_owner(self, owner: str) -> None:
        """As `drop`, for everything that an owner sent."""
        for key in [key for key in self._waiting if key[0] == owner]:
            del self._waiting[key]

    def drop_all(self) -> list[tuple[str, int]]:
        """As `drop`, for all. Returns who waited."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def close(self) -> None:
        """Ends the thread after what it compiles now."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    # -- the compiling thread -----------------------------------------------------------------------------------------

    def _loaded(self) -> Grammars | GrammarError:
        if self._grammars is None:
            try:
                self._grammars = self._load()
            except GrammarError as error:
                log.warning("structured output is not possible with this model: %s", error.reason)
                self._grammars = error
        return self._grammars

    def _compile(self, owner: str, seq: int, grammar: Grammar) -> Matcher:
        if (owner, seq) not in self._waiting:
            raise GrammarError("", "nobody waits for it")
        grammars = self._loaded()
        if isinstance(grammars, GrammarError):
            raise grammars
        return grammars.compile(grammar)

    # -- the loop's thread again --------------------------------------------------------------------------------------

    def _done(self, owner: str, seq: int, future: Future[Matcher]) -> None:
        deliver = self._waiting.pop((owner, seq), None)
        if deliver is None or future.cancelled():
            return
        error = future.exception()
        if error is None:
            deliver(future.result())
        elif isinstance(error, GrammarError):
            deliver(error)
        else:
            log.error("a grammar could not be compiled", exc_info=error)
            deliver(GrammarError("", f"it could not be compiled ({type(error).__name__})"))
