"""The demo model's tokeniser and chat template. Knows nothing about weights; train.py and the tests use it.

Byte-level BPE behind the pre-tokeniser expression of Qwen2 (GPT-4's, with digits one by one), no prefix space and no
normaliser: every string comes back byte for byte. The chat format is ChatML.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096

END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2. The first one closes a plain text, the third one a turn; the engine stops at either."""

PRE_TOKENISER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Every tag strips the template's own white space on both sides, so the result does not depend on trim_blocks; nothing
# strips a content, so what was rendered once is a prefix of everything that is rendered after one more turn.
CHAT_TEMPLATE = """\
{#- ChatML. Tools, if any, are a system turn of their own, one JSON object per line; so are tool calls. -#}
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- for tool in tools -%}
    {{- tool | tojson -}}
    {%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message['role'] + '\\n' -}}
  {%- set content = message['content'] if message['content'] is defined else none -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content -%}
      {%- if part is string -%}
        {{- part -}}
      {%- elif part['text'] is string -%}
        {{- part['text'] -}}
      {%- else -%}
        {{- raise_exception('The demo model reads text only: every content part needs a "text".') -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {%- if message['tool_calls'] -%}
    {%- for call in message['tool_calls'] -%}
      {%- set function = call['function'] if call['function'] is defined else call -%}
      {%- if content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
      {{- '{"name": ' + function['name'] | tojson + ', "arguments": ' -}}
      {%- if function['arguments'] is string -%}
        {{- function['arguments'] or '{}' -}}
      {%- else -%}
        {{- (function['arguments'] or {}) | tojson -}}
      {%- endif -%}
      {{- '}' -}}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def render_turn(role: str, content: str) -> str:
    """One turn as the chat template writes it, for content that is a plain string."""
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def train_tokeniser(texts: Iterable[str]) -> Tokenizer:
    """Learns the vocabulary: the special tokens first, then all 256 bytes, then merges. Deterministic."""
    tokeniser = Tokenizer(models.BPE())
    tokeniser.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENISER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokeniser.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokeniser.train_from_iterator(texts, trainer)
    return tokeniser


def save_tokeniser(tokeniser: Tokenizer, folder: Path, *, max_tokens: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers 4 and 5 both read them."""
    tokeniser.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
