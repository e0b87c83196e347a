"""From masked text, or token ids, to token ids and block digests: down the memos first, then on with what is new.

What is warm is answered on the event loop without leaving it; a large amount of new text is tokenised in a thread.
gateway/prompt/segments.py holds the memos, gateway/prompt/stage.py renders the text.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final, Protocol, TypeVar

from engine.protocol import TOKEN_BYTES, Breakpoint, Namespace
from gateway.errors import BadRequestError
from gateway.prompt.loaded import LoadedModel
from gateway.prompt.segments import ChainState, Node, Path, SegmentMemo
from gateway.prompt.tokenizer import Link, Tokenizer
from gateway.tasks import off_loop, work_of
from gateway.types import ChatPrompt

_T = TypeVar("_T")

_SLOWER: Final = 8
"""How much longer the tokenizers library takes for a character than tiktoken (tests/bench/prompt_cost.py)."""
_HASHED: Final = 10
"""Characters, or their tokens, are hashed about as quickly as a tenth as many are tokenised."""
_IDS_PER_LINK: Final = 4096
"""Prompts of token ids are cut everywhere after this many, for want of special tokens to cut at."""


_LINKS_AT_ONCE: Final = 1000
"""Links that are looked up or kept before others have their turn: about a millisecond."""
_MAX_NODES: Final = 4096
"""Of one prompt that are remembered. What lies behind them is looked up in the memo of segments, and hashed again."""


class InThread(Protocol):
    """Runs work in a thread."""

    def __call__(self, work: Callable[[], _T]) -> Awaitable[_T]: ...


class Walk:
    """Down the memos of a model and on. Belongs to the event loop of its stage."""

    def __init__(self, thread_chars: int, in_thread: InThread) -> None:
        """thread_chars  new text that is tokenised in a thread, in characters"""
        self._thread_chars = thread_chars
        self._in_thread = in_thread

    async def text(self, model: LoadedModel, namespace: Namespace, text: str, *, prefix: bytes = b"") -> Path:
        """Where a prompt's text ends in the chain. `text` is masked; the ids in `prefix` come before it."""
        tokenizer, chains, segments = model.tokenizer, model.chains, model.segments
        # 1. Walk down as far as this text has come before. On the warm path that is all.
        root = chains.root((namespace, prefix), namespace, prefix)
        work = work_of(len(text))
        path, covered = await off_loop(work, partial(chains.walk, root, text, tokenizer.cut))
        new_tokens = 0
        if covered < len(text):
            # 2. Cut the rest; look up what was tokenised in another place.
            links = await off_loop(work, lambda: list(tokenizer.cut(text, covered)))
            known, missing = await _find(segments, namespace.salt, links)
            # 3. Tokenise what is new and hash it on, in a thread when that takes long. Touches nothing shared.
            state = path[-1].state if path else root.state
            go_on = partial(_go_on, tokenizer, namespace, state, links, known, missing)
            new_chars = sum(len(link.text) for link in missing)
            takes_long = len(links) > _LINKS_AT_ONCE
            takes_long = takes_long or self._takes_long(tokenizer, new_chars, len(text) - covered)
            fresh, nodes = await self._in_thread(go_on) if takes_long else go_on()
            new_tokens = sum(map(len, fresh.values())) // TOKEN_BYTES
            await _put(segments, namespace.salt, fresh)
            chains.count(path, nodes)
            path += nodes
        else:
            chains.count(path, ())
        # 4. Remember.
        chains.keep(root, path[:_MAX_NODES])
        return Path(root, path, new_tokens)

    async def ids(self, model: LoadedModel, namespace: Namespace, ids: bytes, vocab_size: int) -> Path:
        """The same for a prompt of token ids. Raises BadRequestError for one that is not in the vocabulary."""
        if len(ids) % TOKEN_BYTES:
            raise BadRequestError("The prompt is not a whole number of token ids.")
        width = _IDS_PER_LINK * TOKEN_BYTES
        links = [ids[start : start + width] for start in range(0, len(ids), width)]
        root = model.chains.root((namespace, vocab_size), namespace)
        path: list[Node] = []
        node: Node | None = root
        while node is not None and len(path) < len(links):
            node = node.children.get(links[len(path)])
            path += [] if node is None else [node]
        state, new = (path[-1] if path else root).state, links[len(path) :]
        work = partial(_go_on_with_ids, namespace, state, new, vocab_size, len(path) * _IDS_PER_LINK)
        takes_long = len(new) * _IDS_PER_LINK > _HASHED * self._thread_chars
        nodes = await self._in_thread(work) if takes_long else work()
        model.chains.count(path, nodes)
        path += nodes
        model.chains.keep(root, path)
        return Path(root, path, 0)

    async def breakpoints(
        self, model: LoadedModel, path: Path, prompt: ChatPrompt, places: Sequence[int]
    ) -> tuple[Breakpoint, ...]:
        """`places` are the markers' in the rendered text. Of several at one token the one that lasts longest counts."""
        least = max(prompt.min_breakpoint_tokens, 1)
        ttls: dict[int, float] = {}
        for marker, place in zip(prompt.markers, places, strict=True):
            before, node, chars = path.at(place)
            if node is not None and chars not in node.breaks:
                link = next(model.tokenizer.cut(node.link))
                count = partial(model.tokenizer.count_before, link, node.ids, chars)
                new_chars = len(link.text) if model.tokenizer.library == "tokenizers" else 0
                takes_long = self._takes_long(model.tokenizer, new_chars, len(link.text))
                node.remember_break(chars, await self._in_thread(count) if takes_long else count())
            tokens = before + (node.breaks[chars] if node is not None else 0)
            ttls[tokens] = max(ttls.get(tokens, 0.0), marker.ttl_s)
        return tuple(Breakpoint(tokens, ttl_s) for tokens, ttl_s in sorted(ttls.items()) if tokens >= least)

    def _takes_long(self, tokenizer: Tokenizer, new_chars: int, unhashed_chars: int) -> bool:
        limit = self._thread_chars
        if tokenizer.library == "tokenizers":
            new_chars *= _SLOWER
        return new_chars + unhashed_chars / _HASHED > limit


