"""Step 2 of the street: render, cut, tokenise what is new, chain the block digests. Implements street.Prompts.

One loaded model per tokeniser fingerprint, shared by all engines that have it. What is warm is answered on the event
loop without leaving it; a large amount of new text is tokenised in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

import orjson

from engine.protocol import TOKEN_BYTES, Breakpoint, Hello, Namespace, TokenizerFiles, TokenLogprobs
from gateway.config import PromptSettings
from gateway.errors import BadRequestError, ContextLengthError, NoEngineError
from gateway.prompt.markers import find_markers
from gateway.prompt.reader import AnswerReader
from gateway.prompt.samples import conversations
from gateway.prompt.scores import Scores
from gateway.prompt.segments import ChainMemo, ChainState, Node, Path, PromptMemo, SegmentMemo
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tokenizer import Link, Tokenizer
from gateway.prompt.tool_calls import CallParser
from gateway.prompt.tool_grammar import calls_only, calls_or, calls_within
from gateway.prompt.tool_styles import PROBE, ToolStyle, find_style, shorten_ids
from gateway.types import (
    ChatPrompt,
    Constraint,
    EncodedPrompt,
    Marker,
    Request,
    ScoredToken,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolUse,
)

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_THREADS: Final = 4
_SLOWER: Final = 8
"""How much longer the tokenizers library takes for a character than tiktoken (tests/bench/prompt_cost.py)."""
_HASHED: Final = 10
"""Characters, or their tokens, are hashed about as quickly as a tenth as many are tokenised."""
_RENDERED: Final = 100
"""Characters are masked and rendered about as quickly as a hundredth as many are tokenised."""
_THINK, _THOUGHT = "<think>", "</think>"
"""What some templates begin every answer with, and its end. A call that has to be made is made without thinking."""
_IDS_PER_LINK: Final = 4096
"""Prompts of token ids are cut everywhere after this many, for want of special tokens to cut at."""


@dataclass(slots=True)
class _Model:
    """What was loaded for one tokeniser."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    no_template: str  # why there is none
    tool_style: ToolStyle | str  # or why no tools can be called
    prefix: bytes  # what a text prompt starts with, after TokenizerFiles.add_bos
    segments: SegmentMemo
    chains: ChainMemo
    prompts: PromptMemo
    names: set[str] = field(default_factory=set)


