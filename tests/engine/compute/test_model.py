"""Loading: what is said about a model, and what is refused with which reason."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from engine.compute import model as models
from engine.compute import model_files
from engine.compute.kv_cache import STEP_BYTES
from engine.compute.model import LoadedModel, ModelError, load_model, prepare
from engine.compute.model_files import find_folder, fingerprint_weights
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from tests.fakes.lora import write_adapter
from tests.fakes.tiny_models import CONTEXT, KINDS, Driver, make_family, make_module, random_ids


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the hub has them: weights, configuration, generation configuration, tokeniser."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    module = make_module("llama")
    module.generation_config.eos_token_id = [7, 9]
    module.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(EngineSettings(model=str(folder), device="cpu", threads=1, **settings))


def test_a_folder_tells_all_that_the_engine_says_about_it(saved: Path) -> None:
    model = load(saved)
    assert (model.name, model.dtype, model.context_tokens, model.eos_ids) == (
        "tiny-llama",
        torch.float32,
        CONTEXT,
        (7, 9),
    )
    assert model.vocab_size == 211
    assert (model.cache_shape.num_layers, model.cache_shape.num_kv_heads, model.cache_shape.head_dim) == (3, 2, 8)
    assert model.tokenizer.add_bos
    assert model.tokenizer.chat_template == "{{ messages[0].content }}"
    assert model.tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    restored = tokenizers.Tokenizer.from_str(model.tokenizer.tokenizer_json)
    assert restored.encode("a b").ids == [0, 2, 3]
    assert model.is_fused


def test_settings_override_what_the_folder_says(saved: Path) -> None:
    model = load(saved, served_name="other", dtype="bfloat16", max_context_tokens=128)
    assert (model.name, model.dtype, model.context_tokens) == ("other", torch.bfloat16, 128)


def test_the_demo_model_loads_under_its_own_name() -> None:
    model = load_model(EngineSettings(device="cpu", threads=1))
    assert model.name == "demo"
    assert model.context_tokens >= 8192
    assert model.is_fused
    assert model.tokenizer.chat_template


def test_the_namespace_changes_with_the_weights_the_dtype_and_the_block_size(saved: Path, tmp_path: Path) -> None:
    model = load(saved)
    root = model.namespace(16, "xxh3_128").root()
    assert root == load(saved).namespace(16, "xxh3_128").root()
    changed = tmp_path / "changed"
    shutil.copytree(saved, changed)
    weights = changed / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    others = (
        load(changed).namespace(16, "xxh3_128"),
        load(saved, dtype="bfloat16").namespace(16, "xxh3_128"),
        load(saved, kv_cache_dtype="int8").namespace(16, "xxh3_128"),
        load(saved, quantize="int8").namespace(16, "xxh3_128"),
        load(saved, quantize="int4").namespace(16, "xxh3_128"),
        model.namespace(32, "xxh3_128"),
        model.namespace(16, "sha256"),
    )
    assert root not in [other.root() for other in others]


def test_auto_takes_the_most_bits_that_fit(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.AutoConfig.from_pretrained(saved)
    plain, half = models._needed(saved, config, torch.float32), models._needed(saved, config, torch.float32, 8)
    caplog.set_level("INFO")
    for free, want in ((plain, ""), (plain - 1, "int8"), (half - 1, "int4")):
        monkeypatch.setattr(models, "free_bytes", lambda *_, left=free + plain: STEP_BYTES + left)
        assert load(saved).quantization == want
    assert [line for line in caplog.messages if "engine.quantize" in line] == [
        "weights in int8: in float32 they take 0.0 GB, and with a step and a cache 0.0 GB are free (engine.quantize)",
        "weights in int4: in float32 they take 0.0 GB, and with a step and a cache 0.0 GB are free (engine.quantize)",
    ]
    caplog.clear()
    assert load(saved, quantize="none").quantization == ""
    assert load(saved, quantize="int4").quantization == "int4"
    assert [line for line in caplog.messages if "engine.quantize" in line] == [
        "weights in int4: 0.0 GB, in place of 0.0 GB in float32 (engine.quantize)"
    ]


def test_a_model_of_bfloat16_stays_so_in_float32_and_computes_the_same(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And `auto` computes in bfloat16 only where the processor is quicker at it."""
    for name, dtype in (("narrow", torch.bfloat16), ("wide", torch.float32)):
        shutil.copytree(saved, tmp_path / name)
        make_module("llama").bfloat16().to(dtype).save_pretrained(tmp_path / name)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "narrow")
    need = [models._needed(tmp_path / "narrow", config, torch.float32, bits) for bits in (16, None)]
    assert need[0] < 0.75 * need[1]  # the table of tokens is float32
    wide = load(tmp_path / "wide")
    for more, is_quicker in (({}, False), ({"amx_bf16": True}, True), ({"cpu_name": "AMD EPYC"}, True)):
        has = {"architecture": "x86_64", "avx512_bf16": True} | more
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: has, raising=False)
        monkeypatch.setattr("engine.compute.model.is_quick", lambda dtype: True)
        narrow = load(tmp_path / "narrow")
        assert narrow.dtype == (torch.bfloat16 if is_quicker else torch.float32)
        narrow = load(tmp_path / "narrow", dtype="float32")
        assert narrow.quantization == ""
        assert narrow.cost is not None
        assert wide.cost is not None
        assert 2 * narrow.cost.row_bytes == wide.cost.row_bytes
        settings, ids = EngineSettings(kv_cache_bytes=1 << 20, threads=1), random_ids(40, 1)
        found = [Driver(ModelRunner(one, settings)) for one in (narrow, wide)]
        assert torch.equal(*(driver.prefill(driver.sequence(ids)) for driver in found))


