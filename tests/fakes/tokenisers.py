"""Small tokenisers of the shapes that real models have, trained here on generated text: no downloads.

Each maker returns TokenizerFiles and is called once per test run.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.protocol import Hello, Namespace, TokenizerFiles
from gateway.prompt.samples import SAMPLES

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{ call.function | tojson }}{{ '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
LLAMA2 = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}
"""


def corpus() -> list[str]:
    """What the tokenisers are trained on."""
    return sentences(6000, seed=7) + SAMPLES


def sentences(words: int, *, seed: int) -> list[str]:
    """Sentences of invented words in a few alphabets, numbers and punctuation."""
    rng = random.Random(seed)
    alphabets = ["etaoinshrdlucm", "etaoinshrdlucm", "абвгдежиклмно", "漢字仮名文章世界", "αβγδεικλμνο"]
    lexicon = ["".join(rng.choices(rng.choice(alphabets), k=rng.randrange(2, 8))) for _ in range(300)]
    text = [
        rng.choice(lexicon) + rng.choice(["", "", "", ",", ".", "!", "\n", "'s", " 12", "()"]) for _ in range(words)
    ]
    return [" ".join(text[i : i + 40]) for i in range(0, len(text), 40)]


@lru_cache
def llama3() -> TokenizerFiles:
    """ignore_merges, a begin-of-text token in front of plain text, and a few hundred special tokens."""
    tokenizer = _byte_level(LLAMA3_PATTERN, ignore_merges=True)
    names = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id"]
    names += [f"reserved_special_token_{i}" for i in range(250)]
    _add(tokenizer, [f"<|{name}|>" for name in names])
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return TokenizerFiles(tokenizer.to_str(), LLAMA3, {"bos_token": bos, "eos_token": "<|eot_id|>"}, add_bos=True)


@lru_cache
def qwen() -> TokenizerFiles:
    """NFC, and added tokens that are not special."""
    tokenizer = _byte_level(QWEN_PATTERN)
    tokenizer.normalizer = normalizers.NFC()
    _add(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    _add(tokenizer, ["<tool_call>", "</tool_call>", "<think>", "</think>"], special=False)
    return TokenizerFiles(tokenizer.to_str(), CHATML, {"eos_token": "<|im_end|>"}, add_bos=False)


@lru_cache
def gpt2_digits() -> TokenizerFiles:
    """Digits one by one before GPT-2's own pattern, special tokens inside the vocabulary, no chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus(), _trainer(["<|endoftext|>", "<fim_prefix>"]))
    return TokenizerFiles(tokenizer.to_str(), None, {}, add_bos=False)


@lru_cache
def from_ranks() -> TokenizerFiles:
    """As converted from a table of ranks: the merges list every pair that makes a token."""
    spec = json.loads(llama3().tokenizer_json)
    vocab: dict[str, int] = spec["model"]["vocab"]
    merges = []
    for token in sorted(vocab, key=vocab.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    spec["model"]["merges"] = merges
    return TokenizerFiles(json.dumps(spec), LLAMA3, {"bos_token": "<|begin_of_text|>"}, add_bos=True)


@lru_cache
def shuffled_ids() -> TokenizerFiles:
    """Ids that are not in the order of the merges."""
    spec = json.loads(qwen().tokenizer_json)
    ids = list(spec["model"]["vocab"].values())
    random.Random(3).shuffle(ids)
    spec["model"]["vocab"] = dict(zip(spec["model"]["vocab"], ids, strict=True))
    return TokenizerFiles(json.dumps(spec), CHATML, {}, add_bos=False)


@lru_cache
def llama2() -> TokenizerFiles:
    """SentencePiece BPE as transformers writes it today: a space in front of the first word only."""
    return _sentencepiece(
        normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False), strip=True
    )


@lru_cache
def llama2_legacy() -> TokenizerFiles:
    """SentencePiece BPE with a normaliser that puts a space in front of every piece."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _sentencepiece(normalizer=normalizer, pre_tokenizer=None, strip=True)


@lru_cache
def gemma() -> TokenizerFiles:
    """SentencePiece BPE without prefix spaces."""
    return _sentencepiece(normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=None, strip=False)


@lru_cache
def wordpiece() -> TokenizerFiles:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        corpus(), trainers.WordPieceTrainer(vocab_size=1500, special_tokens=specials, show_progress=False)
    )
    template = "{% for message in messages %}{{ '[CLS]' + message.content + '[SEP]' }}{% endfor %}"
    return TokenizerFiles(tokenizer.to_str(), template, {}, add_bos=False)


@lru_cache
def unigram() -> TokenizerFiles:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=8000, special_tokens=specials, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return TokenizerFiles(tokenizer.to_str(), LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}, add_bos=False)


BYTE_LEVEL = {
    "llama3": llama3,
    "qwen": qwen,
    "gpt2_digits": gpt2_digits,
    "from_ranks": from_ranks,
    "shuffled_ids": shuffled_ids,
}
OTHERS = {
    "llama2": llama2,
    "llama2_legacy": llama2_legacy,
    "gemma": gemma,
    "wordpiece": wordpiece,
    "unigram": unigram,
}
ALL = BYTE_LEVEL | OTHERS


def hello(files: TokenizerFiles, *, model: str = "model", block_size: int = 4, **changes: Any) -> Hello:
    """What an engine with this tokeniser would say. Vocabulary as the tokeniser's."""
    namespace = Namespace(weights="w", dtype="float32", kv_dtype="float32", block_size=block_size)
    vocab_size = Tokenizer.from_str(files.tokenizer_json).get_vocab_size(with_added_tokens=True)
    values: dict[str, Any] = {
        "incarnation": "i",
        "model": model,
        "namespace": namespace,
        "context_tokens": 1 << 20,
        "vocab_size": vocab_size,
        "num_blocks": 100,
        "max_sequences": 4,
        "eos_ids": (),
        "tokenizer": files.fingerprint(),
        "created": 0,
    }
    return Hello(**(values | changes))


def _byte_level(pattern: str, *, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus(), _trainer([]))
    return tokenizer


def _trainer(specials: list[str]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def _sentencepiece(*, normalizer: Any, pre_tokenizer: Any, strip: bool) -> TokenizerFiles:
    specials = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    text = [sentence.replace("漢", " ") for sentence in corpus()]
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=specials, limit_alphabet=150, show_progress=False)
    trained.train_from_iterator(text, trainer)
    spec = json.loads(trained.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(spec | {"pre_tokenizer": None}))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return TokenizerFiles(tokenizer.to_str(), LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}, add_bos=True)


def _add(tokenizer: Tokenizer, contents: list[str], *, special: bool = True) -> None:
    tokens = [AddedToken(content, special=special, normalized=False) for content in contents]
    tokenizer.add_special_tokens(tokens) if special else tokenizer.add_tokens(tokens)
