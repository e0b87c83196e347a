"""The demo model: a tiny Llama that comes with Kvasir, so that everything can be tried without a download.

It has about five million weights, was trained from scratch on two books in the public domain (Jane Austen's *Pride and
Prejudice* and Arthur Conan Doyle's *The Adventures of Sherlock Holmes*), and talks nonsense in their manner: it knows
nothing and its answers mean nothing. It is real in every respect that the engine cares about (a tokeniser, a chat
template, grouped key/value heads, rotary positions, 131,072 of them) and small enough for a CPU.

The books are free of copyright; the weights are under Kvasir's own licence, Apache-2.0. This module imports nothing
but the standard library; `tests.demo_model.train` is how the folder came to be.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""The folder with config.json, model.safetensors, tokenizer.json and chat_template.jinja."""
