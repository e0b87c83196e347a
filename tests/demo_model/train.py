"""Trains the demo model from nothing: tokeniser, then weights, on one CPU core in half an hour.

    python -m tests.demo_model.train --books DIR --out engine/demo/model --minutes 30 --seed 0

DIR holds the two books as `book_*.txt.gz`: Project Gutenberg numbers 1342 (Pride and Prejudice) and 1661 (The
Adventures of Sherlock Holmes), without Gutenberg's own header and footer. The texts it learns from are made in
books.py, the vocabulary and the chat format in tokeniser.py.

With --minutes the schedule follows the clock, so two machines stop after a different number of steps; with --steps
the run is a function of the books, the seed and the version of torch. The model in the folder is replaced at every
checkpoint by renaming a finished file, so it can be used, and the training stopped, at any time.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from engine.compute.linear import is_quick
from tests.demo_model.books import CHARS_PER_TOKEN, Library, read_book
from tests.demo_model.tokeniser import (
    SPECIAL_TOKENS,
    TURN_START,
    VOCAB_SIZE,
    render_turn,
    save_tokeniser,
    train_tokeniser,
)

MAX_TOKENS = 131_072
LENGTHS = {512: 0.46, 1024: 0.26, 2048: 0.18, 4096: 0.08, 8192: 0.02}
"""Share of the steps at each sequence length: the long ones keep the answers sane when the prompt is long. A step is
--step-tokens tokens, or one sequence of at most twice as many."""

CHAT_SHARE = 0.65
CALLS_SHARE = 0.4
"""Of the conversations: those with tools or JSON. They are short, so they are fewer of the tokens."""

FAR_SHARE = 0.4
"""Of the sequences: cut in some places, and the positions behind each cut moved on by a random distance, so that every
position up to MAX_TOKENS is trained at the price of a short sequence (PoSE, arXiv 2309.10400)."""
FAR_CUTS = 3
HELD_OUT_SHARE = 0.03
PEAK_LR = 3e-3
CONTINUED_LR = 1e-3
WARMUP_SHARE = 0.02
WEIGHT_DECAY = 0.1
CHECKPOINT_S = 60.0
SAMPLE_PROMPTS = (
    "Say hello.",
    "Describe Mr. Darcy in JSON.",
    "Tell me about Mr. Holmes",
    "What is marriage?",
    "Write a short story.",
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How far the training is, from 0 to 1: by steps where they are given, by the clock otherwise."""

    minutes: float
    steps: int | None
    peak_lr: float
    step_tokens: int

    def progress(self, step: int, elapsed_s: float) -> float:
        """1.0 or more when it is time to stop."""
        return step / self.steps if self.steps else elapsed_s / (60 * self.minutes)


def model_config() -> dict[str, Any]:
    """config.json: 4.7 million weights in five layers, four query heads that share two key/value heads."""
    end_of_text, _, turn_end = range(len(SPECIAL_TOKENS))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # the name before transformers 5, like rope_theta outside rope_parameters
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": MAX_TOKENS,
        "rope_theta": 100_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": end_of_text,
        "pad_token_id": end_of_text,
        "eos_token_id": [turn_end, end_of_text],
    }


