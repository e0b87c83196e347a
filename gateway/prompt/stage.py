"""Step 2 of the pipeline: render, cut, tokenise what is new, chain the block digests. Implements stages.Prompts.

One loaded model per tokeniser fingerprint, shared by all engines that have it. What is warm is answered on the event
loop without leaving it; a large amount of new text is tokenised in a thread.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final

import orjson

from engine.protocol import (
    DIGEST_BYTES,
    TOKEN_BYTES,
    Breakpoint,
    Hello,
    Namespace,
    TokenizerFiles,
    TokenLogprobs,
    chain_digests,
)
from gateway.config import PromptSettings
from gateway.digests import derived_salt
from gateway.errors import BadRequestError, ContextLengthError, NoEngineError
from gateway.native import no_panic
from gateway.prompt.loaded import THINK, LoadedModel, load_model
from gateway.prompt.reader import AnswerReader, Scores
from gateway.prompt.template import find_markers
from gateway.prompt.tool_calls import CallParser
from gateway.prompt.tool_styles import calls_only, calls_or, calls_within
from gateway.prompt.walk import Walk
from gateway.tasks import off_loop
from gateway.types import (
    ChatPrompt,
    Constraint,
    EncodedPrompt,
    Request,
    ScoredToken,
    TextPrompt,
    TokenPrompt,
    Tool,
)

_THREADS: Final = 4
_ENDING_TOKENS: Final = 8
"""Of a prompt, in which one sees whether an answer begins with thinking."""


class PromptStage:
    """stages.Prompts. Belongs to one event loop; call `close` when that ends."""

    def __init__(self, settings: PromptSettings) -> None:
        self._settings = settings
        self._models: dict[str, LoadedModel] = {}
        self._loading: dict[str, asyncio.Future[LoadedModel]] = {}
        threads = min(_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="prompt")
        self._walk = Walk(settings.thread_chars, self._threads)

    async def load(self, hello: Hello, files: TokenizerFiles) -> None:
        """Makes the model's prompts encodable; does nothing when an engine with the same tokeniser was here before.

        Takes seconds for a large vocabulary, in a thread. Raises ValueError for a tokeniser that cannot be used.
        """
        fingerprint = hello.tokenizer
        if fingerprint not in self._models:
            task = self._loading.get(fingerprint)
            if task is None:
                task = asyncio.get_running_loop().run_in_executor(self._threads, _load, files, self._settings)
                self._loading[fingerprint] = task
                task.add_done_callback(lambda _: self._loading.pop(fingerprint, None))
            # Shielded: another engine may wait for the same one.
            model = await asyncio.shield(task)
            if fingerprint not in self._models:
                self._models[fingerprint] = model
                model.say_what_it_can(hello.model)
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
        namespace = _salted(model.namespace, request.salt)
        try:
            match request.prompt:
                case ChatPrompt() as prompt:
                    encoded = await self._encode_chat(loaded, namespace, prompt, request, model)
                case TextPrompt(text):
                    await self._check_chars(loaded, model, [text], request)
                    masked = await off_loop(request.work, partial(loaded.tokenizer.masking.mask, text))
                    encoded = (await self._walk.text(loaded, namespace, masked, prefix=loaded.prefix)).joined()
                case TokenPrompt(tokens):
                    if len(tokens) > model.context_tokens * TOKEN_BYTES:
                        raise ContextLengthError(
                            model.context_tokens,
                            len(tokens) // TOKEN_BYTES,
                            request.sampling.max_tokens,
                            param=request.prompt_param,
                        )
                    encoded = await self._walk.ids(namespace, tokens, model.vocab_size)
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

    def extend(self, prompt: EncodedPrompt, answer: bytes, request: Request, model: Hello) -> EncodedPrompt:
        """The prompt with tokens of its answer behind it."""
        namespace = _salted(model.namespace, request.salt)
        tokens = prompt.tokens + answer
        hashed = len(prompt.digests) // DIGEST_BYTES * namespace.block_size * TOKEN_BYTES
        parent = prompt.digests[-DIGEST_BYTES:] or namespace.root()
        rest = memoryview(tokens)[hashed:]
        more = chain_digests(parent, rest, namespace.block_size, namespace.hash_name)
        return replace(prompt, tokens=tokens, digests=prompt.digests + more, rendering=None)

    async def adopt(
        self, prompt: EncodedPrompt, ids: bytes, rendering: str, request: Request, model: Hello
    ) -> EncodedPrompt:
        """A prompt of `encode` in the tokens of a server that renders it in its own way, with what stands before a call
        that has to be made. A breakpoint behind the first token that differs stays where it is from the end on."""
        loaded, namespace, use = self._get(model), _salted(model.namespace, request.salt), request.tool_use
        if use is not None and use.mode == "required":
            decoder = loaded.tokenizer.decoding.decoder((), frozenset((THINK,)))
            ending = decoder.feed(array("I", ids[-_ENDING_TOKENS * TOKEN_BYTES :])) + decoder.flush()
            opener = loaded.opener_behind(ending, loaded.calls.forced_opener)
            ids += (await self._walk.text(loaded, namespace, opener)).joined().tokens if opener else b""
        encoded = await self._walk.ids(namespace, ids, model.vocab_size)
        points = tuple(_moved(prompt.breakpoints, array("I", prompt.tokens), array("I", ids)))
        return replace(encoded, new_tokens=encoded.num_tokens, breakpoints=points, rendering=rendering)

    def constraint(self, request: Request, model: Hello) -> Constraint | None:
        use, text = request.tool_use, request.constraint
        if use is None:
            return text
        loaded = self._get(model)
        style, added = loaded.calls, loaded.tokenizer.added
        if use.mode == "required":
            return calls_only(style, use, added)
        if text is not None:
            return calls_or(text, style, use, added)
        # An answer that does not end by itself has no grammar.
        return None if request.sampling.ignore_eos else calls_within(style, use, added, model.eos_ids)

    def reader(self, request: Request, model: Hello) -> AnswerReader:
        loaded, use = self._get(model), request.tool_use
        decoding, kept = loaded.tokenizer.decoding, loaded.kept(use)
        scores = None if request.sampling.logprobs is None else Scores(decoding, kept)
        if use is None:
            return AnswerReader(decoding.decoder(request.stop), scores)
        return AnswerReader(decoding.decoder((), kept), scores, CallParser(loaded.calls, use, request.stop))

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
        return {name: model.stats() for model in self._models.values() for name in sorted(model.names)}

    def _get(self, model: Hello) -> LoadedModel:
        loaded = self._models.get(model.tokenizer)
        if loaded is None:
            raise NoEngineError(model.model, retry_after_s=1.0)
        return loaded

    async def _check_chars(self, model: LoadedModel, hello: Hello, texts: Sequence[str], request: Request) -> None:
        """Raises ContextLengthError for texts that cannot fit whatever their tokens are, before they are made."""
        if sum(map(len, texts)) <= hello.context_tokens:
            return
        least = await off_loop(request.work, lambda: sum(map(model.tokenizer.least_tokens, texts)))
        if least > hello.context_tokens:
            raise ContextLengthError(
                hello.context_tokens, least, request.sampling.max_tokens, param=request.prompt_param
            )

    async def _encode_chat(
        self, model: LoadedModel, namespace: Namespace, prompt: ChatPrompt, request: Request, hello: Hello
    ) -> EncodedPrompt:
        use = request.tool_use
        if model.template is None:
            raise BadRequestError(f"This model cannot chat: {model.no_template}. Use /v1/completions.", param="model")
        if prompt.tools and not model.template.takes_tools:
            raise BadRequestError(f"Tools cannot be used with this model: {model.tool_style}.", param="tools")
        style = None if use is None else model.calls
        opener = style.forced_opener if style is not None and use is not None and use.mode == "required" else ""
        render = partial(model.render, prompt, opener if prompt.add_generation_prompt else "")
        contents = [content for message in prompt.messages if type(content := message.get("content")) is str]
        await self._check_chars(model, hello, contents, request)
        num_chars = await off_loop(request.work, partial(_prompt_chars, contents, prompt.tools))
        key = model.prompts.key(namespace, prompt, num_chars, opener) if model.template.is_timeless else None
        if key is not None and (encoded := model.prompts.find(key, prompt)) is not None:
            return encoded
        text = await off_loop(request.work, render)
        await self._check_chars(model, hello, [text], request)
        path = await self._walk.text(model, namespace, text)
        encoded = path.joined()
        if prompt.markers:
            find = partial(find_markers, text, prompt.markers, render, model.tokenizer.masking)
            places = await off_loop(request.work, find)
            encoded = replace(encoded, breakpoints=await self._walk.breakpoints(model, path, prompt, places))
        if key is not None:
            model.prompts.put(key, prompt, encoded, num_chars)
        return encoded


def _load(files: TokenizerFiles, settings: PromptSettings) -> LoadedModel:
    with no_panic("a tokeniser's library"):
        return load_model(files, settings)


def _moved(points: Sequence[Breakpoint], ours: array[int], theirs: array[int]) -> Iterator[Breakpoint]:
    """Breakpoints of our tokens in others of the same prompt."""
    if not points:
        return
    differ = (at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    same, last = next(differ, min(len(ours), len(theirs))), 0
    for point in points:
        tokens = point.tokens
        if tokens > same:
            tokens = max(same, tokens + len(theirs) - len(ours))
        if tokens > last:
            yield replace(point, tokens=tokens)
            last = tokens


@lru_cache(1024)
def _salted(namespace: Namespace, salt: str) -> Namespace:
    """A replica's namespace comes with the secret that its salts are derived with."""
    return replace(namespace, salt=derived_salt(namespace.salt, salt) if namespace.salt else salt)


def _prompt_chars(contents: Sequence[str], tools: Sequence[Tool]) -> int:
    return sum(map(len, contents)) + sum(map(_num_chars, tools))


def _num_chars(tool: Tool) -> int:
    schema = len(orjson.dumps(tool.parameters)) if tool.parameters else 0
    return len(tool.name) + len(tool.description or "") + schema