class PromptStage:
    """street.Prompts. Belongs to one event loop; call `close` when that ends."""

    def __init__(self, settings: PromptSettings) -> None:
        self._settings = settings
        self._models: dict[str, _Model] = {}
        self._loading: dict[str, asyncio.Task[_Model]] = {}
        threads = min(_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="prompt")

    async def load(self, hello: Hello, files: TokenizerFiles) -> None:
        """Makes the model's prompts encodable; does nothing when an engine with the same tokeniser was here before.

        Takes seconds for a large vocabulary, in a thread. Raises ValueError for a tokeniser that cannot be used.
        """
        fingerprint = hello.tokenizer
        if fingerprint not in self._models:
            task = self._loading.get(fingerprint)
            if task is None:
                task = asyncio.ensure_future(self._in_thread(lambda: _load(files, self._settings)))
                self._loading[fingerprint] = task
                task.add_done_callback(lambda _: self._loading.pop(fingerprint, None))
            # Shielded: another engine may wait for the same one.
            model = await asyncio.shield(task)
            if fingerprint not in self._models:
                self._models[fingerprint] = model
                _say_what_was_loaded(hello.model, model)
        self._models[fingerprint].names.add(hello.model)

    def unload(self, fingerprint: str) -> None:
        """Forgets a tokeniser whose engines are gone, with its memos."""
        self._models.pop(fingerprint, None)

    def close(self) -> None:
        """Ends the threads; what they are at is finished and thrown away."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, request: Request, model: Hello) -> EncodedPrompt:
        """Raises BadRequestError for what the template refuses, for text or ids that this model cannot be given, and
        for an empty prompt."""
        loaded = self._get(model)
        namespace = replace(model.namespace, salt=request.salt)
        try:
            match request.prompt:
                case ChatPrompt() as prompt:
                    encoded = await self._encode_chat(loaded, namespace, prompt, request.tool_use)
                case TextPrompt(text):
                    masked = loaded.tokenizer.masking.mask(text)
                    encoded = (await self._walk_text(loaded, namespace, masked, prefix=loaded.prefix)).joined()
                case TokenPrompt(tokens):
                    if len(tokens) > model.context_tokens * TOKEN_BYTES:
                        raise ContextLengthError(
                            model.context_tokens,
                            len(tokens) // TOKEN_BYTES,
                            request.sampling.max_tokens,
                            param=request.prompt_param,
                        )
                    encoded = await self._encode_ids(loaded, namespace, tokens, model.vocab_size)
        except UnicodeEncodeError:
            raise BadRequestError(
                f"`{request.prompt_param}` holds half of a surrogate pair, which is not a character.",
                param=request.prompt_param,
            ) from None
        except BadRequestError as error:
            error.param = error.param or request.prompt_param
            raise
        if not encoded.tokens:
            raise BadRequestError(f"`{request.prompt_param}` is empty.", param=request.prompt_param)
        return encoded

    def constraint(self, request: Request, model: Hello) -> Constraint | None:
        use, text = request.tool_use, request.constraint
        if use is None:
            return text
        loaded = self._get(model)
        style, added = _style_of(loaded), loaded.tokenizer.added
        if use.mode == "required":
            return calls_only(style, use, added)
        if text is not None:
            return calls_or(text, style, use, added)
        # An answer that does not end by itself has no grammar.
        return None if request.sampling.ignore_eos else calls_within(style, use, added, model.eos_ids)

    def reader(self, request: Request, model: Hello) -> AnswerReader:
        loaded, use = self._get(model), request.tool_use
        decoding, kept = loaded.tokenizer.decoding, _kept(loaded, use)
        scores = None if request.sampling.logprobs is None else Scores(decoding, kept)
        if use is None:
            return AnswerReader(decoding.decoder(request.stop), scores)
        return AnswerReader(decoding.decoder((), kept), scores, CallParser(_style_of(loaded), use, request.stop))

    def spell(self, prompt: TokenPrompt, model: Hello) -> str:
        """The text of its tokens, special ones left out."""
        decoder = self._get(model).tokenizer.decoding.decoder(())
        return decoder.feed(array("I", prompt.tokens)) + decoder.flush()

    def score(self, prompt: EncodedPrompt, logprobs: Sequence[TokenLogprobs], model: Hello) -> tuple[ScoredToken, ...]:
        scores = Scores(self._get(model).tokenizer.decoding)
        scores.feed(array("I", prompt.tokens), [TokenLogprobs(0.0, ()), *logprobs])
        return scores.flush()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Model -> its tokeniser and memos. Numbers are bytes, tokens, segments or nodes; texts say why."""
        return {name: _stats(model) for model in self._models.values() for name in sorted(model.names)}

    def _get(self, model: Hello) -> _Model:
        loaded = self._models.get(model.tokenizer)
        if loaded is None:
            raise NoEngineError(model.model, retry_after_s=1.0)
        return loaded

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _encode_chat(
        self, model: _Model, namespace: Namespace, prompt: ChatPrompt, use: ToolUse | None
    ) -> EncodedPrompt:
        if model.template is None:
            raise BadRequestError(f"This model cannot chat: {model.no_template}. Use /v1/completions.", param="model")
        if prompt.tools and not model.template.takes_tools:
            raise BadRequestError(f"Tools cannot be used with this model: {model.tool_style}.", param="tools")
        style = None if use is None else _style_of(model)
        opener = style.forced_opener if style is not None and use is not None and use.mode == "required" else ""
        render = partial(_render, model, prompt, opener if prompt.add_generation_prompt else "")
        num_chars = sum([len(content) for message in prompt.messages if type(content := message.get("content")) is str])
        num_chars += sum(map(_num_chars, prompt.tools))
        key = model.prompts.key(namespace, prompt, num_chars, opener) if model.template.is_timeless else None
        if key is not None and (encoded := model.prompts.find(key, prompt)) is not None:
            return encoded
        long = num_chars > _RENDERED * self._settings.thread_chars
        text = await self._in_thread(render) if long else render()
        path = await self._walk_text(model, namespace, text)
        encoded = path.joined()
        if prompt.markers:
            find = partial(find_markers, text, prompt.markers, render, model.tokenizer.masking)
            places = await self._in_thread(find) if long else find()
            encoded = replace(encoded, breakpoints=await self._breakpoints(model, path, prompt, places))
        if key is not None:
            model.prompts.put(key, prompt, encoded, num_chars)
        return encoded

    async def _walk_text(self, model: _Model, namespace: Namespace, text: str, *, prefix: bytes = b"") -> Path:
        """`text` is masked; the ids in `prefix` come before it."""
        tokenizer, chains, segments = model.tokenizer, model.chains, model.segments
        # 1. Walk down as far as this text has come before. On the warm path that is all.
        root = chains.root((namespace, prefix), namespace, prefix)
        path, covered = chains.walk(root, text, tokenizer.cut)
        new_tokens = 0
        if covered < len(text):
            # 2. Cut the rest; look up what was tokenised in another place.
            links = list(tokenizer.cut(text, covered))
            known, missing = segments.find(namespace.salt, links)
            # 3. Tokenise what is new and hash it on, in a thread when that takes long. Touches nothing shared.
            state = path[-1].state if path else root.state
            work = partial(_go_on, tokenizer, namespace, state, links, known, missing)
            new_chars = sum(len(link.text) for link in missing)
            takes_long = self._takes_long(tokenizer, new_chars, len(text) - covered)
            fresh, nodes = await self._in_thread(work) if takes_long else work()
            new_tokens = sum(map(len, fresh.values())) // TOKEN_BYTES
            segments.put(namespace.salt, fresh)
            chains.count(path, nodes)
            path += nodes
        else:
            chains.count(path, ())
        # 4. Remember.
        chains.keep(root, path)
        return Path(root, path, new_tokens)

    async def _breakpoints(
        self, model: _Model, path: Path, prompt: ChatPrompt, places: Sequence[int]
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
        limit = self._settings.thread_chars
        if tokenizer.library == "tokenizers":
            new_chars *= _SLOWER
        return new_chars + unhashed_chars / _HASHED > limit

    async def _encode_ids(self, model: _Model, namespace: Namespace, ids: bytes, vocab_size: int) -> EncodedPrompt:
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
        takes_long = len(new) * _IDS_PER_LINK > _HASHED * self._settings.thread_chars
        nodes = await self._in_thread(work) if takes_long else work()
        model.chains.count(path, nodes)
        path += nodes
        model.chains.keep(root, path)
        return Path(root, path, 0).joined()


def _render(model: _Model, prompt: ChatPrompt, opener: str, markers: Sequence[Marker] = ()) -> str:
    """Masked text, with what stands before a call that has to be made."""
    assert model.template is not None
    messages: Sequence[Mapping[str, Any]] = prompt.messages
    if isinstance(model.tool_style, ToolStyle) and model.tool_style.short_ids:
        messages = shorten_ids(messages)
    if prompt.continues:
        return model.template.render_open(messages, markers, tools=prompt.tools)
    text = model.template.render(
        messages, markers, tools=prompt.tools, add_generation_prompt=prompt.add_generation_prompt
    )
    if opener and text.rstrip().endswith(_THINK):
        text = text.rstrip() + f"\n{_THOUGHT}\n\n"
    return text + opener


def _num_chars(tool: Tool) -> int:
    schema = len(orjson.dumps(tool.parameters)) if tool.parameters else 0
    return len(tool.name) + len(tool.description or "") + schema


def _style_of(model: _Model) -> ToolStyle:
    if isinstance(model.tool_style, str):
        raise BadRequestError(f"Tools cannot be called with this model: {model.tool_style}.", param="tools")
    return model.tool_style


def _kept(model: _Model, use: ToolUse | None) -> frozenset[str]:
    """Special strings that are text in an answer that may call tools: those around calls."""
    if use is None or isinstance(model.tool_style, str):
        return frozenset()
    return model.tool_style.marks


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


def _load(files: TokenizerFiles, settings: PromptSettings) -> _Model:
    tokenizer = Tokenizer(
        files.tokenizer_json, template=(files.chat_template or "") + "".join(files.special_tokens.values())
    )
    template, no_template = None, "it has no chat template"
    if files.chat_template:
        try:
            template = ChatTemplate(files.chat_template, files.special_tokens, tokenizer.masking)
            tokenizer.prove(_renderings(template))
        except ValueError as error:
            template, no_template = None, f"its chat template cannot be used ({error})"
    return _Model(
        tokenizer=tokenizer,
        template=template,
        no_template=no_template,
        tool_style=no_template if template is None else find_style(template),
        prefix=tokenizer.prefix if files.add_bos else b"",
        segments=SegmentMemo(settings.segment_memo_bytes),
        chains=ChainMemo(settings.chain_memo_bytes),
        prompts=PromptMemo(settings.prompt_memo_bytes),
    )


def _renderings(template: ChatTemplate) -> Iterator[str]:
    for messages in conversations():
        for add_generation_prompt in (True, False):
            tools = (PROBE,) if template.takes_tools and not add_generation_prompt else ()
            try:
                yield template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
            except BadRequestError:  # templates may refuse system turns, tools, or turns in this order
                continue


def _say_what_was_loaded(name: str, model: _Model) -> None:
    tokenizer = model.tokenizer
    log.info("tokeniser of %s: %s", name, tokenizer.library)
    if tokenizer.fallback:
        log.warning(
            "%s: %s; whole prompts are tokenised each time, which costs time on long ones", name, tokenizer.fallback
        )
    if model.template is None:
        log.warning("%s cannot chat: %s", name, model.no_template)


def _stats(model: _Model) -> dict[str, Any]:
    tokenizer = model.tokenizer
    return {
        "library": tokenizer.library,
        "not_tiktoken": tokenizer.slow,
        "whole_prompts": bool(tokenizer.fallback),  # no cuts, hence no reuse of segments
        "fallback": tokenizer.fallback,
        "chat": model.template is not None,
        "tools": model.tool_style.name if isinstance(model.tool_style, ToolStyle) else None,
        **{f"segment_memo_{key}": value for key, value in model.segments.stats().items()},
        **{f"chain_memo_{key}": value for key, value in model.chains.stats().items()},
        **{f"prompt_memo_{key}": value for key, value in model.prompts.stats().items()},
    }
