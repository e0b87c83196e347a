"""What happens where a torch lacks an operator that is not public, or has another device than was asked for."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.compute import flash, linear, model
from engine.compute.linear import PackedWeight, can_pack, is_quick
from engine.compute.model_files import ModelError
from tests.fakes.tiny_models import Driver, make_runner, random_ids


@pytest.fixture
def torch_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator is looked for under a name that no torch has."""
    real = linear.find_operator

    def find(name: str, overload: str = "default") -> object | None:
        return real(f"{name}_that_is_gone", overload)

    for module in (linear, flash):
        monkeypatch.setattr(module, "find_operator", find)
    real.cache_clear()


@pytest.mark.usefixtures("torch_without")
def test_without_them_layers_stay_as_they_are_and_the_log_names_what_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not can_pack(torch.float32, torch.device("cpu"))
        assert not can_pack(torch.float32, torch.device("cpu"))
        assert not is_quick(torch.bfloat16)
    told = [record.getMessage() for record in caplog.records]
    assert [line.split("no operator ")[1].split(": ")[0] for line in told] == [
        "mkldnn::_reorder_linear_weight_that_is_gone.default",
        "mkldnn::_linear_pointwise_that_is_gone.default",
        "mkldnn::_linear_pointwise_that_is_gone.binary",
        "mkldnn::_is_mkldnn_bf16_supported_that_is_gone.default",
    ]


@pytest.mark.parametrize(
    "gone",
    [
        ("mkldnn::_reorder_linear_weight", "default"),
        ("mkldnn::_linear_pointwise", "default"),
        ("mkldnn::_linear_pointwise", "binary"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "default"),
    ],
    ids="::".join,
)
def test_a_model_computes_the_same_without_any_one_of_them(
    gone: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(300, 1)
    whole = Driver(make_runner("llama"))
    want = whole.prefill(whole.sequence(ids, 3), cuts=[256])
    real = linear.find_operator
    monkeypatch.setattr(
        linear,
        "find_operator",
        lambda name, overload="default": None if (name, overload) == gone else real(name, overload),
    )
    if gone[0].startswith("aten"):
        monkeypatch.setattr(flash, "_FLASH_CPU", flash._plain)
    runner = make_runner("llama")
    assert runner.model.is_fused is gone[0].startswith("aten")
    driver = Driver(runner)
    torch.testing.assert_close(driver.prefill(driver.sequence(ids, 3), cuts=[256]), want, atol=2e-4, rtol=2e-4)


def test_all_of_them_are_in_the_torch_that_is_tested() -> None:
    for name in ("mkldnn::_reorder_linear_weight", "mkldnn::_linear_pointwise", *linear._QUICK.values()):
        assert linear.find_operator(name) is not None
    assert flash._FLASH_CPU is not flash._plain
    assert PackedWeight(torch.ones(16, 16), None).out_features == 16


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_kernel_computes_what_torchs_flash_kernel_computes(causal: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, 16, 32, generator=generator).to(dtype) for _ in range(3))
    mask = None if causal else torch.zeros(16, 16, dtype=dtype).masked_fill(torch.ones(16, 16).triu(3) > 0, -torch.inf)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    for plain, kernel in zip(
        flash._plain(query, key, value, 0.0, causal, attn_mask=mask, scale=0.2),
        flash._FLASH_CPU(query, key, value, 0.0, causal, attn_mask=mask, scale=0.2),
        strict=True,
    ):
        assert plain.dtype == kernel.dtype
        assert torch.allclose(plain.float(), kernel.float(), atol=near)


def test_auto_is_the_cpu_also_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with caplog.at_level(logging.WARNING):
        assert model._choose_device("auto") == torch.device("cpu")
    assert 'engine.device = "cuda"' in caplog.text
    assert model._choose_device("cuda") == torch.device("cuda")
    assert model._choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ModelError, match="finds 2 GPUs"):
        model._choose_device("cuda:2")
