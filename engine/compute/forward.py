"""What a forward computes besides attention: by forward.c in float32 on the CPU, by torch elsewhere.

A row's numbers never depend on the rows beside it where forward.c computes them. engine/compute/linear.py gives models
their weights, engine/compute/fused.py is a forward made of these. One thread at a time calls them: the engine's.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.compute.kernel import Product, Rows, find_parallel, kind_of, load_library, supported

PANEL: Final = 16  # of the source: outputs whose weights lie together
PANELS: Final = 4  # of the source: their number is a multiple of it
_KEEP, _SWISH, _MULTIPLY, _ADD, _ADD_SWISH = range(5)  # of the source


def is_compiled(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether forward.c computes."""
    return device.type == "cpu" and dtype == torch.float32 and load_library() is not None


def is_narrow(weight: Tensor) -> bool:
    """Whether all numbers of a float32 weight are of bfloat16."""
    return not (weight.detach().contiguous().view(torch.int32) & 0xFFFF).any()


class PanelWeight:
    """A linear layer's weight and bias in the order of forward.c, and the products that can be fused with it.

    A weight whose numbers are all of bfloat16, as those of most models are, is kept in that: it takes half the memory
    and time to read, and changes no bit. All take rows (..., in_features) and return (..., out_features), and never
    change an argument.
    """

    __slots__ = ("_held", "call", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight (out_features, in_features) float32 or bfloat16; copied, the caller may free it."""
        self.out_features, self.in_features = weight.shape
        more = -self.out_features % (PANEL * PANELS)
        if weight.dtype == torch.float32 and is_narrow(weight):
            weight = weight.bfloat16()
        panels = functional.pad(weight.detach(), (0, 0, 0, more)).view(-1, PANEL, self.in_features)
        held = panels.transpose(1, 2).contiguous(), None if bias is None else functional.pad(bias.detach(), (0, more))
        self._held = held
        self.call = Product(
            weight=held[0].data_ptr(),
            bias=None if held[1] is None else held[1].data_ptr(),
            in_features=self.in_features,
            out_features=self.out_features,
            out_stride=self.out_features,
            variant=_variant(),
            kind=kind_of(weight.dtype),
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """rows @ weight.T + bias"""
        return self._multiply(rows, _KEEP)

    def swish(self, rows: Tensor) -> Tensor:
        """silu(rows @ weight.T + bias)"""
        return self._multiply(rows, _SWISH)

    def multiply(self, rows: Tensor, factor: Tensor) -> Tensor:
        """(rows @ weight.T + bias) * factor"""
        return self._multiply(rows, _MULTIPLY, factor)

    def add(self, rows: Tensor, summand: Tensor) -> Tensor:
        """rows @ weight.T + bias + summand"""
        return self._multiply(rows, _ADD, summand)

    def add_swish(self, rows: Tensor, summand: Tensor) -> Tensor:
        """silu(rows @ weight.T + bias + summand)"""
        return self._multiply(rows, _ADD_SWISH, summand)

    def _multiply(self, rows: Tensor, then: int, other: Tensor | None = None) -> Tensor:
        flat = rows if rows.dim() == 2 and rows.stride(1) == 1 else rows.reshape(-1, self.in_features).contiguous()
        out = torch.empty(flat.shape[0], self.out_features)
        call = self.call
        call.rows, call.num_rows, call.row_stride = flat.data_ptr(), flat.shape[0], flat.stride(0)
        call.out, call.then = out.data_ptr(), then
        if other is not None:
            other = other.contiguous()
            call.other = other.data_ptr()
        _compute("kvasir_multiply", call)
        return out if rows.dim() == 2 else out.view(*rows.shape[:-1], self.out_features)


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """rows / sqrt(mean(rows ** 2) + epsilon) * weight over the last dimension, in float32 within; returns rows' dtype.

    weight  float32, times the root of its size
    Source: arXiv 1910.07467.
    """
    size = rows.shape[-1]
    if rows.dim() == 2 and is_compiled(rows.dtype, rows.device):
        out = torch.empty(rows.shape)
        _call_rows(rows, out, 1, weight, epsilon * size)
        return out
    wide = rows.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = norm.mul_(norm).add_(epsilon * size).rsqrt_()
    scaled = torch.mul(wide, inverse) if wide is rows else wide.mul_(inverse)
    return scaled.mul_(weight).to(rows.dtype)


def turn(
    state: Tensor, heads: int, norm: Tensor | None, epsilon: float, tables: tuple[Tensor, Tensor], positions: Tensor
) -> None:
    """Norms the first heads of each row, where there is a norm, and turns them by the row's position, in place.

    state      (rows, more heads, head_dim), contiguous
    norm       (heads, head_dim), as for rms_norm, or None
    tables     cosines and sines, (positions, head_dim) each, for x * cos + roll(x, head_dim / 2) * sin
    positions  (rows,) int64
    """
    if is_compiled(state.dtype, state.device):
        _call_rows(state, state, heads, norm, epsilon * state.shape[2], tables, positions.contiguous())
        return
    source = state[:, :heads]
    if norm is not None:
        source = rms_norm(source, norm, epsilon)
    cos, sin = (table.index_select(0, positions)[:, None] for table in tables)
    torch.addcmul(source * cos, source.roll(state.shape[2] // 2, -1), sin, out=state[:, :heads])


def _call_rows(
    rows: Tensor,
    out: Tensor,
    heads: int,
    weight: Tensor | None,
    epsilon: float,
    tables: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
) -> None:
    call = Rows(
        rows=rows.data_ptr(),
        out=out.data_ptr(),
        weight=None if weight is None else weight.data_ptr(),
        num_rows=rows.shape[0],
        row_stride=rows.stride(0),
        out_stride=out.stride(0),
        heads=heads,
        dim=rows.shape[-1],
        epsilon=epsilon,
        variant=_variant(),
    )
    if tables is not None and positions is not None:
        call.cos, call.sin, call.positions = tables[0].data_ptr(), tables[1].data_ptr(), positions.data_ptr()
    _compute("kvasir_turn", call)


def _compute(name: str, call: Product | Rows) -> None:
    library = load_library()
    assert library is not None, "there is nothing to call"
    call.threads, call.parallel = torch.get_num_threads(), find_parallel()
    getattr(library, name)(ctypes.byref(call))


def _variant() -> int:
    return supported(torch.float32, 1)[-1]
