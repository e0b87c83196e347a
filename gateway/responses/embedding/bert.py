"""A sentence encoder of the BERT family, computed in numpy: token ids in, one vector of length 1 for each text out.

Knows nothing of texts, requests or threads; embedder.py loads it when the first text comes, and calls it in a thread.
numpy, safetensors and threadpoolctl come with the extra `semantic`: nothing else in the gateway imports this file.

Texts of a batch stand one behind the other, without padding. Whatever works on single tokens is one product for all of
them; attention is computed for each run of texts of equal length. So nothing is spent on padding, and who else is in
a batch changes a vector by rounding alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import threadpoolctl
from safetensors import safe_open

from gateway.native import no_panic

Floats = npt.NDArray[np.float32]

GELU_ROWS = 64
"""Rows of the feed-forward layer that are activated at a time: they stay in a core's cache over all passes."""

GELU = (
    -2.2382217852336093e-06,
    6.116318086349051e-05,
    2.497160660280606e-04,
    -0.07293756685871391,
    -1.5956562801312242,
)
"""-p, from the highest power of x^2 on: fitted so that the largest error is about the least."""

SMALL_KERNELS = ("SkylakeX", "Cooperlake", "SapphireRapids")
"""Architectures, as OpenBLAS names them, on which it makes small products without copying the weights first. The
products of a short text are small but for the weights, and copying those takes a third of the time."""

SMALL_PRODUCT = 1_000_000
"""Multiplications up to which a product is small to it."""

