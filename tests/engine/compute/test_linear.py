"""Packed linear layers against torch's own, and the row independence that warm answers stand on."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from engine.compute import linear
from engine.compute.forward import PanelWeight, is_compiled
from engine.compute.kernel import VARIANTS, supported
from engine.compute.linear import PackedLinear, PackedWeight, can_pack, is_quick, pack

CPU = torch.device("cpu")
SHAPES = [(64, 48), (211, 64), (96, 1536), (512, 512)]


def ways(dtype: torch.dtype) -> list[type[PanelWeight] | type[PackedWeight]]:
    """All that pack here."""
    found: list[type[PanelWeight] | type[PackedWeight]] = [PanelWeight] if is_compiled(dtype, CPU) else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "is_compiled", lambda dtype, device: False)
        return [*found, PackedWeight] if can_pack(dtype, CPU) else found


def make(
    out_features: int, in_features: int, dtype: torch.dtype, bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    return weight.to(dtype), torch.randn(out_features, generator=generator).to(dtype) if bias else None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, int], bias: bool) -> None:
    weight, offset = make(*shape, dtype, bias)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for make_weight, rows in product(ways(dtype), (1, 2, 7, 64)):
        packed = make_weight(weight, offset)
        x, other = torch.randn(rows, shape[1]).to(dtype), torch.randn(rows, shape[0]).to(dtype)
        plain = functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
        for got, want in (
            (packed(x), plain),
            (packed.swish(x), functional.silu(plain)),
            (packed.multiply(x, other), plain * other.double()),
            (packed.add(x, other), plain + other.double()),
        ):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, **tolerance)


def test_arguments_are_left_as_they_are() -> None:
    weight, bias = make(48, 32, torch.float32, bias=True)
    x, other = torch.randn(3, 32), torch.randn(3, 48)
    before = x.clone(), other.clone()
    for make_weight in ways(torch.float32):
        packed = make_weight(weight, bias)
        packed.multiply(x, other)
        packed.add(x, other)
        assert torch.equal(x, before[0])
        assert torch.equal(other, before[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_in_float32_a_row_does_not_depend_on_the_other_rows(shape: tuple[int, int]) -> None:
    weight, _ = make(*shape, torch.float32, bias=False)
    x, other = torch.randn(600, shape[1]), torch.randn(600, shape[0])
    for make_weight in ways(torch.float32):
        packed = make_weight(weight, None)
        whole = packed(x), packed.swish(x), packed.multiply(x, other), packed.add(x, other)
        for rows in (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 100, 257, 512)[make_weight is PackedWeight :]:
            for start in (0, 600 - rows):
                a, b = x[start : start + rows], other[start : start + rows]
                parts = packed(a), packed.swish(a), packed.multiply(a, b), packed.add(a, b)
                for part, full in zip(parts, whole, strict=True):
                    assert torch.equal(part, full[start : start + rows]), rows


@pytest.mark.skipif(not is_compiled(torch.float32, CPU), reason="no C compiler")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_narrow", [False, True])
def test_every_instruction_set_multiplies_a_row_alone_as_among_others(shape: tuple[int, int], is_narrow: bool) -> None:
    weight, bias = make(*shape, torch.float32, bias=True)
    if is_narrow:
        weight = weight.bfloat16().float()
    packed, x = PanelWeight(weight, bias), torch.randn(40, shape[1])
    want = functional.silu(functional.linear(x, weight, bias))
    for variant in supported(torch.float32, 1):
        packed.call.variant = variant
        whole = packed.swish(x)
        torch.testing.assert_close(whole, want, atol=1e-5, rtol=1e-5, msg=VARIANTS[variant])
        for rows in range(1, 10):
            assert torch.equal(packed.swish(x[7 : 7 + rows]), whole[7 : 7 + rows]), VARIANTS[variant]
    assert packed(torch.full((1, shape[1]), torch.nan)).isnan().all()


@pytest.mark.skipif(not is_compiled(torch.float32, CPU), reason="no C compiler")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_of_bfloat16_numbers_takes_half_the_memory_and_changes_no_bit(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = make(*shape, torch.bfloat16, bias=True)
    narrow, same, x = (
        PanelWeight(weight.float(), bias.float()),
        PanelWeight(weight, bias.float()),
        torch.randn(300, shape[1]),
    )
    monkeypatch.setattr("engine.compute.forward.is_narrow", lambda weight: False)
    wide = PanelWeight(weight.float(), bias.float())
    assert 2 * narrow._held[0].nbytes == 2 * same._held[0].nbytes == wide._held[0].nbytes
    for variant in supported(torch.float32, 1):
        narrow.call.variant = same.call.variant = wide.call.variant = variant
        for rows in (1, 2, 5, 8, 9, 40, 300):
            want = wide.swish(x[:rows])
            assert torch.equal(narrow.swish(x[:rows]), want), (VARIANTS[variant], rows)
            assert torch.equal(same.swish(x[:rows]), want)


def test_pack_replaces_every_linear_layer_and_frees_its_weight() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ModuleDict({"inner": Conv1D(8, 32)}), nn.LayerNorm(8))
    x = torch.randn(5, 16)
    expected = model[1]["inner"](model[0](x))
    assert pack(model) == 2
    assert isinstance(model[0], PackedLinear)
    torch.testing.assert_close(model[1]["inner"](model[0](x)), expected)
    assert sum(parameter.numel() for parameter in model.parameters()) == 16  # the norm's
    assert model[0].weight.dtype == torch.float32


def test_subclasses_of_linear_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(4, 4))
    assert pack(model) == 0
    assert type(model[0]) is Special


@pytest.mark.parametrize(
    ("has", "quick"),
    [
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": False}, False),
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": True}, True),
        ({"architecture": "aarch64"}, True),
    ],
)
def test_what_onednn_emulates_is_slow(monkeypatch: pytest.MonkeyPatch, has: dict[str, Any], quick: bool) -> None:
    monkeypatch.setattr(linear, "find_operator", lambda name, overload="default": lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)
    assert is_quick(torch.bfloat16) is quick


def test_what_the_processor_is_slow_at_is_not_packed() -> None:
    assert is_quick(torch.float32)
    assert not is_quick(torch.float64)
    assert not can_pack(torch.float64, CPU)
    assert not can_pack(torch.float32, torch.device("meta"))
