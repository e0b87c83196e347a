"""What a gateway sent to a replica, for as long as it may still be cached there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import BlockEvents, split_digests
from gateway.replicas.history import History


def chain(*names: int) -> bytes:
    """A block is named by all names up to it, as digests are."""
    return b"".join(bytes(names[: end + 1]).ljust(16, b"\xff") for end in range(len(names)))


def test_a_prompt_is_held_until_it_is_too_old() -> None:
    history = History(ttl_s=120, max_blocks=100)
    assert history.sent(chain(1, 2, 3), 0) == BlockEvents(stored=chain(1, 2, 3))
    assert history.expired(119) == BlockEvents()
    assert split_digests(history.expired(120).removed) == split_digests(chain(1, 2, 3))[::-1]
    assert len(history) == 0


def test_a_prompt_that_continues_another_renews_it() -> None:
    history = History(ttl_s=120, max_blocks=100)
    history.sent(chain(1, 2), 0)
    history.sent(chain(7), 0)
    assert history.sent(chain(1, 2, 3), 60) == BlockEvents(stored=chain(1, 2, 3)[-16:])
    assert history.expired(130) == BlockEvents(removed=chain(7))
    assert len(history) == 3


def test_a_prompt_that_was_just_sent_is_not_walked_again() -> None:
    history = History(ttl_s=120, max_blocks=100)
    history.sent(chain(1, 2), 0)
    assert history.sent(chain(1, 2), 0.5) == history.sent(chain(1), 0.5) == BlockEvents()
    assert history.sent(chain(1, 2, 3), 0.5).stored == chain(1, 2, 3)[-16:]
    history.sent(chain(1, 2, 3), 60)
    assert history.expired(130) == BlockEvents()


def test_what_was_sent_longest_ago_makes_room() -> None:
    history = History(ttl_s=120, max_blocks=4)
    history.sent(chain(1, 2), 0)
    history.sent(chain(5, 6), 1)
    assert history.sent(chain(8), 2).removed == chain(1, 2)[16:]
    assert history.sent(chain(9, 9, 9, 9, 9), 3).stored == chain(9, 9, 9, 9)
    assert len(history) == 4


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 5), st.booleans()), max_size=40
    )
)
def test_a_block_never_outlives_its_parent(steps: list[tuple[list[int], int, bool]]) -> None:
    history, held, now_s = History(ttl_s=10, max_blocks=8), set[bytes](), 0
    for names, pause_s, sends in steps:
        now_s += pause_s
        events = history.sent(chain(*names), now_s) if sends else history.expired(now_s)
        for digest in split_digests(events.removed):
            held.remove(digest)
            assert not any(other.rstrip(b"\xff").startswith(digest.rstrip(b"\xff")) for other in held)
        for digest in split_digests(events.stored):
            parent = digest.rstrip(b"\xff")[:-1]
            assert not parent or parent.ljust(16, b"\xff") in held
            held.add(digest)
        assert len(held) == len(history) <= 8
