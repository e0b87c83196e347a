"""The tokeniser and chat template of a server, from a folder or a hub id, without transformers.

What engine/compute/model_files.py reads for the bundled engine comes out the same, so that a replica and a bundled
engine of one model share a loaded tokeniser. Three things are left to transformers alone: tokenisers without a
tokenizer.json, special tokens that are only written in the code of a tokeniser's class, and repairs of known bad files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from engine.protocol import TokenizerFiles
from gateway.config import ReplicaSettings
from gateway.errors import NativeError
from gateway.native import no_panic
from gateway.replicas.base import ServerFacts
from gateway.replicas.calls import ServerError

MAX_FILE_BYTES: Final = 256 << 20
LOAD_TIMEOUT_S: Final = 120.0
"""To fetch the files of a hub id and to read them."""

HUB_TIMEOUT_S: Final = 10.0
"""To hear from the hub whether a file is there."""

_LIBRARY: Final = "a tokeniser's library"
_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelTokenizer(NamedTuple):
    """What a Hello says of a model, and the server itself does not."""

    files: TokenizerFiles
    eos_ids: tuple[int, ...]  # ids that end a text; empty where no file names any
    vocab_size: int


async def load_tokenizer(settings: ReplicaSettings, facts: ServerFacts) -> ModelTokenizer:
    """The configured tokeniser, else the one that the server names. Read in a thread; at most LOAD_TIMEOUT_S.

    Raises ServerError, with what to set, for one that is not here and cannot be fetched, or cannot be read.
    """
    source = settings.tokenizer or facts.tokenizer or facts.root
    said = "its tokenizer" if settings.tokenizer else "the tokeniser that the server names,"
    try:
        if not source:
            raise ValueError("the server names no model folder")
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            return await asyncio.to_thread(partial(read_folder, source))
    except TimeoutError:
        why = f"{said} {source!r}: not read within {LOAD_TIMEOUT_S:g} s"
    except (ValueError, OSError, NativeError) as error:
        why = f"{said} {source!r}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    hint = "set tokenizer to a folder with its tokenizer.json, or to a hub id (owner/name)"
    raise ServerError(f"replica {settings.name} ({settings.url}): {why}; {hint}")


def read_folder(source: str) -> ModelTokenizer:
    """Of a folder, or of a hub id, which is fetched if it is not in the cache. Blocks. Raises ValueError, OSError and
    NativeError."""
    folder = _find_folder(source)
    config, named = _read(folder, "tokenizer_config.json"), _read(folder, "special_tokens_map.json")
    model, generation = _read(folder, "config.json"), _read(folder, "generation_config.json")
    special = {name: text for name in _NAMED if (text := _text(config.get(name) or named.get(name)))}
    written = _bytes(folder / "tokenizer.json").decode()
    with no_panic(_LIBRARY):
        try:
            tokenizer = Tokenizer.from_str(written)
        except Exception as error:  # the library's own kind
            raise ValueError(f"its tokenizer.json cannot be read: {error}") from None
        _complete(tokenizer, config, special)
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        prefixed = tokenizer.encode("a").ids
        files = TokenizerFiles(
            tokenizer_json=tokenizer.to_str(),
            chat_template=_template(folder, config),
            special_tokens=special,
            add_bos=len(prefixed) > len(plain) and prefixed[-len(plain) :] == plain,
        )
        inner = inside if isinstance(inside := model.get("text_config"), dict) else model
        eos = generation.get("eos_token_id")
        if eos is None:
            eos = [inner.get("eos_token_id"), tokenizer.token_to_id(special.get("eos_token", ""))]
        vocab_size = inner.get("vocab_size")
        size = vocab_size if isinstance(vocab_size, int) else tokenizer.get_vocab_size()
    return ModelTokenizer(files, tuple(dict.fromkeys(_ids(eos))), size)


def speller(files: TokenizerFiles) -> Callable[[int], str]:
    """The text of a token id, also of a special one, for messages. Read when it is first asked for."""

    @lru_cache(maxsize=1)
    @no_panic(_LIBRARY)
    def tokenizer() -> Tokenizer:
        return Tokenizer.from_str(files.tokenizer_json)

    def spell(token: int) -> str:
        with no_panic(_LIBRARY):
            return str(tokenizer().decode([token], skip_special_tokens=False))

    return spell


def _find_folder(source: str) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        raise ValueError("there is no such folder on this machine, and it is no hub id")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ValueError("there is no such folder, and a hub id needs `pip install huggingface_hub`") from None
    try:
        return Path(snapshot_download(source, allow_patterns=list(_FILES), etag_timeout=HUB_TIMEOUT_S))
    except LocalEntryNotFoundError:
        raise ValueError("there is no such folder, and the hub cannot be reached") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise ValueError(f"there is no such folder, and the hub answers {status}") from None


def _bytes(file: Path) -> bytes:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{file.name} is larger than {MAX_FILE_BYTES >> 20} MiB")
        return file.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"it has no {file.name}") from None


def _read(folder: Path, name: str) -> Mapping[str, Any]:
    """The object in a file that may be missing."""
    if not (folder / name).is_file():
        return {}
    try:
        found = orjson.loads(_bytes(folder / name))
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"its {name} is no JSON object")
    return found


@no_panic(_LIBRARY)
def _complete(tokenizer: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """What transformers adds to a tokenizer.json: tokens that only the configuration has. It does not look at
    `add_bos_token` and `add_eos_token` where there is a tokenizer.json, which says what a text begins with."""
    added = {str(token.content) for token in tokenizer.get_added_tokens_decoder().values()}
    described = config.get("added_tokens_decoder")
    numbered = described.items() if isinstance(described, dict) else ()
    for _, token in sorted(numbered, key=lambda item: int(item[0])):
        if (text := _text(token)) and text not in added:
            flags = {flag: bool(token.get(flag)) for flag in ("special", "lstrip", "rstrip", "single_word")}
            tokenizer.add_tokens([AddedToken(text, normalized=bool(token.get("normalized", True)), **flags)])
            added.add(text)
    tokenizer.add_special_tokens([text for text in dict.fromkeys(special.values()) if text not in added])
    if tokenizer.post_processor is None:
        tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja is the newest place, tokenizer_config.json the oldest; the default one of several."""
    if (folder / "chat_template.jinja").is_file():
        return _bytes(folder / "chat_template.jinja").decode()
    found = config.get("chat_template") or _read(folder, "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _text(token: object) -> str:
    """A token, which is a text or an object with one."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _ids(value: object) -> list[int]:
    if isinstance(value, list):
        return [one for item in value for one in _ids(item)]
    return [value] if type(value) is int else []
