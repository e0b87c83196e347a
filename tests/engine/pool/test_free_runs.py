"""Free blocks as runs of consecutive ids."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pool.free_runs import FreeRuns


@given(st.lists(st.integers(0, 2**16), max_size=200), st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_free_runs_hand_out_every_id_once(choices: list[int], num_blocks: int) -> None:
    references = [0] * num_blocks
    runs, taken = FreeRuns(num_blocks, references), set[int]()
    for choice in choices:
        if choice % 2 and taken:
            block = sorted(taken)[choice % len(taken)]
            taken.remove(block)
            references[block] = 0
            runs.add(block)
        elif len(runs):
            count = 1 + choice % len(runs)
            after = sorted(taken)[choice % len(taken)] if taken and choice % 3 else None
            fits = runs.fits(count, after)
            got = runs.take(count, after)
            assert len(set(got)) == count
            assert not taken & set(got)
            assert not fits or got == [*range(got[0], got[0] + count)]
            taken |= set(got)
            for block in got:
                references[block] = choice % 2
        assert len(runs) == num_blocks - len(taken)
        assert all((block in runs) == (block not in taken) for block in range(num_blocks))