WIDTH = 128
"""Outputs of a piece: 20 rows, times as many inputs as MiniLM has, are small."""


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight + bias, one piece of the outputs after the other.

    weight  (pieces, inputs, outputs / pieces)
    bias    (outputs,)
    parts   of the inputs, whose products are added where all of them at once would be too large to be small
    """

    weight: Floats
    bias: Floats
    parts: int

    def __call__(self, x: Floats) -> Floats:
        rows, (pieces, inputs, width) = len(x), self.weight.shape
        y: Floats = np.empty((rows, pieces * width), dtype=np.float32)
        by_piece = y.reshape(rows, pieces, width).swapaxes(0, 1)  # (pieces, rows, width), a view
        if self.parts == 1 or rows * inputs // self.parts * width > SMALL_PRODUCT:
            np.matmul(x, self.weight, out=by_piece)
        else:
            parted = x.reshape(rows, self.parts, -1).swapaxes(0, 1)  # (parts, rows, inputs / parts)
            products = parted @ self.weight.reshape(pieces, self.parts, -1, width)  # (pieces, parts, rows, width)
            np.add.reduce(products, axis=1, out=by_piece)
        y += self.bias
        return y


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer normalisation over the last axis."""

    weight: Floats
    bias: Floats
    epsilon: float

    def __call__(self, x: Floats) -> Floats:
        size = np.float32(x.shape[-1])
        x -= np.add.reduce(x, axis=-1, keepdims=True) / size
        variance = np.einsum("ij,ij->i", x, x)[:, None] / size
        x *= np.float32(1) / np.sqrt(variance + np.float32(self.epsilon))
        x *= self.weight
        x += self.bias
        return x


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; query, key and value are one product."""

    qkv: Linear
    attended: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    output_norm: Norm


class Bert:
    """The model of one folder. Safe to be called from several threads."""

    def __init__(self, folder: Path) -> None:
        """Reads config.json and model.safetensors. Raises OSError, and ValueError for another kind of model."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _check(config, _pooling(folder))
        # load_file holds the interpreter twice as long
        with no_panic("safetensors"), safe_open(folder / "model.safetensors", "np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        self.dimensions: int = config["hidden_size"]
        self.vocabulary: int = config["vocab_size"]
        self.max_tokens: int = config["max_position_embeddings"]
        self._heads: int = config["num_attention_heads"]
        epsilon: float = config["layer_norm_eps"]
        self._words = _tensor(tensors, "embeddings.word_embeddings.weight")
        self._positions = (  # every token is of type 0: a text has no second part
            _tensor(tensors, "embeddings.position_embeddings.weight")
            + _tensor(tensors, "embeddings.token_type_embeddings.weight")[0]
        )
        self._norm = _norm(tensors, "embeddings.LayerNorm", epsilon)
        self._layers = [
            _layer(tensors, f"encoder.layer.{number}", epsilon, (self.dimensions // self._heads) ** -0.5)
            for number in range(config["num_hidden_layers"])
        ]

    def vectors(self, texts: Sequence[Sequence[int]]) -> Floats:
        """Mean of the last layer over a text's tokens, divided by its length.

        texts  token ids below `vocabulary`, special ones included; 1 to `max_tokens` each
        Returns (texts, dimensions), in the order of `texts`.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        lengths = np.array([len(texts[index]) for index in order])
        starts = np.cumsum(lengths) - lengths
        ids = np.concatenate([np.asarray(texts[index], dtype=np.int64) for index in order])
        x = self._words[ids]
        x += self._positions[np.arange(len(ids)) - np.repeat(starts, lengths)]
        x = self._norm(x)
        runs = [(length, len(list(equal))) for length, equal in groupby(lengths.tolist())]
        for layer in self._layers:
            x = self._through(layer, x, runs)
        pooled: Floats = np.add.reduceat(x, starts, axis=0)
        pooled /= lengths[:, None].astype(np.float32)
        pooled /= np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), np.float32(1e-12))
        found = np.empty_like(pooled)
        found[order] = pooled
        return found

    def _through(self, layer: Layer, x: Floats, runs: Sequence[tuple[int, int]]) -> Floats:
        """x  (tokens, dimensions)"""
        attended = layer.attended(self._attend(layer.qkv(x), runs))
        attended += x
        x = layer.attention_norm(attended)
        output = layer.down(gelu(layer.up(x)))
        output += x
        return layer.output_norm(output)

    def _attend(self, qkv: Floats, runs: Sequence[tuple[int, int]]) -> Floats:
        """qkv   (tokens, 3 * dimensions)  ->  (tokens, dimensions)
        runs  tokens of a text, and how many texts of that length follow each other
        """
        size = self.dimensions // self._heads
        mixed = np.empty((len(qkv), self.dimensions), dtype=np.float32)
        start = 0
        for length, count in runs:
            rows = slice(start, start + count * length)
            start = rows.stop
            parts = qkv[rows].reshape(count, length, 3, self._heads, size)
            query, key, value = parts.transpose(2, 0, 3, 1, 4)  # each (texts, heads, tokens, size)
            weights = query @ key.swapaxes(-1, -2)
            weights -= np.maximum.reduce(weights, axis=-1, keepdims=True)
            np.exp(weights, out=weights)
            weights /= np.add.reduce(weights, axis=-1, keepdims=True)
            np.matmul(weights, value, out=mixed[rows].reshape(count, length, -1, size).swapaxes(1, 2))
        return mixed


def gelu(x: Floats) -> Floats:
    """x * (1 + erf(x / sqrt 2)) / 2, in place, as x / (1 + exp(-x * p(x^2))); off by 4e-6 at most."""
    with np.errstate(over="ignore"):  # far below zero, where nothing is left of x
        for start in range(0, len(x), GELU_ROWS):
            part = x[start : start + GELU_ROWS]
            square = part * part
            power = square * np.float32(GELU[0])
            for factor in GELU[1:-1]:
                power += np.float32(factor)
                power *= square
            power += np.float32(GELU[-1])
            power *= part
            np.exp(power, out=power)
            power += np.float32(1)
            part /= power
    return x


def _pooling(folder: Path) -> Mapping[str, Any]:
    """How the sentence-transformers model of this folder makes one vector of many; empty when it does not say."""
    try:
        found: Mapping[str, Any] = json.loads((folder / "1_Pooling/config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def _check(config: Mapping[str, Any], pooling: Mapping[str, Any]) -> None:
    """Raises ValueError for a model that would be computed wrongly."""
    for name, value, expected in (
        ("model_type", config.get("model_type"), "bert"),
        ("hidden_act", config.get("hidden_act"), "gelu"),
        ("position_embedding_type", config.get("position_embedding_type", "absolute"), "absolute"),
        ("pooling_mode_mean_tokens", pooling.get("pooling_mode_mean_tokens", True), True),
        ("pooling_mode_cls_token", pooling.get("pooling_mode_cls_token", False), False),
        ("pooling_mode_max_tokens", pooling.get("pooling_mode_max_tokens", False), False),
    ):
        if value != expected:
            raise ValueError(f"{name} is {value!r}; only {expected!r} is computed")


def _tensor(tensors: Mapping[str, Any], name: str) -> Floats:
    found = tensors.get(name, tensors.get(f"bert.{name}"))
    if found is None:
        raise ValueError(f"model.safetensors has no {name}")
    return np.ascontiguousarray(found, dtype=np.float32)


def _linear(weight: Floats, bias: Floats) -> Linear:
    """weight  (inputs, outputs)"""
    inputs, outputs = weight.shape
    pieces = outputs // WIDTH if outputs % WIDTH == 0 and _has_small_kernels() else 1
    parts = inputs // outputs if pieces > 1 and inputs > outputs and inputs % outputs == 0 else 1
    return Linear(np.ascontiguousarray(weight.reshape(inputs, pieces, -1).swapaxes(0, 1)), bias, parts)


@lru_cache
def _has_small_kernels() -> bool:
    found = threadpoolctl.threadpool_info()
    return any(one.get("internal_api") == "openblas" and one.get("architecture") in SMALL_KERNELS for one in found)


def _read(tensors: Mapping[str, Any], *names: str) -> tuple[Floats, Floats]:
    """Of several layers with equal inputs, weight (inputs, outputs) and bias, outputs side by side. Saved are (outputs,
    inputs)."""
    weight = np.concatenate([_tensor(tensors, f"{name}.weight") for name in names])
    return weight.T, np.concatenate([_tensor(tensors, f"{name}.bias") for name in names])


def _norm(tensors: Mapping[str, Any], name: str, epsilon: float) -> Norm:
    return Norm(_tensor(tensors, f"{name}.weight"), _tensor(tensors, f"{name}.bias"), epsilon)


def _layer(tensors: Mapping[str, Any], name: str, epsilon: float, scale: float) -> Layer:
    """`scale` is that of queries, which goes into what they are made with."""
    attention = f"{name}.attention"
    weight, bias = _read(tensors, *(f"{attention}.self.{part}" for part in ("query", "key", "value")))
    queries = len(bias) // 3
    weight[:, :queries] *= np.float32(scale)
    bias[:queries] *= np.float32(scale)
    return Layer(
        qkv=_linear(weight, bias),
        attended=_linear(*_read(tensors, f"{attention}.output.dense")),
        attention_norm=_norm(tensors, f"{attention}.output.LayerNorm", epsilon),
        up=_linear(*_read(tensors, f"{name}.intermediate.dense")),
        down=_linear(*_read(tensors, f"{name}.output.dense")),
        output_norm=_norm(tensors, f"{name}.output.LayerNorm", epsilon),
    )
