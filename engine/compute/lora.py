"""LoRA adapters: read from PEFT's files, checked against a model, and computed beside its products.

    rows @ weight.T + scale * (rows @ A.T) @ B.T    for the rows of sequences that have the adapter

A and B are products of forward.c, so a row's numbers depend on no other row and on no other adapter, and rows without
one are computed as if there were none. engine/compute/fused.py and engine/compute/model.py say which rows have which.
Sources: arXiv 2106.09685; PEFT's checkpoint format (huggingface.co/docs/peft/developer_guides/checkpoint).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from engine.compute.forward import PanelWeight, is_compiled
from engine.compute.model_files import ModelError, first_line

_PART: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
WEIGHTS: Final = "adapter_model.safetensors"
_PLAIN_STARTS: Final = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the base's weights, too
_UNSUPPORTED: Final = {  # keys of adapter_config.json that change what is computed: what they are called
    "use_dora": "DoRA",
    "modules_to_save": "modules_to_save",
    "lora_bias": "biases of its own",
    "layer_replication": "layer_replication",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "target_parameters",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "use_qalora": "QA-LoRA",
}

Pair = tuple[Tensor, Tensor]
"""A (rank, in_features) and B (out_features, rank) times the scale, float32."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """`pairs` are by the path of the layer that they change; `fingerprint` is of the files."""

    name: str
    fingerprint: str
    pairs: Mapping[str, Pair]


class Rows(NamedTuple):
    """Rows of a product's input that have an adapter: `where` is a slice if they are adjacent."""

    adapter: int  # from 1
    where: slice | Tensor
    size: int


class Owners:
    """Which rows of what is computed next have which adapter. The forward says so, on the engine's one thread."""

    def __init__(self) -> None:
        self.groups: tuple[Rows, ...] = ()

    def take(self, adapters: Tensor | None) -> None:
        """adapters  (rows,) int64 number of each row's adapter, 0 without one; None: no row has one"""
        groups = []
        for number in [] if adapters is None else torch.unique(adapters).tolist():
            if number:
                index = (adapters == number).nonzero().flatten()
                first, behind = int(index[0]), int(index[-1]) + 1
                together = behind - first == len(index)
                groups.append(Rows(number, slice(first, behind) if together else index, len(index)))
        self.groups = tuple(groups)


