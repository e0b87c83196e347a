"""Weights in 8 and 4 bits: what is lost, and products of whole numbers against ordinary ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from engine.compute import kernel
from engine.compute.kernel import PRODUCT_VARIANTS, load_products
from engine.compute.quantize import (
    Quantized,
    QuantizedWeight,
    dequantize,
    multiply_slowly,
    pack_nibbles,
    quantize,
    rotate,
)

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
    error = dequantize(q) - weight
    assert ((rotate(error) / 32 if q.rotated else error).abs() <= step / 2 + 1e-6).all()
    assert error.norm() <= step.norm() / 2 * (32**0.5 if q.rotated else 1)
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


@pytest.mark.skipif(load_products() is None, reason="no C compiler")
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_every_instruction_set_computes_the_slow_twins_bits_and_a_row_is_the_same_alone(data: st.DataObject) -> None:
    bits, group = data.draw(st.sampled_from(FORMS))
    inputs = data.draw(st.sampled_from([32, 96, 1024] if group in (16, 32) else [128, 512] if group else [18, 70, 256]))
    out = data.draw(st.sampled_from([1, 15, 16, 17, 48, 300]))
    q = quantize(make_weight(out, inputs, data.draw(st.integers(0, 9))), bits, group)
    if bits == 4 and data.draw(st.booleans()):
        q = replace(q, minima=None)
    q = replace(q, rotated=q.rotated and data.draw(st.booleans()))
    if bits == 8:
        q.values[0, :2] = -128  # not ours, but a file may have them
    torch.manual_seed(data.draw(st.integers(0, 9)))
    rows = torch.randn(data.draw(st.sampled_from([1, 8, 33, 515])), inputs)
    first, count = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(1, 9))
    rows[-1, :2] = torch.tensor([30.0, -30.0])
    rows[0] *= data.draw(st.sampled_from([0, 1e-32, 1, 1e20]))
    other, bias = torch.randn(len(rows), out), torch.randn(out) if data.draw(st.booleans()) else None
    want = multiply_slowly(rows, q) + (0 if bias is None else bias)
    library = load_products()
    assert library is not None
    for variant in filter(library.kvasir_has_products, range(len(PRODUCT_VARIANTS))):
        weight = QuantizedWeight(q, bias, variant)
        assert torch.equal(weight(rows), want), PRODUCT_VARIANTS[variant]
        assert torch.equal(weight.multiply(rows, other), want * other)
        assert torch.equal(weight.add(rows, other), want + other)
        swished = weight.swish(rows)
        torch.testing.assert_close(swished, functional.silu(want), atol=1e-6, rtol=1e-6)
        assert torch.equal(weight.swish(rows[first : first + count]), swished[first : first + count])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    weight, rows = QuantizedWeight(quantize(make_weight(1024, 512), 8), None), torch.randn(300, 512)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = weight(rows)
        torch.set_num_threads(threads)
        assert torch.equal(weight(rows), alone)
        assert torch.equal(weight(rows[7:8]), alone[7:8])
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(kernel, "default_folder", lambda: tmp_path)
    monkeypatch.setattr(kernel.shutil, "which", lambda name: None)
    kernel.load_products.cache_clear()
    yield
    kernel.load_products.cache_clear()


def test_without_a_compiler_torch_computes_the_same(request: pytest.FixtureRequest) -> None:
    q, rows, other = quantize(make_weight(48, 256), 4), torch.randn(2, 3, 256), torch.randn(2, 3, 48)
    quick = QuantizedWeight(q, None)
    request.getfixturevalue("no_library")
    slow = QuantizedWeight(q, None)
    assert torch.equal(slow(rows), quick(rows))
    assert torch.equal(slow.add(rows, other), quick.add(rows, other))
    assert torch.equal(slow.multiply(rows, other), quick.multiply(rows, other))
    torch.testing.assert_close(slow.swish(rows), quick.swish(rows))