async def _find(segments: SegmentMemo, salt: str, links: Sequence[Link]) -> tuple[dict[str, bytes], list[Link]]:
    """As SegmentMemo.find."""
    known, missing = segments.find(salt, links[:_LINKS_AT_ONCE])
    for start in range(_LINKS_AT_ONCE, len(links), _LINKS_AT_ONCE):
        await asyncio.sleep(0)
        more, others = segments.find(salt, links[start : start + _LINKS_AT_ONCE])
        known |= more
        missing += others
    return known, missing


async def _put(segments: SegmentMemo, salt: str, fresh: Mapping[str, bytes]) -> None:
    """As SegmentMemo.put."""
    items = iter(fresh.items())
    while some := dict(islice(items, _LINKS_AT_ONCE)):
        segments.put(salt, some)
        if len(some) == _LINKS_AT_ONCE:
            await asyncio.sleep(0)


def _go_on(
    tokenizer: Tokenizer,
    namespace: Namespace,
    state: ChainState,
    links: Sequence[Link],
    known: Mapping[str, bytes],
    missing: Sequence[Link],
) -> tuple[dict[str, bytes], list[Node]]:
    """Ids of the missing links, and a node for each of all links, from where the chain stands."""
    fresh = dict(zip((link.text for link in missing), tokenizer.encode(missing), strict=True))
    nodes: list[Node] = []
    for link in links:
        ids = known[link.text] if link.text in known else fresh[link.text]
        digests, state = state.extend(ids, namespace)
        nodes.append(Node(link.text, ids, digests, state, ends=link.segment_chars == len(link.text)))
    return fresh, nodes


def _go_on_with_ids(
    namespace: Namespace, state: ChainState, links: Sequence[bytes], vocab_size: int, at: int
) -> list[Node]:
    """A node for each of the links, the first of which begins with token number `at` of the prompt."""
    nodes: list[Node] = []
    for i, ids in enumerate(links):
        _check_ids(ids, vocab_size, at + i * _IDS_PER_LINK)
        digests, state = state.extend(ids, namespace)
        nodes.append(Node(ids, ids, digests, state))
    return nodes


def _check_ids(ids: bytes, vocab_size: int, start: int) -> None:
    values = array("I", ids)
    if max(values) >= vocab_size:
        at = next(i for i, value in enumerate(values) if value >= vocab_size)
        raise BadRequestError(
            f"Token id {values[at]} at position {start + at} is not in the vocabulary of this model "
            f"(0 to {vocab_size - 1})."
        )
