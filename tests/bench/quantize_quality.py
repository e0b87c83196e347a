"""What quantised weights cost in quality: perplexity of a model on the books of a folder, in float32, int8 and int4.

    python -m tests.bench.quantize_quality --data DIR [--model FOLDER]

DIR has book_*.txt.gz. Of each book 8 windows of 512 tokens, evenly spread, are read from their first token on, with
transformers' attention and the engine's products. Prints the perplexities and what they are above float32's.
"""

from __future__ import annotations

import argparse
import gzip
import math
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch.nn import functional

from engine.compute.model_files import find_folder
from engine.compute.quantized_layers import pack_quantized, quantize_layers

WINDOW, PER_BOOK = 512, 8


def read_windows(data: Path, tokenizer: Any) -> torch.Tensor:
    windows = []
    for path in sorted(data.glob("book_*.txt.gz")):
        text = gzip.decompress(path.read_bytes()).decode()
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        windows += [ids[len(ids) * part // PER_BOOK :][:WINDOW] for part in range(PER_BOOK)]
    return torch.tensor(windows)


def load(folder: Path, bits: Literal[8, 4] | None) -> Any:
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    if bits:
        quantize_layers(module, bits, torch.float32)
        pack_quantized(module)
    return module


def perplexity(module: Any, windows: torch.Tensor) -> float:
    with torch.inference_mode():
        losses = [
            functional.cross_entropy(module(input_ids=some[None]).logits[0, :-1].float(), some[1:]) for some in windows
        ]
    return math.exp(torch.stack(losses).mean().item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    folder = find_folder(options.model, None)
    windows = read_windows(options.data, transformers.AutoTokenizer.from_pretrained(str(folder)))
    plain = perplexity(load(folder, None), windows)
    print(f"{options.model}: {windows.numel()} tokens; float32 {plain:.4f}")
    for bits in (8, 4):
        found = perplexity(load(folder, bits), windows)
        print(f"  int{bits} {found:.4f}  {found / plain - 1:+.2%}")


if __name__ == "__main__":
    main()
