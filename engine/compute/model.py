"""Loads a model and proves that it computes what transformers computes.

Models are transformers' own implementations of decoder-only causal LMs, with our paged attention plugged in by name.
What the paged attention cannot express is refused here with the reason, never computed wrongly: the configuration is
read, and then a few tokens are run through both transformers' attention and ours, cut and mixed as a step may cut and
mix them, and compared. Its neighbours: engine/compute/model_files.py finds the files, engine/compute/linear.py and
engine/compute/fused.py make the model quick, engine/compute/runner.py runs it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
import transformers
from torch import Tensor, nn

from engine.compute.attention import StepAttention, UnsupportedAttentionError
from engine.compute.forward import is_compiled
from engine.compute.fused import fuse
from engine.compute.gguf_file import GGUFFile
from engine.compute.int4_folder import check_int4, read_int4
from engine.compute.kv_cache import STEP_BYTES, CacheShape, free_bytes
from engine.compute.linear import has_onednn, is_bfloat16_quicker, is_quick, pack
from engine.compute.lora import Adapter, Owners, adapter_bytes, attach, read_adapters, wrap
from engine.compute.machine import collapse, has_cuda
from engine.compute.model_files import (
    DEMO,
    ModelError,
    find_folder,
    fingerprint_cache,
    fingerprint_weights,
    read_tokenizer,
    weight_bytes,
)
from engine.compute.peaks import find_cost
from engine.compute.probe import compare, observe
from engine.compute.quantized_layers import Bits, assemble, pack_quantized, quantize_layers
from engine.config import EngineSettings
from engine.protocol import HashName, Namespace, TokenizerFiles
from engine.utilisation import Cost

__all__ = ["Forward", "LoadedModel", "ModelError", "load_model"]

log = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, StepAttention, Tensor], Tensor]
"""(tokens, positions, attention, rows) -> logits (len(rows), vocab_size); the first two are (num_tokens,) int64."""

_BITS: Final[dict[str, Literal[8, 4]]] = {"int8": 8, "int4": 4}
_NUMBER_BYTES: Final = {16: 2, 8: 1.01, 4: 0.76}  # of a weight with its scales
_CACHE_ROOM: Final = 2 << 30  # of memory that quantised weights leave for keys and values, or as much as the plain ones
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MODEL_FAILURES: Final = (RuntimeError, TypeError, AttributeError, LookupError, NotImplementedError, ValueError)
_ORDINARY: Final = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute, and everything the engine says about it."""

    name: str  # under which it is served
    forward: Forward
    device: torch.device
    dtype: torch.dtype
    cache_shape: CacheShape
    fingerprint: str  # of the weights and their configuration
    context_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    tokenizer: TokenizerFiles = field(repr=False)
    _: KW_ONLY
    cost: Cost | None = None  # of its steps; None: not known
    quantization: str = ""  # of weights that were quantised here: int8, int4
    is_fused: bool = False  # by engine/compute/fused.py; else transformers' own forward with packed linear layers
    adapters: tuple[tuple[str, str], ...] = ()  # names and fingerprints, by number from 1 on
    warnings: tuple[str, ...] = field(default=())  # what the start-up lines should say

    def namespace(self, block_size: int, hash_name: HashName) -> Namespace:
        """Identity of the blocks this model writes, with an empty salt."""
        return Namespace(
            weights=self.fingerprint,
            dtype=_plain(self.dtype),
            kv_dtype=_plain(self.cache_shape.dtype),
            block_size=block_size,
            quantization=self.quantization,
            hash_name=hash_name,
        )


class GenericForward:
    """transformers' own forward over a flat batch, with our attention."""

    def __init__(self, module: Any, owners: Owners) -> None:
        self._module, self._owners = module, owners

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Any, rows: Tensor) -> Tensor:
        self._owners.take(attention.adapters)
        output = self._module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            kvasir=attention,
        )
        logits: Tensor = output.logits[0]
        return logits


