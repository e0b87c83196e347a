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
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ref

from engine.protocol import DIGEST_BYTES, TOKEN_BYTES, Namespace, chain_digests
from gateway.prompt.tokenizer import Link
from gateway.types import ChatPrompt, EncodedPrompt

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

_ENTRY_BYTES = 240  # key tuple, dictionary entry and its share of the table, measured with tracemalloc
_MESSAGE_BYTES = 360  # a message's dictionary and the strings around its content
_NODE_BYTES = 584  # node, its table of breakpoints, its key and entry
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


class Memo(Generic[_K, _V]):
    """Values of a size in bytes; those that were used longest ago make room."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.counts = Counts()
        self._entries: OrderedDict[_K, tuple[_V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: _K) -> _V | None:
        """The value, which is the last used one from now on."""
        if (entry := self._entries.get(key)) is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def store(self, key: _K, value: _V, size: int) -> None:
        """Keeps it in place of an earlier one, unless it is larger than the whole memo."""
        if size > self.limit_bytes:
            return
        if (old := self._entries.pop(key, None)) is not None:
            self.num_bytes -= old[1]
        self._entries[key] = value, size
        self.num_bytes += size
        while self.num_bytes > self.limit_bytes:
            _, (_, old_size) = self._entries.popitem(last=False)
            self.num_bytes -= old_size

    def figures(self) -> dict[str, int]:
        """What is in it now, and what was looked up since the start."""
        return {"bytes": self.num_bytes, "limit_bytes": self.limit_bytes, "entries": len(self)} | asdict(self.counts)


class SegmentMemo(Memo[tuple[str, str], bytes]):
    """Token ids of links, by salt."""

    def find(self, salt: str, links: Sequence[Link]) -> tuple[dict[str, bytes], list[Link]]:
        """Ids of the links that are there, by text; and those that are not, each once."""
        known: dict[str, bytes] = {}
        missing: dict[str, Link] = {}
        for link in links:
            if (ids := self.get((salt, link.text))) is None:
                missing[link.text] = link
            else:
                known[link.text] = ids
                self.counts.hit(1, len(ids))
        return known, list(missing.values())

    def put(self, salt: str, fresh: Mapping[str, bytes]) -> None:
        """Keeps link text -> ids."""
        for link, ids in fresh.items():
            self.counts.miss(1, len(ids))
            self.store((salt, link), ids, sys.getsizeof(link) + sys.getsizeof(ids) + _ENTRY_BYTES)


class PromptMemo(Memo[Hashable, tuple[ChatPrompt, EncodedPrompt]]):
    """Encoded prompts by the messages and tools they were made of, which must not be changed afterwards."""

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
        found = self.get(key)
        if found is None or found[0].messages != prompt.messages or found[0].tools != prompt.tools:
            return None
        self.counts.hit(1, len(found[1].tokens))
        return found[1]

    def put(self, key: Hashable, prompt: ChatPrompt, encoded: EncodedPrompt, num_chars: int) -> None:
        self.counts.miss(1, len(encoded.tokens))
        # Characters beyond ASCII take more; a mean of two bytes is counted for all of them.
        num_values = len(prompt.messages) + len(prompt.tools)
        size = 2 * num_chars + _MESSAGE_BYTES * num_values + len(encoded.tokens) + len(encoded.digests) + _ENTRY_BYTES
        self.store(key, (prompt, replace(encoded, new_tokens=0)), size)


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


def _none() -> None:
    """A reference to no node."""


class Node:
    """A prompt up to a cut. `link` is str, or a root's key."""

    __slots__ = ("__weakref__", "breaks", "digests", "ends", "ids", "last", "link", "size", "state")

    def __init__(self, link: Any, ids: bytes, digests: bytes, state: ChainState, *, ends: bool = False) -> None:
        self.link = link
        self.ids = ids
        self.digests = digests
        self.state = state
        self.ends = ends  # the text ended here: this link is no cut, and a longer text may begin with it
        self.breaks: dict[int, int] = {}  # characters of the link -> its tokens before a breakpoint there; few
        self.last: Callable[[], Node | None] = _none  # the child used last: compared before anything is cut or hashed
        self.size = sum(map(sys.getsizeof, (ids, digests, state.tail, state.digest))) + _NODE_BYTES
        self.size += sys.getsizeof(link) if isinstance(link, str) else 0

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


class ChainMemo(Memo[tuple["Node | None", Any], Node]):
    """The tree, as nodes by their parent and link. A parent is always used after its children, so these go first."""

    def root(self, key: Hashable, namespace: Namespace, ids: bytes = b"") -> Node:
        """Where all prompts under `key` begin, with `ids` already; `key` holds both. Not in the tree before `keep`."""
        root = self.get((None, key))
        return root or Node(key, ids, *ChainState(namespace.root()).extend(ids, namespace))

    def walk(self, root: Node, text: str, cut: Callable[[str, int], Iterator[Link]]) -> tuple[list[Node], int]:
        """The nodes below `root` that `text` goes through, and how many characters they cover."""
        path: list[Node] = []
        node, at, end = root, 0, len(text)
        while at < end:
            child = node.last()
            # A link's special string is found in any text that begins with the link, so comparing is enough.
            if child is None or not text.startswith(child.link, at) or (child.ends and at + len(child.link) < end):
                entry = self._entries.get((node, next(cut(text, at)).text))
                if entry is None:
                    break
                child = entry[0]
                node.last = ref(child)
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
        which are there. What does not fit is removed, of this path the end first.
        """
        nodes: list[tuple[Node | None, Node]] = []
        parent: Node | None = None
        for node in (root, *path):
            kept, _ = self._entries.get((parent, node.link), (node, 0))
            nodes.append((parent, kept))
            if parent is not None:
                parent.last = ref(kept)
            parent = kept
        for parent, node in reversed(nodes):
            if self.get((parent, node.link)) is None:
                self.store((parent, node.link), node, node.size)
