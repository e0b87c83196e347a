"""The three memos of one model: what was rendered, tokenised and hashed once is looked up.

SegmentMemo  (salt, link) -> token ids. The same document in another conversation costs no tokenising.
ChainMemo    a tree. A node stands for a prompt up to a cut; its children are the links that went on from there. It
             keeps what its link added: ids, digests of the blocks that became full, and the loose tail behind them. A
             turn added to a long conversation walks down the tree, compares text, and hashes nothing but the turn.
PromptMemo   messages and tools -> the whole encoded prompt. The same question asked again, with another seed or
             temperature or by a client that tries again, is not even rendered.

All are exact (text is compared, not only its hash), bounded in bytes, and least recently used goes first. Every key
begins with the request's salt: nobody can find out by timing what was sent under another one. Used by the event loop's
thread alone. Token ids are made elsewhere (tokenizer.py); the neighbour is stage.py.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from engine.protocol import DIGEST_BYTES, TOKEN_BYTES, Namespace, chain_digests
from gateway.prompt.tokenizer import Link
from gateway.types import ChatPrompt, EncodedPrompt

_ENTRY_BYTES = 240  # key tuple, dictionary entry and its share of the table, measured with tracemalloc
_MESSAGE_BYTES = 360  # a message's dictionary and the strings around its content
_NODE_BYTES = 584  # node, its table of breakpoints, its table of children, its entry in the order of use
_KEY_CHARS = 1024  # of the last message, from either end, by which prompts are told apart before they are compared
_BREAKS = 8  # breakpoints that a node remembers


@dataclass(slots=True)
class Counts:
    """What a memo was asked for."""

    hit_segments: int = 0
    hit_tokens: int = 0
    miss_segments: int = 0
    miss_tokens: int = 0

    def hit(self, segments: int, id_bytes: int) -> None:
        self.hit_segments += segments
        self.hit_tokens += id_bytes // TOKEN_BYTES

    def miss(self, segments: int, id_bytes: int) -> None:
        self.miss_segments += segments
        self.miss_tokens += id_bytes // TOKEN_BYTES


class SegmentMemo:
    """Token ids of links, by salt."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.counts = Counts()
        self._ids: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def find(self, salt: str, links: Sequence[Link]) -> tuple[dict[str, bytes], list[Link]]:
        """Ids of the links that are there, by text; and those that are not, each once."""
        known: dict[str, bytes] = {}
        missing: dict[str, Link] = {}
        for link in links:
            key = (salt, link.text)
            ids = self._ids.get(key)
            if ids is None:
                missing[link.text] = link
                continue
            known[link.text] = ids
            self._ids.move_to_end(key)
            self.counts.hit(1, len(ids))
        return known, list(missing.values())

    def put(self, salt: str, fresh: Mapping[str, bytes]) -> None:
        """Keeps link text -> ids as the most recently used ones, unless they are larger than the whole memo."""
        for link, ids in fresh.items():
            self.counts.miss(1, len(ids))
            size = self._size(link, ids)
            key = (salt, link)
            if key in self._ids or size > self.limit_bytes:
                continue
            self._ids[key] = ids
            self.num_bytes += size
        while self.num_bytes > self.limit_bytes:
            (_, old_link), old_ids = self._ids.popitem(last=False)
            self.num_bytes -= self._size(old_link, old_ids)

    @staticmethod
    def _size(link: str, ids: bytes) -> int:
        return sys.getsizeof(link) + sys.getsizeof(ids) + _ENTRY_BYTES


class PromptMemo:
    """Encoded prompts by the messages and tools they were made of, which must not be changed afterwards."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.counts = Counts()
        self._prompts: OrderedDict[Hashable, tuple[ChatPrompt, EncodedPrompt, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

    @staticmethod
    def key(namespace: Namespace, prompt: ChatPrompt, num_chars: int, ending: str = "") -> Hashable:
        """What is quickly said of a prompt; `find` compares the rest. One prompt is kept for each key.

        ending  what is put behind the rendered text
        """
        last = prompt.messages[-1].get("content") if prompt.messages else None
        last = (last[:_KEY_CHARS], last[-_KEY_CHARS:]) if type(last) is str else None
        sizes = len(prompt.messages), len(prompt.tools), num_chars
        markers, end = (prompt.markers, prompt.min_breakpoint_tokens), (prompt.add_generation_prompt, prompt.continues)
        return namespace, end, markers, sizes, last, ending

    def find(self, key: Hashable, prompt: ChatPrompt) -> EncodedPrompt | None:
        """What a prompt of equal messages and tools was encoded to, with `new_tokens` 0."""
        kept = self._prompts.get(key)
        if kept is None or kept[0].messages != prompt.messages or kept[0].tools != prompt.tools:
            return None
        self._prompts.move_to_end(key)
        self.counts.hit(1, len(kept[1].tokens))
        return kept[1]

    def put(self, key: Hashable, prompt: ChatPrompt, encoded: EncodedPrompt, num_chars: int) -> None:
        """Keeps a prompt, unless it is larger than the whole memo."""
        self.counts.miss(1, len(encoded.tokens))
        # Characters beyond ASCII take more; a mean of two bytes is counted for all of them.
        num_values = len(prompt.messages) + len(prompt.tools)
        size = 2 * num_chars + _MESSAGE_BYTES * num_values + len(encoded.tokens) + len(encoded.digests) + _ENTRY_BYTES
        if size > self.limit_bytes:
            return
        if (old := self._prompts.pop(key, None)) is not None:
            self.num_bytes -= old[2]
        self._prompts[key] = prompt, replace(encoded, new_tokens=0), size
        self.num_bytes += size
        while self.num_bytes > self.limit_bytes:
            _, (_, _, old_size) = self._prompts.popitem(last=False)
            self.num_bytes -= old_size


class ChainState(NamedTuple):
    """Where a chain of blocks stands: the last digest, and the ids behind the last full block."""

    digest: bytes
    tail: bytes = b""

    def extend(self, ids: bytes, namespace: Namespace) -> tuple[bytes, ChainState]:
        """The digests that `ids` complete, packed, and where the chain stands then."""
        data = self.tail + ids
        digests = chain_digests(self.digest, data, namespace.block_size, namespace.hash_name)
        used = len(digests) // DIGEST_BYTES * namespace.block_size * TOKEN_BYTES
        return digests, ChainState(digests[-DIGEST_BYTES:] or self.digest, data[used:])


class Node:
    """A prompt up to a cut. `link` is str, or bytes for prompts of token ids, or a root's key."""

    __slots__ = ("breaks", "children", "digests", "ends", "ids", "last", "link", "parent", "size", "state")

    def __init__(self, link: Any, ids: bytes, digests: bytes, state: ChainState, *, ends: bool = False) -> None:
        self.link = link
        self.ids = ids
        self.digests = digests
        self.state = state
        self.ends = ends  # the text ended here: this link is no cut, and a longer text may begin with it
        self.breaks: dict[int, int] = {}  # characters of the link -> its tokens before a breakpoint there; few
        self.parent: Node | None = None
        self.children: dict[Any, Node] = {}
        self.last: Node | None = None  # the child that was used last: compared before anything is cut or hashed
        self.size = sum(map(sys.getsizeof, (ids, digests, state.tail, state.digest))) + _NODE_BYTES
        self.size += sys.getsizeof(link) if isinstance(link, (str, bytes)) else 0

    def remember_break(self, chars: int, tokens: int) -> None:
        """Of the last few breakpoints; where they are moves with every edit of a client's."""
        if len(self.breaks) >= _BREAKS:
            del self.breaks[next(iter(self.breaks))]
        self.breaks[chars] = tokens