def load_model(settings: EngineSettings, *, fast: bool = True) -> LoadedModel:
    """Loads what the settings name.

    fast  False keeps transformers' layers as they are (the slow twin in tests)
    Raises ModelError with the reason when the model cannot be found, read or served.
    """
    # 1. Find it, and read what it says about itself.
    folder = find_folder(settings.model, settings.revision)
    gguf = GGUFFile(folder) if folder.is_file() else None
    config = _read_config(folder, settings.model, gguf)
    tokenizer, tokenizer_eos = read_tokenizer(folder)
    device = _choose_device(settings.device)
    dtype = _choose_dtype(settings.dtype, config, device)
    context_tokens, warnings = _context(settings, config)

    is_int4 = gguf is None and check_int4(config, settings.model)
    files, bits = folder if gguf is None else gguf, None
    if gguf is None and not is_int4 and device.type == "cpu":
        bits = _choose_bits(settings, folder, config, dtype)
    elif settings.quantize in _BITS:
        raise ModelError(
            f"engine.quantize {settings.quantize!r}: "
            + (f"weights on {device.type} are not quantised" if device.type != "cpu" else "its weights are already so")
            + f" (model {settings.model!r}); should be none or auto"
        )
    _check_memory(settings, files, config, dtype, device, bits)
    adapters: list[Adapter] = []
    if settings.lora:
        with torch.device("meta"):
            shapes: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        adapters = read_adapters(settings.adapters, shapes, _name(settings, folder))

    # 2. Load the weights and prove the attention.
    if gguf is not None:
        module = gguf.load(config, dtype).to(device)
    elif is_int4:
        module = assemble(config, dtype, read_int4(folder, config, settings.model), settings.model).to(device)
    else:
        module = _load_module(folder, settings.model, _saved(config) if bits else dtype, device)
        if bits:  # from what was saved: never the whole in floating point of 32 bits
            quantize_layers(module, bits, dtype)
    shape, forward, is_fused, cost = prepare(module, settings.model, context_tokens, fast=fast, adapters=adapters)
    if settings.kv_cache_dtype == "int8":
        shape = replace(shape, dtype=torch.int8)
        cost = cost and replace(cost, kv_bytes=shape.token_bytes // shape.num_layers)
    if device.type == "cpu":
        collapse()

    return LoadedModel(
        name=_name(settings, folder),
        forward=forward,
        device=device,
        dtype=dtype,
        cache_shape=shape,
        fingerprint=fingerprint_weights(folder, fingerprint_cache()),
        context_tokens=context_tokens,
        vocab_size=config.get_text_config().vocab_size,
        eos_ids=_eos_ids(module, config, tokenizer_eos),
        tokenizer=tokenizer,
        cost=cost,
        is_fused=is_fused,
        quantization=f"int{bits}" if bits in (8, 4) else "",
        adapters=tuple((one.name, one.fingerprint) for one in adapters),
        warnings=tuple(warnings),
    )


def check_draft(settings: EngineSettings) -> EngineSettings | None:
    """Settings to load the draft model with, None without one. Raises ModelError when it cannot be read, or when the
    two models do not mean the same by a token. Reads no weights."""
    if settings.draft_model is None:
        return None
    change: dict[str, Any] = {"model": settings.draft_model, "kv_cache_dtype": "auto", "lora": ""}
    change |= dict.fromkeys(("revision", "served_name", "max_context_tokens", "draft_model"))
    drafting = settings.model_copy(update=change)
    (size, tokens), (draft_size, draft_tokens) = map(_read_vocabulary, (settings, drafting))
    if draft_size != size:
        what = f"a vocabulary of {draft_size} tokens, and model {settings.model!r} one of {size}"
    elif draft_tokens != tokens:
        what = f"another tokeniser than model {settings.model!r}"
    else:
        return drafting
    raise ModelError(f"engine.draft_model {drafting.model!r} has {what}: it must be a smaller model of the same family")


def _read_vocabulary(settings: EngineSettings) -> tuple[int, tuple[Any, Any]]:
    folder = find_folder(settings.model, settings.revision)
    config = _read_config(folder, settings.model, GGUFFile(folder) if folder.is_file() else None)
    said = json.loads(read_tokenizer(folder)[0].tokenizer_json)
    return config.get_text_config().vocab_size, (said["model"], said["added_tokens"])


def prepare(
    module: Any, name: str, context_tokens: int, *, fast: bool = True, adapters: Sequence[Adapter] = ()
) -> tuple[CacheShape, Forward, bool, Cost | None]:
    """Plugs our attention into a loaded transformers model, and makes it quick when it can be proved equal.

    Takes the module over: its linear layers may be replaced and their weights freed.
    Returns the cache's shape, the forward, whether it is the fused one, and what its steps cost, if that is known.
    """
    module.eval().requires_grad_(False)
    title = f"model {name!r} ({type(module).__name__})"
    owners = Owners()
    with torch.inference_mode():
        try:
            shape, windows, expected = observe(module, context_tokens)
            cost = find_cost(module, shape, windows)
            by_path = attach(module, adapters)
            fused = fuse(module, context_tokens, windows, owners) if fast else None
            if fast and fused is None:
                pack(module)
                pack_quantized(module)
            if fused is None:
                wrap(module, by_path, owners)
            forward = fused or GenericForward(module, owners)
            compare(forward, shape, module, expected)
        except UnsupportedAttentionError as error:
            raise ModelError(f"{title} cannot be served: {error}") from None
        except _MODEL_FAILURES as error:
            raise ModelError(f"{title} cannot be run: {type(error).__name__}: {error}") from error
    return shape, forward, fused is not None, cost


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(settings: EngineSettings, folder: Path) -> str:
    if settings.served_name:
        return settings.served_name
    if settings.model == DEMO or not Path(settings.model).expanduser().exists():
        return settings.model
    return folder.resolve().name if folder.is_dir() else folder.stem


def _read_config(folder: Path, name: str, gguf: GGUFFile | None) -> Any:
    try:
        config: Any = gguf.read_config() if gguf else None
        config = config or transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model {name!r}: {str(error).splitlines()[0]}") from None
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise ModelError(f"model {name!r} is an encoder-decoder; only decoder-only causal LMs are served")
    unusual = {str(kind) for kind in getattr(text, "layer_types", None) or ()} - _ORDINARY
    if unusual:
        raise ModelError(f"model {name!r} has layers of kind {', '.join(sorted(unusual))}, which are not implemented")
    return config


def _choose_device(wanted: str) -> torch.device:
    if wanted == "auto":
        if has_cuda():
            log.warning(
                "a GPU is there, and the bundled engine computes on the CPU: with a `vllm` on the PATH (pip install "
                "vllm) and Kvasir's extra `fleet`, `kvasir serve` runs vLLM as its engine (docs/fleet.md)"
            )
        return torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ModelError(f"device {wanted!r}: should be cpu, cuda, cuda:1, ... or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {wanted!r}: this torch finds no GPU")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ModelError(
            f"device {wanted!r}: this torch finds {count} GPU{'s' * (count != 1)}, from cuda:0 on; engines of "
            'engine.device = "cuda" have one each, those of "cuda:0" share it'
        )
    if device.type == "cuda":
        log.warning("device %s: an experiment that is not measured; on a GPU run vLLM (docs/fleet.md)", wanted)
    return device


def _choose_dtype(wanted: str, config: Any, device: torch.device) -> torch.dtype:
    """What the model was saved in, if the device is quick at it; float32 otherwise."""
    if wanted != "auto":
        return _DTYPES[wanted]
    saved = _saved(config)
    if device.type != "cpu":
        return saved
    if _keep_bits(config, torch.float32) and not is_bfloat16_quicker():
        return torch.float32
    return saved if has_onednn() and is_quick(saved) else torch.float32


def _saved(config: Any) -> torch.dtype:
    return _DTYPES.get(_plain(config.dtype or config.get_text_config().dtype), torch.float32)


def _context(settings: EngineSettings, config: Any) -> tuple[int, list[str]]:
    """Tokens of context, and what was cut. Rotary positions whose table changes with the longest sequence of a batch
    (dynamic, longrope) would make one sequence's keys depend on another's, so those stay below the change."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    if not isinstance(longest, int):
        raise ModelError(f"model {settings.model!r} does not say how long its context is")
    warnings = []
    rope = getattr(text, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    if rope.get("rope_type") == "longrope" and original and original < longest:
        warnings.append(f"context cut from {longest} to {original} tokens: longrope's longer table is not implemented")
        longest = int(original)
    wanted = settings.max_context_tokens
    if wanted is not None and wanted > longest:
        raise ModelError(f"max_context_tokens {wanted}: model {settings.model!r} was made for at most {longest}")
    return wanted or longest, warnings


def _choose_bits(settings: EngineSettings, folder: Path, config: Any, dtype: torch.dtype) -> Bits | None:
    """Of each weight; 16 keeps it in bfloat16, None makes it `dtype`. `auto`: the most that fit beside a step and some
    cache."""
    kept = _keep_bits(config, dtype)
    name = "bfloat16" if kept else _plain(dtype)
    plain, free = _needed(folder, config, dtype, kept), free_bytes(torch.device("cpu"), settings.memory_bytes)
    if settings.quantize != "auto":
        if chosen := _BITS.get(settings.quantize):
            sizes = _needed(folder, config, dtype, chosen) / 1e9, plain / 1e9, name
            log.info("weights in int%d: %.1f GB, in place of %.1f GB in %s (engine.quantize)", chosen, *sizes)
        return chosen or kept
    least = STEP_BYTES + min(plain, _CACHE_ROOM)
    if plain + least <= free:
        return kept
    bits: Literal[8, 4] = 8 if _needed(folder, config, dtype, 8) + least <= free else 4
    log.info(
        "weights in int%d: in %s they take %.1f GB, and with a step and a cache %.1f GB are free (engine.quantize)",
        bits,
        name,
        plain / 1e9,
        (free - least) / 1e9,
    )
    return bits


def _keep_bits(config: Any, dtype: torch.dtype) -> Literal[16] | None:
    """16 where weights stay in bfloat16 and all else is float32: the numbers are the same, and half as large. Experts
    are computed by transformers, in one dtype."""
    has_experts = any("expert" in name for name in config.get_text_config().to_dict())
    narrow = _saved(config) == torch.bfloat16 and dtype == torch.float32
    return 16 if narrow and not has_experts and is_compiled(dtype, torch.device("cpu")) else None


def _needed(folder: Path, config: Any, dtype: torch.dtype, bits: Bits | None = None) -> int:
    """Bytes of memory for the weights of a folder."""
    number_bytes = dtype.itemsize if bits is None else _NUMBER_BYTES[bits]
    text = config.get_text_config()
    # A tied table is looked up in one form and multiplied with in another; the table is never quantised.
    tables = text.vocab_size * text.hidden_size * dtype.itemsize if bits or text.tie_word_embeddings else 0
    return weight_bytes(folder, number_bytes) + tables


def _check_memory(
    settings: EngineSettings,
    files: Path | GGUFFile,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    bits: Bits | None,
) -> None:
    """Raises ModelError when the weights and a step do not fit into what is free."""
    if isinstance(files, GGUFFile):
        need = files.weight_bytes(dtype.itemsize)
    elif device.type == "cpu":
        need = _needed(files, config, dtype, bits)
    else:
        need = weight_bytes(files, dtype.itemsize)
    need += adapter_bytes(settings.adapters)
    free = free_bytes(device, settings.memory_bytes)
    if need + STEP_BYTES > free:
        raise ModelError(
            f"model {settings.model!r} needs {need / 1e9:.1f} GB of memory for its weights in "
            f"{_name_bits(bits, dtype)} and {STEP_BYTES / 1e9:.1f} GB for steps; {free / 1e9:.1f} GB "
            "are free (engine.memory_bytes, the limit of the container, or the machine)"
        )


def _name_bits(bits: Bits | None, dtype: torch.dtype) -> str:
    return _plain(dtype) if bits is None else "bfloat16" if bits == 16 else f"int{bits}"


def _load_module(folder: Any, name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        module: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, trust_remote_code=False, low_cpu_mem_usage=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(f"model {name!r}: {str(error).splitlines()[0]}") from None
    return module.to(device)


def _eos_ids(module: Any, config: Any, tokenizer_eos: int | None) -> tuple[int, ...]:
    """The ids that end a text: the generation config's if it names any, else the model's and the tokeniser's."""
    generation = getattr(module, "generation_config", None)
    named = getattr(generation, "eos_token_id", None)
    if named is None:
        named = [config.get_text_config().eos_token_id, tokenizer_eos]
    flat = named if isinstance(named, list) else [named]
    ids: list[int] = []
    for item in flat:
        ids += item if isinstance(item, list) else [item] if isinstance(item, int) else []
    return tuple(dict.fromkeys(ids))
