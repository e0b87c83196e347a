from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import DIGEST_BYTES
from gateway.queues.batch.paths import (
    ENTRY_BYTES,
    LADDER,
    MAX_ENTRIES,
    MAX_TOKENS,
    Ref,
    path_of,
    place_of,
    ref_at,
    ref_bytes,
    ref_of,
    tokens_at,
)

JOB = "0123456789abcdef" * 2


def chain(*parts: tuple[str, int]) -> bytes:
    """Digests of a prompt that is made of so many blocks of each name, one behind the other."""
    digests, so_far = b"", ""
    for name, blocks in parts:
        for block in range(blocks):
            so_far += f"{name}{block};"
            digests += random.Random(so_far).randbytes(DIGEST_BYTES)
    return digests


def test_the_ladder_grows_by_a_quarter_and_reaches_any_prompt() -> None:
    assert LADDER[:9] == [1, 2, 3, 4, 5, 6, 8, 10, 12]
    assert all(1 < later / before <= 2 for before, later in pairwise(LADDER))
    assert all(later / before <= 1.34 for before, later in pairwise(LADDER[4:]))
    assert LADDER[-1] * 16 > 50_000


def test_a_path_has_an_entry_for_each_depth_that_the_prompt_reaches() -> None:
    assert path_of(b"") == b""
    assert len(path_of(chain(("a", 7)))) == 6 * ENTRY_BYTES
    assert len(path_of(bytes(DIGEST_BYTES * LADDER[-1]))) == MAX_ENTRIES * ENTRY_BYTES
    assert path_of(chain(("a", 9), ("b", 5))).startswith(path_of(chain(("a", 8))))


def test_in_order_prompts_of_one_document_stand_together_and_so_do_those_of_one_chapter_of_it() -> None:
    prompts = {
        (document, chapter, question): chain((document, 40), (f"{document}{chapter}", 30), (f"{question}", 2))
        for document in "abcde"
        for chapter in "123"
        for question in range(4)
    }
    names = sorted(prompts, key=lambda name: path_of(prompts[name]))
    documents = [name[0] for name in names]
    chapters = [name[:2] for name in names]
    for order in (documents, chapters):
        runs = [one for one, before in zip(order, [None, *order], strict=False) if one != before]
        assert len(runs) == len(set(runs)), "each stands in one run"


@given(st.binary(max_size=130), st.integers(0, 2**32 - 1), st.integers(0, 2**40))
def test_a_place_says_whose_it_is_and_what_it_costs(path: bytes, line: int, tokens: int) -> None:
    place = place_of(path, Ref(JOB, line), tokens)
    assert ref_at(place) == Ref(JOB, line) == ref_of(ref_bytes(Ref(JOB, line)))
    assert tokens_at(place) == min(tokens, MAX_TOKENS)
    assert place.startswith(path)