class AdaptedWeight:
    """A product with adapters beside it; the interface is that of engine.compute.forward.PanelWeight.

    Where rows are float32, those without an adapter have the same bits as without this.
    """

    def __init__(self, base: Any, pairs: Mapping[int, Pair], owners: Owners) -> None:
        """pairs  by the number of the adapter; copied"""
        self.base, self._owners = base, owners
        self._pairs = {number: (_product(down), _product(up)) for number, (down, up) in pairs.items()}
        self.in_features, self.out_features = (next(iter(pairs.values()))[side].shape[1 - side] for side in (0, 1))

    def __call__(self, rows: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)"""
        out: Tensor = self.base(rows)
        if groups := self._groups():
            flat, source = out.view(-1, self.out_features), rows.reshape(-1, self.in_features)
            for index, _, (down, up) in groups:
                flat[index] = up.add(down(source[index].float()), flat[index].float()).to(flat.dtype)
        return out

    def swish(self, rows: Tensor) -> Tensor:
        groups = self._groups()
        if sum(count for _, count, _ in groups) < len(rows):
            out: Tensor = self.base.swish(rows)
        else:
            out = rows.new_empty(len(rows), self.out_features)
        for index, _, (down, up) in groups:
            some = rows[index]
            out[index] = up.add_swish(down(some.float()), self.base(some).float()).to(out.dtype)
        return out

    def multiply(self, rows: Tensor, factor: Tensor) -> Tensor:
        if self._groups():
            return self(rows).mul_(factor)
        out: Tensor = self.base.multiply(rows, factor)
        return out

    def add(self, rows: Tensor, summand: Tensor) -> Tensor:
        if self._groups():
            return self(rows).add_(summand)
        out: Tensor = self.base.add(rows, summand)
        return out

    def _groups(self) -> list[tuple[slice | Tensor, int, tuple[Any, Any]]]:
        pairs = self._pairs
        return [(where, size, pairs[one]) for one, where, size in self._owners.groups if one in pairs]


class AdaptedLinear(nn.Module):
    """Stands where a linear layer stood in a transformers model."""

    def __init__(self, layer: Any, pairs: Mapping[int, Pair], owners: Owners) -> None:
        super().__init__()
        self.layer, self.weight = layer, layer.weight  # models ask it for dtype and device
        self._product = AdaptedWeight(layer, pairs, owners)

    def forward(self, rows: Tensor) -> Tensor:
        return self._product(rows)


class _Plain:
    """PanelWeight in torch, where forward.c does not compute."""

    def __init__(self, weight: Tensor, bias: None) -> None:
        self._weight = weight

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._weight)

    def add(self, rows: Tensor, summand: Tensor) -> Tensor:
        return self(rows) + summand

    def add_swish(self, rows: Tensor, summand: Tensor) -> Tensor:
        return functional.silu(self(rows) + summand)


def _product(weight: Tensor) -> PanelWeight | _Plain:
    return (PanelWeight if is_compiled(weight.dtype, weight.device) else _Plain)(weight, None)


def pairs_of(*layers: Any) -> dict[int, Pair]:
    """Of layers with the same input whose outputs stand side by side, what `attach` left with them."""
    own = [(layer.out_features, getattr(layer, "adapters", {})) for layer in layers]
    joined = {}
    for number in sorted({number for _, pairs in own for number in pairs}):
        downs = [pairs[number][0] for _, pairs in own if number in pairs]
        ups = [pairs[number][1] if number in pairs else downs[0].new_zeros(out, 0) for out, pairs in own]
        joined[number] = torch.cat(downs), torch.block_diag(*ups)  # type: ignore[no-untyped-call]
    return joined


def attach(module: Any, adapters: Sequence[Adapter]) -> dict[str, dict[int, Pair]]:
    """Leaves with each layer what adapters, by their numbers from 1, change of it. Returns the same by path."""
    by_path: dict[str, dict[int, Pair]] = {}
    for number, adapter in enumerate(adapters, 1):
        for path, pair in adapter.pairs.items():
            layer = module.get_submodule(path)
            down, up = (one.to(layer.weight.device) for one in pair)
            by_path.setdefault(path, {})[number] = down, up
            layer.adapters = by_path[path]
    return by_path


def wrap(module: Any, by_path: Mapping[str, dict[int, Pair]], owners: Owners) -> None:
    """Puts an AdaptedLinear in place of each layer."""
    for path, pairs in by_path.items():
        module.set_submodule(path, AdaptedLinear(module.get_submodule(path), pairs, owners))


def read_adapters(folders: Mapping[str, Path], model: Any, served: str) -> list[Adapter]:
    """The adapters by their names.

    model   the transformers model, perhaps on the meta device; only the shapes of its layers are looked at
    served  the name that it is served under
    Raises ModelError for a folder that cannot be read or carried out, and for an adapter of another model.
    """
    head = model.get_output_embeddings()
    shapes = {
        path: tuple(layer.weight.shape[:: -1 if type(layer) is Conv1D else 1])
        for path, layer in model.named_modules()
        if type(layer) in (nn.Linear, Conv1D) and layer is not head and ".experts." not in path
    }
    if served in folders:
        raise ModelError(f"engine.lora: {served!r} is the model's own name; an adapter needs another")
    return [_read(name, folder.expanduser(), shapes) for name, folder in folders.items()]


def adapter_bytes(folders: Mapping[str, Path]) -> int:
    """Of memory for all adapters, whose files have 16 bits for a number or more; 0 for files that are not there."""
    files = (folder.expanduser() / WEIGHTS for folder in folders.values())
    return sum(2 * file.stat().st_size for file in files if file.is_file())


def _read(name: str, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Adapter:
    title = f"engine.lora: adapter {name!r} ({folder})"
    try:
        text = (folder / "adapter_config.json").read_bytes()
        data = (folder / WEIGHTS).read_bytes()
        tensors, config = _load(data), json.loads(text)
        if reason := _find_unsupported(config):
            raise ValueError(f"{reason} is not supported; a plain LoRA of linear layers is")
        pairs = _pair(tensors, config, shapes)
    except OSError as error:
        raise ModelError(f"{title}: {error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"{title}: {first_line(error)}") from None
    digest = xxhash.xxh3_128(text + b"\0")
    digest.update(data)
    return Adapter(name, digest.hexdigest(), pairs)


def _load(data: bytes) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except SafetensorError as error:
        raise ValueError(f"{WEIGHTS} is cut short or damaged: {first_line(error)}") from None


def _find_unsupported(config: dict[str, Any]) -> str | None:
    if config["peft_type"] != "LORA":
        return f"peft_type {config['peft_type']!r}"
    if config.get("bias", "none") != "none":
        return f"bias {config['bias']!r}"
    if (start := config.get("init_lora_weights")) not in _PLAIN_STARTS:
        return f"init_lora_weights {start!r}"
    return next((title for key, title in _UNSUPPORTED.items() if config.get(key)), None)


def _pair(
    tensors: Mapping[str, Tensor], config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Pair]:
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if (found := _PART.fullmatch(key)) is None:
            raise ValueError(f"its weight {key} is not supported; lora_A and lora_B of linear layers are")
        if not tensor.isfinite().all():
            raise ValueError(f"its weight {key} is not finite")
        sides.setdefault(found[1], {})[found[2]] = tensor.float()
    wanted = config.get("target_modules")
    for target in wanted if isinstance(wanted, list) else []:
        if not any(f".{path}".endswith(f".{target}") for path in sides):
            raise ValueError(f"it has no weights for {target!r} of its target_modules: are its files whole?")
    if not sides:
        raise ValueError("it has no weights")
    pairs = {}
    for path, side in sorted(sides.items()):
        if path not in shapes:
            raise ValueError(f"a LoRA of another model: this one has no linear layer {path} that it can be added to")
        rank = int(_setting(config, "rank_pattern", path, config["r"]))
        outputs, inputs = shapes[path]
        got, should = {key: tuple(one.shape) for key, one in side.items()}, {"A": (rank, inputs), "B": (outputs, rank)}
        if got != should:
            raise ValueError(f"a LoRA of another model: {path} has the shapes {got}; should be {should}")
        alpha = float(_setting(config, "alpha_pattern", path, config["lora_alpha"]))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        pairs[path] = side["A"], side["B"] * scale
    return pairs


def _setting(config: dict[str, Any], pattern: str, path: str, usual: Any) -> Any:
    """What a pattern says of a layer; the first that matches, as in PEFT."""
    found = (value for key, value in (config.get(pattern) or {}).items() if re.match(rf"(.*\.)?({key})$", path))
    return next(found, usual)
