"""From masked text, or token ids, to token ids and block digests: down the memos first, then on with new text.

What is warm is answered on the event loop without leaving it; a large amount of new text is tokenised in a thread.
gateway/prompt/segments.py holds the memos, gateway/prompt/stage.py renders the text.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from engine.protocol import TOKEN_BYTES, Breakpoint, Namespace
from gateway.errors import BadRequestError
from gateway.prompt.loaded import LoadedModel
from gateway.prompt.segments import ChainState, Node, Path
from gateway.prompt.tokenizer import Link, Tokenizer
from gateway.tasks import off_loop, work_of
from gateway.types import ChatPrompt, EncodedPrompt

_T = TypeVar("_T")

_SLOWER: Final = 8
"""How much longer the tokenizers library takes for a character than tiktoken (tests/bench/prompt_cost.py)."""
_HASHED: Final = 10
"""Characters, or their tokens, are hashed about as quickly as a tenth as many are tokenised."""
_LINKS_AT_ONCE: Final = 1000
"""Links that are looked up or kept before others have their turn: about a millisecond."""
_MAX_NODES: Final = 4096
"""Of one prompt that are remembered. What lies behind them is looked up in the memo of segments, and hashed again."""


class Walk:
    """Down the memos of a model and on. Belongs to the event loop of its stage."""

    def __init__(self, thread_chars: int, threads: ThreadPoolExecutor) -> None:
        """thread_chars  new text that is tokenised in a thread, in characters"""
        self._thread_chars = thread_chars
        self._threads = threads

    async def text(self, model: LoadedModel, namespace: Namespace, text: str, *, prefix: bytes = b"") -> Path:
        """Where a prompt's text ends in the chain. `text` is masked; the ids in `prefix` come before it."""
        tokenizer, chains, segments = model.tokenizer, model.chains, model.segments
        # 1. Walk down as far as this text has come before. On the warm path that is all.
        root = chains.root((namespace, prefix), namespace, prefix)
        work = work_of(len(text))
        path, covered = await off_loop(work, partial(chains.walk, root, text, tokenizer.cut))
        num_found, new_tokens = len(path), 0
        if covered < len(text):
            # 2. Cut the rest; look up what was tokenised in another place.
            links = await off_loop(work, lambda: list(tokenizer.cut(text, covered)))
            many = len(links) > _LINKS_AT_ONCE
            for start in range(0, len(links), _LINKS_AT_ONCE):
                batch = links[start : start + _LINKS_AT_ONCE]
                known, missing = segments.find(namespace.salt, batch)
                # 3. Tokenise what is new and hash it on, in a thread when that takes long. Touches nothing shared.
                state = path[-1].state if path else root.state
                extend = partial(_extend, tokenizer, namespace, state, batch, known, missing)
                new_chars = sum(len(link.text) for link in missing)
                in_thread = many or self._takes_long(tokenizer, new_chars, len(text) - covered)
                fresh, nodes = await self._run(extend, in_thread=in_thread)
                new_tokens += sum(map(len, fresh.values())) // TOKEN_BYTES
                segments.put(namespace.salt, fresh)
                path += nodes
        # 4. Remember.
        chains.count(path[:num_found], path[num_found:])
        chains.keep(root, path[:_MAX_NODES])
        return Path(root, path, new_tokens)

    async def ids(self, namespace: Namespace, ids: bytes, vocab_size: int) -> EncodedPrompt:
        """A prompt of token ids. Raises BadRequestError for one that is not in the vocabulary."""
        if len(ids) % TOKEN_BYTES:
            raise BadRequestError("The prompt is not a whole number of token ids.")
        digests = partial(_digests_of_ids, namespace, ids, vocab_size)
        in_thread = len(ids) // TOKEN_BYTES > _HASHED * self._thread_chars
        return EncodedPrompt(ids, await self._run(digests, in_thread=in_thread))

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
                in_thread = self._takes_long(model.tokenizer, new_chars, len(link.text))
                node.remember_break(chars, await self._run(count, in_thread=in_thread))
            tokens = before + (node.breaks[chars] if node is not None else 0)
            ttls[tokens] = max(ttls.get(tokens, 0.0), marker.ttl_s)
        return tuple(Breakpoint(tokens, ttl_s) for tokens, ttl_s in sorted(ttls.items()) if tokens >= least)

    def _takes_long(self, tokenizer: Tokenizer, new_chars: int, unhashed_chars: int) -> bool:
        if tokenizer.library == "tokenizers":
            new_chars *= _SLOWER
        return new_chars + unhashed_chars / _HASHED > self._thread_chars

    async def _run(self, work: Callable[[], _T], *, in_thread: bool) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work) if in_thread else work()


def _extend(
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


def _digests_of_ids(namespace: Namespace, ids: bytes, vocab_size: int) -> bytes:
    values = array("I", ids)
    if max(values, default=0) >= vocab_size:
        at = next(i for i, value in enumerate(values) if value >= vocab_size)
        raise BadRequestError(
            f"Token id {values[at]} at position {at} is not in the vocabulary of this model (0 to {vocab_size - 1})."
        )
    return ChainState(namespace.root()).extend(ids, namespace)[0]
