"""The memos: bounded in bytes, exact, and never in the way of a right answer."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.protocol import Namespace, chain_digests
from gateway.prompt.segments import ChainMemo, ChainState, Node, SegmentMemo
from gateway.prompt.tokenizer import Link

SPACE = Namespace(weights="w", dtype="d", kv_dtype="d", block_size=4)


def cut(text: str, start: int = 0) -> Iterator[Link]:
    """Cuts behind every bar."""
    while start < len(text):
        bar = text.find("|", start)
        end = bar + 1 if bar >= 0 else len(text)
        yield Link(text[start:end], bar - start if bar >= 0 else end - start)
        start = end


def ids_of(link: str) -> bytes:
    return array("I", map(ord, link)).tobytes()


def encode(memo: ChainMemo, text: str, key: str = "root") -> tuple[bytes, bytes, int]:
    """Ids, digests, and how many nodes were there already."""
    root = memo.root(key, SPACE)
    path, at = memo.walk(root, text, cut)
    found = len(path)
    state = path[-1].state if path else root.state
    for link in cut(text, at):
        digests, state = state.extend(ids_of(link.text), SPACE)
        ends = len(link.text) == link.segment_chars
        path.append(Node(link.text, ids_of(link.text), digests, state, ends=ends))
    memo.keep(root, path)
    return b"".join(node.ids for node in path), b"".join(node.digests for node in path), found


class ChainsAgainstNone(RuleBasedStateMachine):
    """Any prompts in any order under any limit give the digests of the whole; the tree's books balance."""

    def __init__(self) -> None:
        super().__init__()
        self.memo = ChainMemo(6000)

    @rule(text=st.text(alphabet="ab|", max_size=12), key=st.sampled_from(["one", "two"]))
    def prompt(self, text: str, key: str) -> None:
        ids, digests, _ = encode(self.memo, text, key)
        assert ids == ids_of(text)
        assert digests == chain_digests(SPACE.root(), ids, SPACE.block_size)

    @rule(first=st.text(alphabet="ab|", max_size=8), between=st.lists(st.text(alphabet="ab|", max_size=8), max_size=6))
    def prompt_while_others_come_and_go(self, first: str, between: list[str]) -> None:
        root = self.memo.root("one", SPACE)
        path, at = self.memo.walk(root, first, cut)
        for text in between:
            encode(self.memo, text, "two")
        state = path[-1].state if path else root.state
        for link in cut(first, at):
            digests, state = state.extend(ids_of(link.text), SPACE)
            ends = len(link.text) == link.segment_chars
            path.append(Node(link.text, ids_of(link.text), digests, state, ends=ends))
        self.memo.keep(root, path)

    @invariant()
    def books_balance(self) -> None:
        entries = self.memo._entries
        nodes = {node for node, _ in entries.values()}
        assert self.memo.num_bytes == sum(node.size for node in nodes) <= self.memo.limit_bytes
        for (parent, link), (node, _) in entries.items():
            assert node.link == link
            assert parent is None or parent in nodes
            assert node.last() is None or entries[node, node.last().link][0] is node.last()


TestChainsAgainstNone = ChainsAgainstNone.TestCase


def test_a_longer_conversation_finds_all_of_the_shorter_one() -> None:
    memo = ChainMemo(1 << 20)
    assert encode(memo, "sys|hello|")[2] == 0
    assert encode(memo, "sys|hello|answer|more|")[2] == 2
    assert encode(memo, "sys|hello|answer|more|")[2] == 4
    assert encode(memo, "sys|other|")[2] == 1
    assert encode(memo, "sys|hello|", key="another tenant")[2] == 0


def test_an_open_end_is_not_taken_for_the_beginning_of_a_longer_text() -> None:
    memo = ChainMemo(1 << 20)
    encode(memo, "a|assistant")
    assert encode(memo, "a|assistant says|")[2] == 1
    assert encode(memo, "a|assistant")[2] == 2


def test_what_was_used_longest_ago_goes_first_and_from_the_end() -> None:
    memo = ChainMemo(1 << 20)
    encode(memo, "a|b|c|")
    memo.limit_bytes = memo.num_bytes
    encode(memo, "x|")
    assert encode(memo, "a|b|c|")[2] == 2


def test_a_memo_of_no_bytes_keeps_nothing_and_still_answers() -> None:
    memo = ChainMemo(0)
    for _ in range(2):
        assert encode(memo, "a|b|")[2] == 0
    assert (len(memo), memo.num_bytes) == (0, 0)


@given(parts=st.lists(st.binary(max_size=12).map(lambda data: data * 4), max_size=6))
def test_a_chain_in_pieces_is_the_chain_of_the_whole(parts: list[bytes]) -> None:
    state, digests = ChainState(SPACE.root()), b""
    for part in parts:
        more, state = state.extend(part, SPACE)
        digests += more
    assert digests == chain_digests(SPACE.root(), b"".join(parts), SPACE.block_size)
    assert len(state.tail) < SPACE.block_size * 4


def test_segments_are_found_by_their_tenant_only() -> None:
    memo = SegmentMemo(1 << 20)
    links = [Link("a|", 1), Link("a|", 1), Link("b", 1)]
    assert memo.find("one", links) == ({}, [Link("a|", 1), Link("b", 1)])
    memo.put("one", {"a|": b"1234"})
    assert memo.find("one", links) == ({"a|": b"1234"}, [Link("b", 1)])
    assert memo.find("two", links) == ({}, [Link("a|", 1), Link("b", 1)])
    assert memo.counts.hit_segments == 2
    assert memo.counts.miss_tokens == 1


def test_segments_stay_within_the_limit_and_the_oldest_goes_first() -> None:
    memo = SegmentMemo(2000)
    for name in "abcdefgh":
        memo.put("t", {name: b"1234"})
        memo.find("t", [Link("a", 1)])
        assert memo.num_bytes <= 2000
    known, _ = memo.find("t", [Link(name, 1) for name in "abcdefgh"])
    assert "a" in known
    assert "h" in known
    assert "b" not in known
    memo.put("t", {"x" * 5000: b"1234"})
    assert memo.num_bytes <= 2000


def test_sizes_are_those_of_the_objects() -> None:
    text, ids = "漢" * 100, b"1234" * 100
    memo = SegmentMemo(1 << 20)
    memo.put("t", {text: ids})
    assert memo.num_bytes >= sys.getsizeof(text) + sys.getsizeof(ids)
    assert Node(text, ids, b"", ChainState(b"d")).size >= sys.getsizeof(text) + sys.getsizeof(ids)