def test_the_fingerprint_does_not_depend_on_where_the_folder_is(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    assert fingerprint_weights(tmp_path / "copy") == fingerprint_weights(saved)


def test_a_fingerprint_is_kept_until_a_file_is_written_or_replaced(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache" / "fingerprints.json"
    shutil.copytree(saved, folder)
    first, weights = fingerprint_weights(folder, cache), folder / "model.safetensors"
    assert cache.stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as patch:
        patch.delattr(model_files.xxhash, "xxh3_128")  # no byte is hashed again
        assert fingerprint_weights(folder, cache) == first
    # Other bytes of the same size in the same inode, with the time of before: only the inode's own time tells.
    times, data = weights.stat(), bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = fingerprint_weights(folder, cache)
    assert changed == fingerprint_weights(folder) != first
    # A replaced file, and a kept file that others may write to or that is none of ours, count for nothing.
    shutil.copytree(saved, tmp_path / "again")
    os.replace(tmp_path / "again" / "model.safetensors", weights)
    assert fingerprint_weights(folder, cache) == first
    cache.write_text(json.dumps(dict.fromkeys(json.loads(cache.read_text()), "0" * 32)))
    assert fingerprint_weights(folder, cache) == "0" * 32
    cache.chmod(0o620)
    assert fingerprint_weights(folder, cache) == first
    assert cache.stat().st_mode & 0o777 == 0o600
    for nonsense in ("[]", "{", '{"a": 1}', '{"a": "b"}', ""):
        cache.write_text(nonsense)
        assert fingerprint_weights(folder, cache) == first


def test_no_more_than_64_fingerprints_are_kept_and_none_where_nothing_can_be_written(tmp_path: Path) -> None:
    cache = tmp_path / "fingerprints.json"
    model_files._keep_digests(cache, {str(number): "0" * 32 for number in range(70)})
    assert list(json.loads(cache.read_text())) == [str(number) for number in range(6, 70)]
    (tmp_path / "file").touch()
    model_files._keep_digests(tmp_path / "file" / "fingerprints.json", {"a": "0" * 32})


@pytest.mark.parametrize("left", [0, 5, 8, 40, 2000, -1])
def test_weights_that_are_cut_short_are_refused_by_their_header(saved: Path, tmp_path: Path, left: int) -> None:
    shutil.copytree(saved, tmp_path / "torn")
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read as safetensors: ") as raised:
        load(tmp_path / "torn")
    assert "\n" not in str(raised.value)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_module("llama")
    numbers = sum(parameter.numel() for parameter in module.parameters())
    assert model_files.weight_bytes(saved, 4) == 4 * numbers
    monkeypatch.setattr(models, "_load_module", None)
    monkeypatch.setattr(models, "free_bytes", lambda device, limit: STEP_BYTES + 4 * numbers - 1)
    with pytest.raises(ModelError, match=r"needs 0\.0 GB of memory for its weights in float32 and 0\.5 GB for steps"):
        load(saved, quantize="none")
    monkeypatch.setattr(models, "free_bytes", lambda device, limit: STEP_BYTES + 1)
    with pytest.raises(ModelError, match="for its weights in int4 and"):
        load(saved)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": "/nowhere/model"}, "there is no such folder"),
        ({"model": "not-a-hub-id"}, "not a hub id"),
        ({"device": "cuda:99"}, "no GPU|invalid"),
        ({"device": "toaster"}, "should be cpu"),
        ({"max_context_tokens": CONTEXT + 1}, f"at most {CONTEXT}"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(saved: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load_model(EngineSettings(**{"model": str(saved), "device": "cpu", "threads": 1, **settings}))


@pytest.mark.parametrize(("missing", "reason"), [("model.safetensors", "model"), ("config.json", "config")])
def test_a_folder_with_a_file_missing_is_refused(saved: Path, tmp_path: Path, missing: str, reason: str) -> None:
    shutil.copytree(saved, tmp_path / "torn")
    (tmp_path / "torn" / missing).unlink()
    with pytest.raises(ModelError, match=reason):
        load(tmp_path / "torn")


def test_a_folder_without_a_tokeniser_is_refused(tmp_path: Path) -> None:
    make_module("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="tokeniser"):
        load(tmp_path)


def test_an_encoder_decoder_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "t5")
    transformers.T5Config(vocab_size=50).save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelError, match="encoder-decoder"):
        load(tmp_path / "t5")


def test_recurrent_layers_are_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "next")
    transformers.Qwen3NextConfig(vocab_size=50).save_pretrained(tmp_path / "next")
    with pytest.raises(ModelError, match="linear_attention"):
        load(tmp_path / "next")


_GROUPED = KINDS["llama"][1]


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("Gemma2", {**_GROUPED, "head_dim": 8, "attn_logit_softcapping": -1.0}, "capped at -1"),
        ("GptOss", {**_GROUPED, "head_dim": 8, "num_local_experts": 4}, "s_aux"),
        ("Bloom", {"vocab_size": 211, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "foreign attention"),
        ("Mamba", {"vocab_size": 211, "hidden_size": 64, "num_hidden_layers": 2}, "0 of its 2 layers"),
    ],
)
def test_attention_that_cannot_be_expressed_is_refused(family: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        prepare(make_family(family, settings), "tiny", CONTEXT)


def test_a_model_that_ignores_its_positions_is_found_out() -> None:
    module = make_module("gpt2")
    forward = module.transformer.wpe.forward
    module.transformer.wpe.forward = lambda ids: forward(torch.arange(ids.shape[-1])[None])
    with pytest.raises(ModelError, match="off by"):
        prepare(module, "tiny", CONTEXT)


def test_a_model_that_transformers_cannot_run_is_refused_with_its_reason() -> None:
    module = make_module("llama")
    module.model.layers[1].mlp.up_proj = torch.nn.Linear(64, 95)
    with pytest.raises(ModelError, match="cannot be run"):
        prepare(module, "tiny", CONTEXT)


def test_a_window_that_is_declared_and_not_asked_for_is_found_out() -> None:
    qwen = make_module("qwen2 with windows")
    for layer in qwen.model.layers:
        layer.self_attn.sliding_window = None
    with pytest.raises(ModelError, match="window"):
        prepare(qwen, "tiny", CONTEXT)
    prepare(make_module("qwen2 with windows"), "tiny", 64)  # shorter than the window: there is none


@pytest.mark.parametrize("name", ["demo", "a folder"])
def test_folders_and_the_demo_are_found_without_the_hub(name: str, saved: Path) -> None:
    folder = find_folder("demo" if name == "demo" else str(saved), None)
    assert (folder / "config.json").is_file()


def test_an_adapter_of_another_model_is_refused_before_weights_are_loaded(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = write_adapter(tmp_path / "own", make_module("llama"), ["q_proj"], 1)
    assert [name for name, _ in load(saved, lora=f"a={own}", quantize="int8").adapters] == ["a"]
    monkeypatch.setattr(models, "_load_module", None)
    foreign = write_adapter(tmp_path / "foreign", make_module("gpt2"), ["c_attn"], 1)
    with pytest.raises(ModelError, match="a LoRA of another model"):
        load(saved, lora=f"a={foreign}")
    with pytest.raises(ModelError, match="'tiny-llama' is the model's own name"):
        load(saved, lora=f"tiny-llama={own}")
