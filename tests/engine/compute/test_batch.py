"""The flat arrays of a step."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine.compute.batch import consecutive, make_batch, run_start
from engine.protocol import Sampling
from engine.sequence import Sequence, Step, Work


@given(data=st.data())
def test_every_token_gets_its_id_its_position_and_its_slot(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([4, 16]))
    work = []
    blocks = iter(data.draw(st.permutations(range(60))))
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(1, 40))
        tokens = array("I", data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=length, max_size=length)))
        table = [next(blocks) for _ in range(-(-length // size))]
        sequence = Sequence("", 0, tokens, length, [], Sampling(max_tokens=1), block_table=array("i", table))
        start = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, length - start))
        drafts = tuple(tokens[start + data.draw(st.integers(1, count)) : start + count])  # yet to come
        work.append(Work(sequence, start, count - len(drafts), samples=True, drafts=drafts))
    batch = make_batch(Step(work), size)
    row, asked = 0, batch.asked.tolist()
    for index, item in enumerate(work):
        for position in range(item.start, item.start + item.num_rows):
            assert batch.tokens[row] == item.sequence.tokens[position]
            assert batch.positions[row] == position
            assert batch.slots[row] == item.sequence.block_table[position // size] * size + position % size
            row += 1
        assert asked[: item.num_asked] == list(range(row - item.num_asked, row))
        del asked[: item.num_asked]
        assert (batch.spans[index].row, batch.spans[index].end) == (row - item.num_rows, item.start + item.num_rows)
    assert batch.num_tokens == row


def test_a_sequence_can_grow_while_its_batch_is_alive() -> None:
    sequence = Sequence("", 0, array("I", [1, 2, 3]), 3, [], Sampling(max_tokens=1), block_table=array("i", [0]))
    batch = make_batch(Step([Work(sequence, 0, 3, samples=True)]), 4)
    sequence.tokens.append(4)  # raises BufferError when the batch still looks into it
    assert batch.tokens.tolist() == [1, 2, 3]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_a_run_is_found_exactly_where_the_numbers_are_consecutive(numbers: list[int]) -> None:
    import numpy as np

    straight = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert run_start(numbers, len(numbers)) == (numbers[0] if straight else None)
    assert consecutive(np.array(numbers)) == (numbers[0] if straight else None)
    assert run_start(numbers, 1) == numbers[0]
