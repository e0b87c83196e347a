"""What happens where a torch lacks an operator that is not public, or has another device than was asked for."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.compute import linear, model
from engine.compute.linear import PackedWeight, can_pack, is_quick
from engine.compute.model_files import ModelError
from tests.fakes.tiny_models import Driver, make_runner, random_ids


@pytest.fixture
def torch_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator is looked for under a name that no torch has."""
    real = linear.find_operator

    def find(name: str, overload: str = "default") -> object | None:
        return real(f"{name}_that_is_gone", overload)

    monkeypatch.setattr(linear, "find_operator", find)
    monkeypatch.setattr(linear, "is_compiled", lambda dtype, device: False)
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
    monkeypatch.setattr(linear, "is_compiled", lambda dtype, device: False)
    monkeypatch.setattr(
        linear,
        "find_operator",
        lambda name, overload="default": None if (name, overload) == gone else real(name, overload),
    )
    runner = make_runner("llama")
    assert not runner.model.is_fused
    driver = Driver(runner)
    torch.testing.assert_close(driver.prefill(driver.sequence(ids, 3), cuts=[256]), want, atol=2e-4, rtol=2e-4)


def test_all_of_them_are_in_the_torch_that_is_tested() -> None:
    for name in ("mkldnn::_reorder_linear_weight", "mkldnn::_linear_pointwise", *linear._QUICK.values()):
        assert linear.find_operator(name) is not None
    assert PackedWeight(torch.ones(16, 16), None).out_features == 16


def test_auto_is_the_cpu_also_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(model, "has_cuda", lambda: True)
    with caplog.at_level(logging.WARNING):
        assert model._choose_device("auto") == torch.device("cpu")
    assert "`kvasir serve` runs vLLM as its engine (docs/fleet.md)" in caplog.messages[0]
    assert model._choose_device("cuda") == torch.device("cuda")
    assert model._choose_device("cuda:1") == torch.device("cuda:1")
    assert "device cuda:1: an experiment" in caplog.messages[-1]
    with pytest.raises(ModelError, match="finds 2 GPUs"):
        model._choose_device("cuda:2")