class Path(NamedTuple):
    """The nodes that a prompt went through."""

    root: Node
    nodes: Sequence[Node]
    new_tokens: int  # of segments that were not in the memo

    def joined(self) -> EncodedPrompt:
        """The prompt, without breakpoints."""
        return EncodedPrompt(
            tokens=b"".join([self.root.ids, *[node.ids for node in self.nodes]]),
            digests=b"".join([self.root.digests, *[node.digests for node in self.nodes]]),
            new_tokens=self.new_tokens,
        )

    def at(self, chars: int) -> tuple[int, Node | None, int]:
        """Where the first `chars` characters of the text end: tokens of the nodes before, the node, characters of it.

        No node when it is the end of one.
        """
        tokens = len(self.root.ids) // TOKEN_BYTES
        for node in self.nodes:
            if chars <= 0:
                break
            if chars < len(node.link):
                return tokens, node, chars
            tokens += len(node.ids) // TOKEN_BYTES
            chars -= len(node.link)
        return tokens, None, 0


class ChainMemo:
    """The tree. Nodes are in order of use, a parent always after its children: the oldest one is a leaf."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.counts = Counts()
        self._top = Node("", b"", b"", ChainState(b""))
        self._used: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def root(self, key: Hashable, namespace: Namespace, ids: bytes = b"") -> Node:
        """Where all prompts under `key` begin, with `ids` already; `key` holds both. Not in the tree before `keep`."""
        root = self._top.children.get(key)
        return root or Node(key, ids, *ChainState(namespace.root()).extend(ids, namespace))

    @staticmethod
    def walk(root: Node, text: str, cut: Callable[[str, int], Iterator[Link]]) -> tuple[list[Node], int]:
        """The nodes below `root` that `text` goes through, and how many characters they cover."""
        path: list[Node] = []
        node, at, end = root, 0, len(text)
        while at < end:
            child = node.last
            # A link's special string is found in any text that begins with the link, so comparing is enough.
            if child is None or not text.startswith(child.link, at) or (child.ends and at + len(child.link) < end):
                found = node.children.get(next(cut(text, at)).text)
                if found is None:
                    break
                node.last = child = found
            path.append(child)
            at += len(child.link)
            node = child
        return path, at

    def count(self, walked: Sequence[Node], new: Sequence[Node]) -> None:
        self.counts.hit(len(walked), sum([len(node.ids) for node in walked]))
        self.counts.miss(len(new), sum([len(node.ids) for node in new]))

    def keep(self, root: Node, path: Sequence[Node]) -> None:
        """Makes `path` the most recently used one below `root`; nodes that are not in the tree are put in.

        Nodes may have left the tree since they were walked, or others may have put the same ones in: then those stay
        which are there. Evicts what does not fit, of this path the end first.
        """
        # 1. Down: find or put in.
        nodes, parent = [], self._top
        for node in (root, *path):
            child = parent.children.get(node.link)
            if child is None:
                child = node
                child.parent, child.children, child.last = parent, {}, None
                parent.children[child.link] = child
                self._used[child] = None
                self.num_bytes += child.size
            parent.last = child
            nodes.append(child)
            parent = child
        # 2. Up: a parent is used after its children.
        for child in reversed(nodes):
            self._used.move_to_end(child)
        # 3. Evict leaves.
        while self.num_bytes > self.limit_bytes:
            self._evict()

    def _evict(self) -> None:
        node, _ = self._used.popitem(last=False)
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.link]
        if parent.last is node:
            parent.last = None
        node.parent = None
        self.num_bytes -= node.size


def figures(memo: SegmentMemo | PromptMemo | ChainMemo) -> dict[str, int]:
    """What is in it now, and what it was asked for since the start."""
    return {"bytes": memo.num_bytes, "limit_bytes": memo.limit_bytes, "entries": len(memo)} | asdict(memo.counts)
