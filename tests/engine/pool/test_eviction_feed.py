"""What the live engine tells an eviction policy of its requests, against what a policy that notes all of it heard."""

from __future__ import annotations

from collections.abc import Sequence

from engine.pool.eviction import LeastRecentlyUsed, Origin
from tests.fakes.scheduler_bench import SIZE, make, prompt


class Notes(LeastRecentlyUsed):
    """Least recently used, and everything it was told."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.begun: list[tuple[Origin, int, int]] = []  # blocks reused, blocks of the prompt
        self.stored: dict[int, Origin | None] = {}
        self.touched: list[tuple[int, int | None]] = []  # block, the answer's length as known then
        self.times: list[float] = []

    def advance(self, now: float) -> None:
        self.times.append(now)

    def begin(self, origin: Origin, reused: Sequence[int], digests: Sequence[bytes]) -> None:
        self.begun.append((origin, len(reused), len(digests)))

    def store(self, block: int, parent: int, digest: bytes, origin: Origin | None) -> None:
        self.stored[block] = origin

    def touch(self, block: int) -> None:
        super().touch(block)
        origin = self.stored[block]
        self.touched.append((block, origin.output_tokens if origin else -1))


def test_a_request_is_introduced_before_it_stores_and_its_answer_is_known_when_it_lets_go() -> None:
    notes = Notes(64)
    bench = make(policy=notes)
    bench.submit(1, prompt(5 * SIZE), max_tokens=2 * SIZE)
    bench.finish()
    ((origin, reused, total),) = notes.begun
    assert (origin.prompt_tokens, reused, total) == (5 * SIZE, 0, 5)
    assert origin.output_tokens == len(bench.answer(1))
    assert {id(each) for each in notes.stored.values()} == {id(origin)}
    assert notes.touched
    assert all(known == origin.output_tokens for _, known in notes.touched)


def test_what_a_later_request_reuses_is_told_with_its_own_origin() -> None:
    notes = Notes(64)
    bench = make(policy=notes)
    bench.submit(1, prompt(5 * SIZE))
    bench.finish()
    bench.submit(2, prompt(8 * SIZE))
    bench.finish()
    (first, _, _), (second, reused, total) = notes.begun
    assert first is not second
    assert (reused, total) == (5, 8)


def test_a_preempted_request_begins_again_with_the_same_origin() -> None:
    notes = Notes(9)
    bench = make(9, policy=notes)
    for seq in range(3):
        bench.submit(seq, prompt(2 * SIZE, start=seq), max_tokens=4 * SIZE)
    bench.finish()
    assert bench.scheduler.counters.preemptions
    origins = [origin for origin, _, _ in notes.begun]
    assert len(origins) > len({id(origin) for origin in origins}) == 3


def test_time_never_goes_back() -> None:
    notes = Notes(64)
    bench = make(policy=notes)
    for seq in range(3):
        bench.submit(seq, prompt(5 * SIZE, start=seq))
    bench.finish()
    assert notes.times == sorted(notes.times)
    assert notes.times
