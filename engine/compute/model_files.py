"""Finds a model's files: its folder, the fingerprint of its weights, and what a gateway needs of its tokeniser.

No torch tensors here. Its neighbour engine/compute/model.py turns the files into a model that computes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import xxhash

from engine.config import ConfigError
from engine.protocol import TokenizerFiles

DEMO: Final = "demo"
_READ_BYTES: Final = 16 << 20
_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")  # the first pattern that finds files is what is loaded
_INTEGERS: Final = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_KEPT: Final = 64  # digests of models
_KEPT_BYTES: Final = 1 << 16
_COMPANIONS: Final = ("*.json", "*.jinja", "*.model", "*.txt", "tokenizer*", "*.tiktoken")


log = logging.getLogger(__name__)


class ModelError(ConfigError):
    """A model that cannot be served. The message says which, and why."""


def find_folder(model: str, revision: str | None) -> Path:
    """The folder with the files of `model`: `demo`, a folder, or a hub id (downloaded when it is not in the cache). A
    GGUF file stands for itself.

    Raises ModelError when there is no such model, or no way to fetch it.
    """
    if model == DEMO:
        from engine.demo import MODEL_DIR

        return MODEL_DIR
    folder = Path(model).expanduser()
    if folder.is_dir() or (folder.is_file() and folder.suffix == ".gguf"):
        return folder
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelError(f"model {model!r}: there is no such folder or .gguf file, and it is not a hub id (owner/name)")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def fetch(patterns: Iterable[str]) -> Path:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))

    try:
        folder = fetch((*_COMPANIONS, _WEIGHTS[0]))
        return folder if any(folder.glob(_WEIGHTS[0])) else fetch((*_COMPANIONS, _WEIGHTS[1]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model {model!r}: cannot be fetched from the hub: {reason}") from None


def weight_bytes(folder: Path, number_bytes: float) -> int:
    """Bytes of memory for all weights when a floating-point number of them takes `number_bytes`; integers stay as they
    are. Reads the headers of the files only. Raises ModelError for weights that are missing or cut short."""
    from safetensors import SafetensorError, safe_open

    total = 0.0
    for file in _weight_files(folder):
        if file.suffix != ".safetensors":
            total += file.stat().st_size / 2 * number_bytes  # of 16 bits each, or more
            continue
        try:
            with safe_open(file, "pt") as weights:
                parts = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 - it is no dict
                for part in parts:
                    floats = "F" in part.get_dtype()  # F32, BF16, F8_E4M3, ...; else I32, U8, BOOL
                    total += math.prod(part.get_shape()) * (number_bytes if floats else _INTEGERS[part.get_dtype()])
        except (SafetensorError, OSError, KeyError) as error:
            raise ModelError(f"{file}: cannot be read as safetensors: {first_line(error)}") from None
    return int(total)


def fingerprint_weights(folder: Path, cache: Path | None = None) -> str:
    """Hex digest over names, sizes and contents of the weights and config.json: equal exactly when the model is.

    Reads every byte, unless the file `cache` has the digest of files with these paths, sizes, times and inodes.
    Raises ModelError when there are no weights.
    """
    files = [folder] if folder.is_file() else [folder / "config.json", *_weight_files(folder)]
    try:
        identity = _identity(files)
        kept = _kept_digests(cache)
        if identity in kept:
            return kept[identity]
        digest = xxhash.xxh3_128()
        for file in files:
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while piece := stream.read(_READ_BYTES):
                    digest.update(piece)
        if cache is not None and identity == _identity(files):  # they were not written meanwhile
            _keep_digests(cache, {**kept, identity: digest.hexdigest()})
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def fingerprint_cache() -> Path | None:
    """Where digests are kept; None when the user has no home."""
    try:
        return Path.home() / ".cache" / "kvasir" / "fingerprints.json"
    except RuntimeError:
        return None


def _identity(files: Sequence[Path]) -> str:
    """Digest of what changes when one of the files is written or replaced."""
    facts = [
        (str(file.resolve()), now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino, now.st_dev)
        for file in files
        for now in [file.stat()]
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _kept_digests(cache: Path | None) -> dict[str, str]:
    """By identity, oldest first; empty when the file is not there, or not ours alone."""
    try:
        if cache is None or (now := cache.stat()).st_mode & 0o077 or now.st_uid != os.geteuid():
            return {}
        kept = json.loads(cache.read_bytes()[:_KEPT_BYTES])
        return {key: digest for key, digest in kept.items() if re.fullmatch("[0-9a-f]{32}", digest)}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _keep_digests(cache: Path, kept: dict[str, str]) -> None:
    """The last of them, readable by this user alone. A folder that cannot be written to keeps nothing."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, made = tempfile.mkstemp(dir=cache.parent)  # 0600
        with open(descriptor, "w", encoding="ascii") as stream:
            json.dump(dict(list(kept.items())[-_KEPT:]), stream)
        os.replace(made, cache)
    except OSError as error:
        log.debug("%s: %s", cache, error)


def _weight_files(folder: Path) -> list[Path]:
    """Raises ModelError when there are none."""
    for pattern in _WEIGHTS:
        if files := sorted(folder.glob(pattern)):
            return files
    raise ModelError(f"{folder}: there are no weights (*.safetensors or pytorch_model*.bin)")


def read_tokenizer(folder: Path) -> tuple[TokenizerFiles, int | None]:
    """What a gateway needs to render and tokenise, and the tokeniser's own end-of-text id.

    Raises ModelError when the folder or GGUF file has no tokeniser, or one that the tokenizers library cannot express.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if folder.is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder.parent), gguf_file=folder.name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: its tokeniser cannot be read: {first_line(error)}") from None
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


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
