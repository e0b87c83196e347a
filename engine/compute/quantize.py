"""Weights in 8 or 4 bits, and products with them.

A weight (out, in) is cut into groups of `group` inputs of one output, each with a scale and perhaps a minimum of its
own: w = q * scale + minimum. A product rounds each row of activations to 8 bits, per run of 32 inputs (16 with groups
of 16) by its largest number, so that the inner products are of whole numbers and exact; they are multiplied with both
scales and added in float32, run after run, in this order whatever computes them. So a row's numbers never depend on
the rows beside it, on threads or on the instruction set. `multiply_slowly` is the definition, and what computes where
there is no compiler. The formats of llama.cpp's Q8_0, Q4_0, Q4_1, Q4_K and Q6_K map to these without loss.

What is quantised here is rotated before: each run of inputs is multiplied with a Hadamard matrix, in the weight and in
a product's rows, which leaves their inner product as it is. It spreads a run's outliers, which would make all other
numbers of the run coarse (QuaRot, https://arxiv.org/abs/2404.00456; there of whole rows).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from engine.compute.kernel import PRODUCT_VARIANTS, QuantizedBlocks, find_parallel, load_products

log = logging.getLogger(__name__)

RUN: Final = 32  # inputs whose activations share a scale
_BLOCK: Final = 16  # outputs that lie together in products.c
_SLOW_FLOATS: Final = 16 << 20  # of inner products that the slow way holds at a time
_NOTHING, _SWISH, _MULTIPLY, _ADD = range(4)  # what products.c does with a product


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight (out, in) as w = q * scale + minimum.

    bits    8 or 4
    values  int8 (out, in); with 4 bits uint8 (out, in / 2), two numbers in each, the first in the low half: q is
            0 .. 15 with minima, and the number less 8 without
    scales  float32 (out, in / group)
    minima  the same shape, or None
    group   inputs that share a scale: 16 (8 bits only), a multiple of 32, or all
    rotated whether w is the weight times a Hadamard matrix of each run, and a product's rows have to be turned, too
    """

    bits: Literal[8, 4]
    values: Tensor
    scales: Tensor
    minima: Tensor | None
    group: int
    rotated: bool = False

    def __post_init__(self) -> None:
        out, inputs = self.shape
        if self.group != inputs and self.group % RUN and (self.group, self.bits) != (16, 8):
            raise ValueError(f"groups of {self.group} in {self.bits} bits: should be 32, 64, ..., or 16 in 8 bits")
        wanted = (out, inputs // self.group)
        shapes = [tuple(one.shape) for one in (self.scales, self.minima) if one is not None]
        if inputs % self.group or any(shape != wanted for shape in shapes):
            raise ValueError(f"scales {shapes} of a weight {self.shape} in groups of {self.group}: should be {wanted}")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        out, width = self.values.shape
        return out, width * (8 // self.bits)

    @property
    def run(self) -> int:
        """Inputs whose activations share a scale."""
        return RUN if self.group == self.shape[1] else min(RUN, self.group)

    @property
    def nbytes(self) -> int:
        """Of values, scales and minima."""
        return sum(one.nbytes for one in (self.values, self.scales, self.minima) if one is not None)


def quantize(weight: Tensor, bits: Literal[8, 4], group: int | None = None) -> Quantized:
    """The nearest weight in so many bits: symmetric in 8, between the least and the largest of a group in 4. Rotated
    where runs of 32 are whole.

    weight  (out, in), of floating point
    group   inputs that share a scale; None: all in 8 bits; in 4 bits 32, or all where `in` is not a multiple
    """
    out, inputs = weight.shape
    group = group or (RUN if bits == 4 and inputs % RUN == 0 else inputs)
    weight = weight.detach().float()
    if rotated := group != 16 and inputs % RUN == 0:
        weight = _rotate_weight(weight) / RUN
    parts = weight.view(out, -1, group)
    if bits == 8:
        scales = parts.abs().amax(-1) / 127
        values = _divide(parts, scales).round_().to(torch.int8)
        return Quantized(8, values.view(out, inputs), scales, None, group, rotated)
    least, most = parts.aminmax(dim=-1)
    scales = (most - least) / 15
    numbers = _divide(parts - least[..., None], scales).round_().clamp_(0, 15).to(torch.uint8).view(out, inputs)
    return Quantized(4, pack_nibbles(numbers), scales, least, group, rotated)


def rotate(rows: Tensor) -> Tensor:
    """Each run of float32 (..., in) times the Hadamard matrix of 32; twice is 32 times the rows."""
    runs = rows.reshape(-1, RUN)
    for _ in range(RUN.bit_length() - 1):
        first, second = runs.chunk(2, -1)
        runs = torch.stack((first + second, first - second), -1).flatten(-2)
    return runs.view(rows.shape)


def _rotate_weight(weight: Tensor) -> Tensor:
    """As `rotate`, ten times as quick, with other last bits."""
    return (weight.reshape(-1, RUN) @ rotate(torch.eye(RUN))).view(weight.shape)


def _divide(parts: Tensor, scales: Tensor) -> Tensor:
    return parts / torch.where(scales > 0, scales, 1)[..., None]


def pack_nibbles(numbers: Tensor) -> Tensor:
    """uint8 (out, in), each 0 .. 15 -> (out, in / 2), the first of two in the low half."""
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def _numbers(q: Quantized) -> Tensor:
    """q of each weight, float32 (out, in)."""
    if q.bits == 8:
        return q.values.float()
    numbers = torch.stack((q.values & 15, q.values >> 4), -1).view(q.shape).float()
    return numbers if q.minima is not None else numbers - 8


def dequantize(q: Quantized) -> Tensor:
    """float32 (out, in)"""
    weight = _numbers(q).view(q.shape[0], -1, q.group) * q.scales[..., None]
    if q.minima is not None:
        weight += q.minima[..., None]
    return _rotate_weight(weight.view(q.shape)) if q.rotated else weight.view(q.shape)


def round_rows(rows: Tensor, run: int) -> tuple[Tensor, Tensor]:
    """float32 (num_rows, in) -> whole numbers in float32 (num_rows, runs, run), -127 .. 127, and their scales
    (num_rows, runs). The last run is filled with zeros. What is not finite has a scale that is not finite."""
    count, inputs = rows.shape
    parts = functional.pad(rows, (0, -inputs % run)).view(count, -(-inputs // run), run)
    most = parts.abs().amax(-1)
    inverse = torch.where(most > 1e-30, torch.full_like(most, 127) / most, 0)  # 127 / most is 127 * (1 / most) to torch
    return (parts * inverse[..., None]).round_(), most / 127


def multiply_slowly(rows: Tensor, q: Quantized) -> Tensor:
    """float32 (num_rows, in) -> (num_rows, out): the definition of a product, bit for bit."""
    out, inputs = q.shape
    run = q.run
    weight = functional.pad(_numbers(q), (0, -inputs % run)).view(out, -1, run).permute(1, 2, 0)
    runs_of = -(-q.group // run)  # runs that share a scale
    answers = []
    for some in torch.split(rows, max(1, _SLOW_FLOATS // (len(weight) * out))):
        x, scale = round_rows(rotate(some) if q.rotated else some, run)
        inner, whole = x.transpose(0, 1) @ weight, x.sum(-1)  # exact: below 2 ** 24
        answer = torch.zeros(len(some), out)
        for i in range(len(weight)):
            answer += inner[i] * (scale[:, i, None] * q.scales[:, i // runs_of])
            if q.minima is not None:
                answer += (whole[:, i] * scale[:, i])[:, None] * q.minima[:, i // runs_of]
        answers.append(answer)
    return torch.cat(answers)


class QuantizedWeight:
    """A linear layer's quantised weight and its bias, with the interface of engine.compute.linear.PackedWeight.

    Has them in the order of products.c, or as they are where that cannot be compiled.
    """

    __slots__ = ("_bias", "_held", "_library", "_weight", "blocks", "in_features", "out_features")

    def __init__(self, weight: Quantized, bias: Tensor | None, variant: int | None = None) -> None:
        """Copied, the caller may free them. variant: of products.c, for tests."""
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().float().clone()
        self._library = load_products()
        self.blocks: QuantizedBlocks | None = None
        if self._library is None:
            self._weight = weight
            return
        self._held = values, scales, minima = _pack(weight)
        run = weight.run
        self.blocks = QuantizedBlocks(
            values=values.data_ptr(),
            scales=scales.data_ptr(),
            minima=None if minima is None else minima.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            inputs=self.in_features,
            outputs=self.out_features,
            run=run,
            group_runs=-(-weight.group // run),
            bits=weight.bits,
            variant=choose_variant() if variant is None else variant,
            rotated=weight.rotated,
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """rows @ weight.T + bias"""
        return self._multiply(rows, _NOTHING)

    def swish(self, rows: Tensor) -> Tensor:
        """silu(rows @ weight.T + bias)"""
        return self._multiply(rows, _SWISH)

    def multiply(self, rows: Tensor, factor: Tensor) -> Tensor:
        """(rows @ weight.T + bias) * factor"""
        return self._multiply(rows, _MULTIPLY, factor)

    def add(self, rows: Tensor, summand: Tensor) -> Tensor:
        """rows @ weight.T + bias + summand"""
        return self._multiply(rows, _ADD, summand)

    def _multiply(self, rows: Tensor, finish: int, other: Tensor | None = None) -> Tensor:
        shape, dtype = (*rows.shape[:-1], self.out_features), rows.dtype
        if dtype != torch.float32:
            rows, other = rows.float(), None if other is None else other.float()
        if self._library is None or self.blocks is None:
            return self._slowly(rows.reshape(-1, self.in_features), finish, other).view(shape).to(dtype)
        rows, out = rows.contiguous(), torch.empty(shape)
        if other is not None:
            other = other.contiguous()
        failed = self._library.kvasir_products(
            ctypes.addressof(self.blocks),
            rows.data_ptr(),
            rows.numel() // self.in_features,
            out.data_ptr(),
            self.out_features,
            None if other is None else other.data_ptr(),
            finish,
            torch.get_num_threads(),
            find_parallel(),
        )
        if failed:
            raise MemoryError("no memory for a product's rows")
        return out if dtype == torch.float32 else out.to(dtype)

    def _slowly(self, rows: Tensor, finish: int, other: Tensor | None) -> Tensor:
        answer = multiply_slowly(rows, self._weight)
        if self._bias is not None:
            answer += self._bias
        if other is None:
            return functional.silu(answer) if finish == _SWISH else answer
        other = other.reshape(answer.shape)
        return answer * other if finish == _MULTIPLY else answer + other


def _pack(q: Quantized) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, scales and minima in the order of products.c: blocks of 16 outputs, four inputs of each together."""
    out, inputs = q.shape
    numbers = q.values.view(torch.uint8)
    if q.bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), -1).view(out, inputs)
    numbers = functional.pad(numbers, (0, -inputs % q.run, 0, -out % _BLOCK))
    quads = numbers.view(-1, _BLOCK, numbers.shape[1] // 4, 4).transpose(1, 2)
    if q.bits == 4:
        quads = quads[:, ::2] | quads[:, 1::2] << 4
    scales, minima = _pack_side(q.scales), None if q.minima is None else _pack_side(q.minima)
    return quads.clone(memory_format=torch.contiguous_format), scales, minima


def _pack_side(side: Tensor) -> Tensor:
    """(out, groups) -> (blocks, groups, 16)"""
    filled = functional.pad(side, (0, 0, 0, -len(side) % _BLOCK)).view(-1, _BLOCK, side.shape[1])
    return filled.transpose(1, 2).clone(memory_format=torch.contiguous_format)


@functools.cache
def choose_variant() -> int:
    """The quickest instruction set of products.c that this processor has and that computes what is defined, as a small
    product shows."""
    library = load_products()
    assert library is not None
    generator = torch.Generator().manual_seed(5)
    rows, weight = (torch.randn(count, 64, generator=generator) for count in (9, 17))
    tried = [quantize(weight, 8), quantize(weight, 4)]
    for variant in reversed(range(len(PRODUCT_VARIANTS))):
        if library.kvasir_has_products(variant):
            if all(torch.equal(QuantizedWeight(q, None, variant)(rows), multiply_slowly(rows, q)) for q in tried):
                return variant
            log.warning("products with %s are wrong here: others are computed", PRODUCT_VARIANTS[variant])
    raise RuntimeError("products.c computes wrong numbers with every instruction set that is here")
