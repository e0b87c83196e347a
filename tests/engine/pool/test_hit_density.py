"""What hit density knows of a block: turns, heads, and that it is remembered after eviction."""

from __future__ import annotations

from engine.pool.eviction import Origin
from engine.pool.hit_density import MAX_TIPS, HitDensity

SIZE = 16


def digest_of(number: int) -> bytes:
    return number.to_bytes(16)


class Driver:
    """Stores and releases prompts, as a pool that has room for everything does."""

    def __init__(self, num_blocks: int = 200) -> None:
        self.policy = HitDensity(num_blocks, SIZE)
        self.blocks: dict[int, int] = {}  # number of a block -> its place

    def ask(self, path: list[int], now: float = 0.0, *, answer: tuple[int, ...] = (), **known: object) -> Origin:
        """A request for a prompt of full blocks, the number of each of which names everything before it too."""
        origin = Origin(prompt_tokens=len(path) * SIZE, **known)  # type: ignore[arg-type]
        reused = [self.blocks[number] for number in path if number in self.blocks]
        self.policy.advance(now)
        self.policy.begin(origin, reused, [digest_of(number) for number in path])
        parent = -1
        for number in (*path, *answer):
            if number not in self.blocks:
                self.blocks[number] = len(self.blocks)
                self.policy.store(self.blocks[number], parent, digest_of(number), origin)
            parent = self.blocks[number]
        origin.output_tokens = origin.output_tokens or 0
        for number in reversed((*path, *answer)):
            self.policy.touch(self.blocks[number])
        return origin

    def evict(self, *numbers: int) -> None:
        for number in numbers:
            del self.blocks[number]

    def class_of(self, number: int) -> int:
        return self.policy._class[self.blocks[number]]


def test_a_turn_is_one_more_than_that_of_the_blocks_it_goes_on_from() -> None:
    driver = Driver()
    assert driver.ask([1, 2]).turn == 1
    second = driver.ask([1, 2, 3, 4])
    assert (second.turn, second.new_tokens) == (2, 2 * SIZE)
    assert driver.ask([1, 2, 3, 4, 5]).turn == 3
    assert driver.ask([8, 9]).turn == 1


def test_a_conversation_is_known_again_after_its_blocks_were_evicted() -> None:
    driver = Driver()
    driver.ask([1, 2, 3])
    driver.evict(1, 2, 3)
    again = driver.ask([1, 2, 3, 4])
    assert (again.turn, again.new_tokens) == (2, SIZE)


def test_a_head_begins_conversations_instead_of_going_on_with_one() -> None:
    driver = Driver()
    driver.ask([1, 2, 3])
    driver.ask([1, 2, 4])
    assert driver.ask([1, 2, 5]).turn == 1
    assert driver.class_of(2) != driver.class_of(3)
    few = driver.class_of(2)
    for number in range(6, 30):
        driver.ask([1, 2, number])
    assert driver.class_of(2) > few  # more hits, another class


def test_the_answer_is_no_other_prompt_that_makes_a_head() -> None:
    """A template that leaves thoughts out of the next turn's prompt makes no head of every turn."""
    driver = Driver()
    driver.ask([1, 2], answer=(100,))
    assert driver.ask([1, 2, 3], answer=(101,)).turn == 2
    assert driver.ask([1, 2, 3, 4], answer=(102,)).turn == 3


def test_a_request_that_was_preempted_is_no_turn_of_its_own() -> None:
    driver = Driver()
    origin = driver.ask([1, 2])
    driver.policy.begin(origin, [driver.blocks[1], driver.blocks[2]], [digest_of(1), digest_of(2)])
    assert origin.turn == 1


def test_the_length_of_the_answer_counts_once_it_is_known() -> None:
    driver = Driver()
    driver.ask([1], output_tokens=5)
    driver.ask([2], output_tokens=100)
    driver.ask([3], output_tokens=5000)
    assert len({driver.class_of(number) for number in (1, 2, 3)}) == 3


def test_memories_of_prompts_are_bounded() -> None:
    policy = HitDensity(4, SIZE, max_records=4)
    for number in range(MAX_TIPS + 100):
        policy.begin(Origin(), [], [digest_of(number)])
    assert len(policy._tips) == MAX_TIPS