def new_model(seed: int) -> LlamaForCausalLM:
    """Fresh weights, in float32 for training."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**model_config(), "dtype": "float32", "torch_dtype": "float32"}))


def sequences(library: Library, tokeniser: Tokenizer, rng: Random, length: int) -> Iterator[list[int]]:
    """Endless sequences of `length` + 1 tokens: documents, plain or chat, each closed by <|endoftext|>."""
    while True:
        ids: list[int] = []
        while len(ids) <= length:
            max_chars = (length - len(ids)) * CHARS_PER_TOKEN
            if rng.random() < CHAT_SHARE:
                calls = rng.random() < CALLS_SHARE
                text = library.calls(rng) if calls else library.conversation(rng, max_chars)
            else:
                text = library.plain_text(rng, min(max_chars, rng.choice((1, 4, 16, 64)) * 500))
            ids += [*tokeniser.encode(text).ids, 0]
        yield ids[: length + 1]


def batches(library: Library, tokeniser: Tokenizer, rng: Random, step_tokens: int) -> Iterator[Tensor]:
    """Endless batches, all sequences of a batch of one length.

    batch  (num_sequences, length + 1)  int64  token ids; the inputs are all but the last, the targets all but the first
    """
    lengths = {length: share for length, share in LENGTHS.items() if length <= 2 * step_tokens}
    sources = {length: sequences(library, tokeniser, rng, length) for length in lengths}
    while True:
        (length,) = rng.choices(list(lengths), list(lengths.values()))
        yield torch.tensor([next(sources[length]) for _ in range(max(1, step_tokens // length))])


def far_positions(rng: Random, num_sequences: int, length: int) -> Tensor:
    """Positions that only grow, up to MAX_TOKENS; those of some sequences jump at FAR_CUTS places.

    positions  (num_sequences, length)  int64
    """
    positions = torch.arange(length).repeat(num_sequences, 1)
    for row in positions:
        if rng.random() < FAR_SHARE:
            room = rng.randrange(MAX_TOKENS - length)
            for cut in sorted(rng.randrange(length) for _ in range(FAR_CUTS)):
                moved = rng.randrange(room + 1)
                row[cut:] += moved
                room -= moved
    return positions


def mean_loss(model: LlamaForCausalLM, batch: Tensor, positions: Tensor | None = None) -> Tensor:
    """Cross entropy per token in nats, over every token of the batch: nothing is masked."""
    inputs = batch[:, :-1]
    # With a mask of ones transformers does not take a jump of positions for the beginning of another text.
    with torch.autocast("cpu", torch.bfloat16, enabled=is_quick(torch.bfloat16)):
        logits = model(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), position_ids=positions, use_cache=False
        ).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, paragraphs: list[str], tokeniser: Tokenizer) -> float:
    """The loss on plain text that is never trained on, in sequences of 1,024 tokens."""
    ids = tokeniser.encode("\n\n".join(paragraphs)).ids
    num = (len(ids) - 1) // 1024
    batch = torch.tensor([ids[i * 1024 : (i + 1) * 1024 + 1] for i in range(num)])
    model.train(False)
    loss = mean_loss(model, batch).item()
    model.train()
    return loss


def optimisers_for(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms; one learning rate fits both. AdamW
    alone on processors that are slow in bfloat16, in which torch's Muon works."""
    if not is_quick(torch.bfloat16):
        return [torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    inner = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    known = set(map(id, inner))
    outer = [weight for weight in model.parameters() if id(weight) not in known]
    return [
        torch.optim.Muon(inner, lr=PEAK_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def learning_rate(progress: float, peak: float) -> float:
    """A short linear warm-up, then half a cosine down to a fiftieth of the peak."""
    if progress < WARMUP_SHARE:
        return peak * max(progress / WARMUP_SHARE, 0.01)
    fall = (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(fall, 1.0))))


def save_weights(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes config, generation config and bfloat16 weights; model.safetensors is replaced in one rename."""
    config = model_config()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # the same tensor as the embedding
    }
    unfinished = folder / ".model.safetensors.new"
    save_file(weights, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)
    os.replace(unfinished, folder / "model.safetensors")


def train(
    model: LlamaForCausalLM,
    library: Library,
    held_out: list[str],
    tokeniser: Tokenizer,
    out: Path,
    seed: int,
    schedule: Schedule,
) -> float:
    """Trains until the schedule ends, saves at every checkpoint and returns the last held-out loss."""
    optimisers = optimisers_for(model)
    rng = Random(seed)
    source = batches(library, tokeniser, rng, schedule.step_tokens)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} weights", flush=True)
    model.train()
    started = saved = time.monotonic()
    step, recent = 0, 0.0
    while (progress := schedule.progress(step, time.monotonic() - started)) < 1:
        batch = next(source)
        loss = mean_loss(model, batch, far_positions(rng, batch.shape[0], batch.shape[1] - 1))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(progress, schedule.peak_lr)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        recent = loss.item() if step == 0 else 0.98 * recent + 0.02 * loss.item()
        step += 1
        if time.monotonic() - saved > CHECKPOINT_S:
            save_weights(model, out)
            saved = time.monotonic()
            report(step, progress, saved - started, recent, held_out_loss(model, held_out, tokeniser))
    save_weights(model, out)
    final = held_out_loss(model, held_out, tokeniser)
    report(step, 1.0, time.monotonic() - started, recent, final)
    return final


def report(step: int, progress: float, elapsed_s: float, recent: float, held_out: float) -> None:
    """One line of progress."""
    print(f"step {step} ({progress:.0%}, {elapsed_s:.0f} s): loss {recent:.3f}, held out {held_out:.3f}", flush=True)


def print_samples(folder: Path) -> None:
    """What the saved model says to a few prompts, greedily and at temperature 0.8."""
    tokeniser = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(folder).train(False)
    for prompt in SAMPLE_PROMPTS:
        ids = torch.tensor([tokeniser.encode(render_turn("user", prompt) + f"{TURN_START}assistant\n").ids])
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 0}):
            torch.manual_seed(0)
            output = model.generate(input_ids=ids, max_new_tokens=150, **options)
            answer = tokeniser.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=False)
            print(f"--- {prompt} {options}\n{answer}", flush=True)


def main() -> None:
    """The command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description="Train Kvasir's demo model from two books in the public domain.")
    parser.add_argument("--books", type=Path, required=True, help="folder with book_*.txt.gz")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to train (30)")
    parser.add_argument("--steps", type=int, help="train this many steps instead, whatever the clock says")
    parser.add_argument("--step-tokens", type=int, default=4096, help="tokens of a step (4096)")
    parser.add_argument("--start", type=Path, help="go on from the model in this folder, at a lower learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    books = [read_book(path) for path in sorted(arguments.books.glob("book_*.txt.gz"))]
    if not books:
        raise SystemExit(f"{arguments.books} holds no book_*.txt.gz: see the README for where to get the two books")
    # The end of each book is held out, so that the loss on unread text can be told.
    cuts = [round(len(book) * (1 - HELD_OUT_SHARE)) for book in books]
    read = [paragraph for book, cut in zip(books, cuts, strict=True) for paragraph in book[:cut]]
    held_out = [paragraph for book, cut in zip(books, cuts, strict=True) for paragraph in book[cut:]]

    arguments.out.mkdir(parents=True, exist_ok=True)
    tokeniser = train_tokeniser(read)
    save_tokeniser(tokeniser, arguments.out, max_tokens=MAX_TOKENS)
    peak_lr = CONTINUED_LR if arguments.start else PEAK_LR
    schedule = Schedule(arguments.minutes, arguments.steps, peak_lr, arguments.step_tokens)
    model = new_model(arguments.seed)
    if arguments.start:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(arguments.start, dtype=torch.float32).state_dict())
    train(model, Library.of(read), held_out, tokeniser, arguments.out, arguments.seed, schedule)
    print_samples(arguments.out)


if __name__ == "__main__":
    main()
