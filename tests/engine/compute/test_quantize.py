"""Weights in 8 and 4 bits: what is lost, and products of whole numbers against ordinary ones."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch.nn import functional

from engine.compute.quantize import Quantized, QuantizedWeight, dequantize, pack_nibbles, quantize

FORMS: list[tuple[Literal[8, 4], int | None]] = [(8, None), (8, 32), (8, 16), (4, 32), (4, 128), (4, None)]


def make_weight(out: int, inputs: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed)) * inputs**-0.5


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_a_weight_comes_back_within_half_a_step(bits: Literal[8, 4], group: int | None) -> None:
    weight = make_weight(24, 256)
    weight[3], weight[4] = 0, 0.25
    q = quantize(weight, bits, group)
    assert q.shape == (24, 256)
    step = q.scales.repeat_interleave(q.group, -1)
    assert ((dequantize(q) - weight).abs() <= step / 2 + 1e-6).all()
    assert q.nbytes == q.values.nbytes + q.scales.nbytes * (1 if q.minima is None else 2)


def test_numbers_of_4_bits_lie_as_the_formats_say() -> None:
    values = pack_nibbles(torch.arange(32, dtype=torch.uint8)[None] % 16)
    assert values[0, :2].tolist() == [0x10, 0x32]
    scales = torch.full((1, 1), 2.0)
    assert dequantize(Quantized(4, values, scales, None, 32))[0, :3].tolist() == [-16, -14, -12]
    assert dequantize(Quantized(4, values, scales, scales, 32))[0, :3].tolist() == [2, 4, 6]


@pytest.mark.parametrize(("group", "bits"), [(16, 4), (24, 8), (48, 8), (96, 8)])
def test_groups_that_do_not_fit_are_refused(group: int, bits: Literal[8, 4]) -> None:
    scales = torch.ones(2, 64 // group or 1)
    with pytest.raises(ValueError, match="should be"):
        Quantized(bits, torch.zeros(2, 64 * bits // 8, dtype=torch.uint8), scales, None, group)


@pytest.mark.parametrize(("bits", "group"), FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_dequantised_weight(bits: Literal[8, 4], group: int | None, bias: bool) -> None:
    q = quantize(make_weight(48, 256), bits, group)
    offset = torch.randn(48) if bias else None
    weight, plain = QuantizedWeight(q, offset), dequantize(q)
    rows, other = torch.randn(2, 7, 256), torch.randn(2, 7, 48)
    want = functional.linear(rows, plain, offset)
    for got, expected in (
        (weight(rows), want),
        (weight.swish(rows), functional.silu(want)),
        (weight.multiply(rows, other), want * other),
        (weight.add(rows, other), want + other),
    ):
        assert (got - expected).norm() / expected.norm() < 0.015  # of rounding activations to 8 bits
    assert weight(rows[:0]).shape == (0, 7, 48)
    assert weight(rows.bfloat16()).dtype == torch.bfloat16


def test_inputs_that_fill_no_run_are_multiplied_too() -> None:
    q = quantize(make_weight(5, 19), 8)
    rows = torch.randn(3, 19)
    torch.testing.assert_close(QuantizedWeight(q, None)(rows), rows @ dequantize(q).T, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_become_finite(wrong: float) -> None:
    rows = torch.randn(2, 64)
    rows[1, 5] = wrong
    answer = QuantizedWeight(quantize(make_weight(8, 64), 8), None)(rows)
    assert answer[0].isfinite().all()
    assert not answer[1].isfinite().any()
