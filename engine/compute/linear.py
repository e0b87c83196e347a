"""Linear layers in the layout that is computed fastest: forward.c's in float32, else oneDNN's.

With few rows, an ordinary linear layer reads its weights at a third of the memory's speed; packed once at load they are
read at all of it, which decides how fast a CPU decodes. The original weights are freed, so packing costs no memory,
except where an embedding is tied to the output layer. On a GPU, or where nothing can pack, layers stay as they are.

In float32 a packed layer computes a row the same way, bit for bit, whatever other rows are in the batch. oneDNN rounds
a single row otherwise than several on some processors, so it gets that row twice. Operators of torch that are not
public are found by name, and missed with a message instead of an error: a slower way is taken then. The range of
versions that they were seen in is in pyproject.toml.

engine/compute/fused.py builds a whole forward of these; engine/compute/model.py packs all other
models.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.compute.forward import PanelWeight, is_compiled

_REORDER: Final = "mkldnn::_reorder_linear_weight"
_POINTWISE: Final = "mkldnn::_linear_pointwise"
_QUICK: Final = {  # what torch.compile asks, too
    torch.bfloat16: "mkldnn::_is_mkldnn_bf16_supported",
    torch.float16: "mkldnn::_is_mkldnn_fp16_supported",
}
_X86: Final = {  # names of torch.cpu.get_capabilities; any of them will do
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}
_ROWS_HINT: Final = 256  # of the batch; with 1 the fp32 kernel for few rows rounds otherwise than the one for many


def has_onednn() -> bool:
    """Whether this torch computes with oneDNN on the CPU."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def is_quick(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for the dtype. Slow types are better computed in float32.

    oneDNN says yes to any AVX-512 and converts then: slower, and a row's bits depend on the number of rows."""
    if dtype == torch.float32:
        return True
    asks = find_operator(_QUICK[dtype]) if dtype in _QUICK else None
    if not (asks and asks()):
        return False
    has = _capabilities()
    return has.get("architecture") != "x86_64" or any(has.get(name) for name in _X86[dtype])


def _capabilities() -> dict[str, object]:
    """What torch says of this processor; nothing where it is a torch that does not say."""
    found: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return found


def is_bfloat16_quicker() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32. Intel's avx512_bf16 without AMX does not: float32 with
    weights of bfloat16 is 1.7 to 2.5 times as fast there. AMD's does by its tables, and was not measured."""
    has = _capabilities()
    is_amd = bool(has.get("avx512_bf16")) and str(has.get("cpu_name")).startswith("AMD")
    return has.get("architecture") != "x86_64" or bool(has.get("amx_bf16")) or is_amd


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `pack_weight` works here: oneDNN's is tried on a small one, because builds and processors differ."""
    if is_compiled(dtype, device):
        return True
    if device.type != "cpu" or not has_onednn() or not is_quick(dtype):
        return False
    if not all((find_operator(_REORDER), find_operator(_POINTWISE), find_operator(_POINTWISE, "binary"))):
        return False
    try:
        rows = torch.ones(2, 16, dtype=dtype)
        packed = PackedWeight(torch.ones(16, 16, dtype=dtype), None)
        return bool((packed.multiply(packed.swish(rows), rows) > 0).all())
    except RuntimeError:
        return False


def pack_weight(weight: Tensor, bias: Tensor | None) -> PanelWeight | PackedWeight:
    """weight (out_features, in_features); copied, the caller may free it. Only where can_pack says so."""
    return (PanelWeight if is_compiled(weight.dtype, weight.device) else PackedWeight)(weight, bias)


class PackedWeight:
    """A linear layer's weight and bias, packed by oneDNN; see engine.compute.forward.PanelWeight."""

    __slots__ = ("_apply", "_bias", "_combine", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight (out_features, in_features); copied, the caller may free it."""
        self.out_features, self.in_features = weight.shape
        reorder: Any = find_operator(_REORDER)
        self._weight = reorder(weight.detach().contiguous(), _ROWS_HINT)
        self._bias = None if bias is None else bias.detach().clone()
        self._apply: Any = find_operator(_POINTWISE)
        self._combine: Any = find_operator(_POINTWISE, "binary")

    def __call__(self, rows: Tensor) -> Tensor:
        out: Tensor = self._apply(_two(rows), self._weight, self._bias, "none", [], "")
        return out[: len(rows)]

    def swish(self, rows: Tensor) -> Tensor:
        out: Tensor = self._apply(_two(rows), self._weight, self._bias, "swish", [], "")
        return out[: len(rows)]

    def multiply(self, rows: Tensor, factor: Tensor) -> Tensor:
        out: Tensor = self._combine(_two(rows), _two(factor), self._weight, self._bias, "mul")
        return out[: len(rows)]

    def add(self, rows: Tensor, summand: Tensor) -> Tensor:
        out: Tensor = self._combine(_two(rows), _two(summand), self._weight, self._bias, "add")
        return out[: len(rows)]


def _two(rows: Tensor) -> Tensor:
    """(..., features); a single row twice."""
    return torch.cat((rows, rows)) if rows.numel() == rows.shape[-1] else rows


class PackedLinear(nn.Module):
    """Stands where a linear layer stood in a transformers model."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = pack_weight(weight, bias)
        self.in_features, self.out_features = self._packed.in_features, self._packed.out_features
        self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)  # models ask it for dtype and device

    def forward(self, rows: Tensor) -> Tensor:
        return self._packed(rows)


def pack(module: nn.Module) -> int:
    """Replaces every linear layer of a model by a packed one, in place. Returns how many; 0 where nothing can be
    packed.

    Subclasses (quantised layers, adapters) are left alone.
    """
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                weight, bias = child.weight, child.bias
            elif type(child) is Conv1D:
                weight, bias = child.weight.t(), child.bias
            else:
                continue
            if can_pack(weight.dtype, weight.device):
                setattr(parent, name, PackedLinear(weight, bias))
                count += 1
    return count


log = logging.getLogger(__name__)


@functools.cache
def find_operator(name: str, overload: str = "default") -> Any | None:
    """The overload of `namespace::name`; None where this torch has none, which is said once in the log."""
    namespace, _, plain = name.partition("::")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), plain), overload)
    except AttributeError:
        log.warning(
            "torch %s has no operator %s.%s: a slower way is taken (pyproject.toml has the versions that have it)",
            torch.__version__,
            name,
            overload,
        )
        return None
