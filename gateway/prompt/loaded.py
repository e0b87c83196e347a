"""What is loaded for one tokeniser: the tokeniser itself, its chat template and tool style, and the memos.

Made once by `load_model`, in a thread. A model without a chat template, or with one that cannot be used, completes all
the same. gateway/prompt/stage.py keeps one for each tokeniser that its engines have.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.protocol import TokenizerFiles
from gateway.config import PromptSettings
from gateway.errors import BadRequestError
from gateway.prompt.samples import conversations
from gateway.prompt.segments import ChainMemo, PromptMemo, SegmentMemo
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tokenizer import Tokenizer
from gateway.prompt.tool_styles import PROBE, ToolStyle, find_style, shorten_ids
from gateway.types import ChatPrompt, Marker, ToolUse

log = logging.getLogger(__name__)

THINK, _THOUGHT = "<think>", "</think>"
"""What some templates begin every answer with, and its end. A call that has to be made is made without thinking."""


@dataclass(slots=True)
class LoadedModel:
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

    def render(self, prompt: ChatPrompt, opener: str, markers: Sequence[Marker] = ()) -> str:
        """Masked text, with `opener`, what stands before a call that has to be made. There must be a template."""
        assert self.template is not None
        messages: Sequence[Mapping[str, Any]] = prompt.messages
        if isinstance(self.tool_style, ToolStyle) and self.tool_style.short_ids:
            messages = shorten_ids(messages)
        if prompt.continues:
            return self.template.render_open(messages, markers, tools=prompt.tools)
        text = self.template.render(
            messages, markers, tools=prompt.tools, add_generation_prompt=prompt.add_generation_prompt
        )
        if opener and text.rstrip().endswith(THINK):
            text = text.rstrip()
        return text + self.opener_behind(text, opener)

    def opener_behind(self, text: str, opener: str) -> str:
        """What a prompt with this end goes on with, where `opener` has to come: thinking ends before it."""
        if not opener or not text.rstrip().endswith(THINK):
            return opener
        return f"{'' if text.endswith(chr(10)) else chr(10)}{_THOUGHT}\n\n{opener}"

    @property
    def calls(self) -> ToolStyle:
        """How calls are written. Raises BadRequestError when they cannot be."""
        if isinstance(self.tool_style, str):
            raise BadRequestError(f"Tools cannot be called with this model: {self.tool_style}.", param="tools")
        return self.tool_style

    def kept(self, use: ToolUse | None) -> frozenset[str]:
        """Special strings that are text in an answer that may call tools: those around calls."""
        if use is None or isinstance(self.tool_style, str):
            return frozenset()
        return self.tool_style.marks

    def stats(self) -> dict[str, Any]:
        """Numbers are bytes, tokens, segments or nodes; texts say why."""
        tokenizer = self.tokenizer
        return {
            "library": tokenizer.library,
            "not_tiktoken": tokenizer.slow,
            "whole_prompts": bool(tokenizer.fallback),  # no cuts, hence no reuse of segments
            "fallback": tokenizer.fallback,
            "chat": self.template is not None,
            "tools": self.tool_style.name if isinstance(self.tool_style, ToolStyle) else None,
            **{f"segment_memo_{key}": value for key, value in self.segments.figures().items()},
            **{f"chain_memo_{key}": value for key, value in self.chains.figures().items()},
            **{f"prompt_memo_{key}": value for key, value in self.prompts.figures().items()},
        }

    def say_what_it_can(self, name: str) -> None:
        """In the log."""
        tokenizer = self.tokenizer
        log.info("tokeniser of %s: %s", name, tokenizer.library)
        if tokenizer.fallback:
            log.warning(
                "%s: %s; whole prompts are tokenised each time, which costs time on long ones", name, tokenizer.fallback
            )
        if self.template is None:
            log.warning("%s cannot chat: %s", name, self.no_template)


def load_model(files: TokenizerFiles, settings: PromptSettings) -> LoadedModel:
    """Takes seconds for a large vocabulary. Raises ValueError for a tokeniser that cannot be used."""
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
    return LoadedModel(
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
