"""Finds a model's files: its folder, the fingerprint of its weights, and what a gateway needs of its tokeniser.

No torch tensors here. Its neighbour engine/compute/model.py turns the files into a model that computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import xxhash

from engine.config import ConfigError
from engine.protocol import TokenizerFiles

DEMO: Final = "demo"
_READ_BYTES: Final = 16 << 20
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")  # the first pattern that finds files is what is loaded
_COMPANIONS: Final = ("*.json", "*.jinja", "*.model", "*.txt", "tokenizer*", "*.tiktoken")


class ModelError(ConfigError):
    """A model that cannot be served. The message says which, and why."""


def find_folder(model: str, revision: str | None) -> Path:
    """The folder with the files of `model`: `demo`, a folder, or a hub id (downloaded when it is not in the cache).

    Raises ModelError when there is no such model, or no way to fetch it.
    """
    if model == DEMO:
        from engine.demo import MODEL_DIR

        return MODEL_DIR
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelError(f"model {model!r}: there is no such folder, and it is not a hub id (owner/name)")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def fetch(patterns: Iterable[str]) -> Path:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))

    try:
        folder = fetch((*_COMPANIONS, _WEIGHTS[0]))
        return folder if _weight_files(folder) else fetch((*_COMPANIONS, _WEIGHTS[1]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model {model!r}: cannot be fetched from the hub: {reason}") from None


def fingerprint_weights(folder: Path) -> str:
    """Hex digest over names, sizes and contents of the weights and config.json: equal exactly when the model is.

    Reads every byte, which costs about as much as loading them does. Raises ModelError when there are no weights.
    """
    files = _weight_files(folder)
    if not files:
        raise ModelError(f"{folder}: there are no weights (*.safetensors or pytorch_model*.bin)")
    digest = xxhash.xxh3_128()
    for file in [folder / "config.json", *files]:
        try:
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while piece := stream.read(_READ_BYTES):
                    digest.update(piece)
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    for pattern in _WEIGHTS:
        if files := sorted(folder.glob(pattern)):
            return files
    return []


def read_tokenizer(folder: Path) -> tuple[TokenizerFiles, int | None]:
    """What a gateway needs to render and tokenise, and the tokeniser's own end-of-text id.

    Raises ModelError when the folder has no tokeniser, or one that the tokenizers library cannot express.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: its tokeniser cannot be read: {_first_line(error)}") from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{folder}: its tokeniser {type(tokenizer).__name__} has no tokenizer.json form")
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    with_prefix = tokenizer("a")["input_ids"]
    files = TokenizerFiles(
        tokenizer_json=backend.to_str(),
        chat_template=_default_template(tokenizer.chat_template),
        special_tokens={k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)},
        add_bos=len(with_prefix) > len(plain) and with_prefix[-len(plain) :] == plain,
    )
    return files, tokenizer.eos_token_id


def _default_template(template: Any) -> str | None:
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
