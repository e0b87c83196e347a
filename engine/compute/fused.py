"""A forward of our own for the commonest shape of model: Llama, Mistral, Qwen2 and Qwen3 on a CPU.

Computes what transformers' modules compute, from the same weights, in fewer and larger pieces: query, key and value in
one product; the activation, its gate and both residual sums inside the products; positions from one table; rows in
tiles that stay in the processor's cache; and in the last layer only the rows somebody asked for.
engine/compute/model.py compares it with transformers' forward before it is used; every other model runs transformers'
own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn

from engine.compute.attention import StepAttention
from engine.compute.forward import is_compiled, rms_norm, turn
from engine.compute.layers import TILE_ROWS, CompiledLayers
from engine.compute.linear import can_pack
from engine.compute.lora import AdaptedWeight, Owners, pairs_of
from engine.compute.paged import PagedAttention
from engine.compute.quantized_layers import JoinedWeight, Product, QuantizedLinear, release, weight_of

_FAMILY: Final = (
    transformers.LlamaForCausalLM,
    transformers.MistralForCausalLM,
    transformers.Qwen2ForCausalLM,
    transformers.Qwen3ForCausalLM,
)
_STEADY_ROPE: Final = {"default", "linear", "llama3", "yarn"}  # kinds whose table is the same for every batch


@dataclass(slots=True)
class _Layer:
    """One decoder layer's weights.

    qkv      (num_heads + 2 * num_kv_heads) * head_dim outputs: query heads, key heads, value heads
    qk_norm  (num_heads + num_kv_heads, head_dim) weights of the norm of each head, where the model has one
    """

    input_norm: Tensor
    qkv: Product | JoinedWeight | AdaptedWeight
    qk_norm: Tensor | None
    output: Product | AdaptedWeight
    mlp_norm: Tensor
    gate: Product | AdaptedWeight
    up: Product | AdaptedWeight
    down: Product | AdaptedWeight
    window: int | None


class FusedForward:
    """See engine.compute.model.Forward. Holds packed copies of the weights, the embedding, and the table of
    positions."""

    def __init__(self, module: Any, context_tokens: int, windows: list[int | None], owners: Owners) -> None:
        """Takes the weights out of the module as it packs them, so that there are never two copies of the whole."""
        model, config = module.model, module.config
        attention = model.layers[0].self_attn
        self._owners = owners
        self._head_dim: int = attention.head_dim
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._scale: float = attention.scaling
        self._epsilon: float = config.rms_norm_eps
        self._embed = model.embed_tokens
        self._dtype: torch.dtype = model.embed_tokens.weight.dtype
        self._tables = _rope_table(model.rotary_emb, context_tokens, self._head_dim, self._dtype)
        self._head: Product = weight_of(module.lm_head)
        self._layers = [self._take(layer, window) for layer, window in zip(model.layers, windows, strict=True)]
        self._final_norm = _norm_weight(model.norm)
        self._compiled: CompiledLayers | None = None
        if is_compiled(self._dtype, module.device):
            sizes = (self._heads, self._kv_heads, self._head_dim)
            self._compiled = CompiledLayers(
                self._layers, self._head, self._final_norm, self._tables, sizes, self._scale, self._epsilon
            )

    def _take(self, layer: Any, window: int | None) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qk_norm = None
        if hasattr(attention, "q_norm"):
            per_head = ((attention.q_norm, self._heads), (attention.k_norm, self._kv_heads))
            qk_norm = torch.cat([_norm_weight(norm).expand(count, -1) for norm, count in per_head])
        taken = _Layer(
            input_norm=_norm_weight(layer.input_layernorm),
            qkv=self._weight(*projections),
            qk_norm=qk_norm,
            output=self._weight(attention.o_proj),
            mlp_norm=_norm_weight(layer.post_attention_layernorm),
            gate=self._weight(mlp.gate_proj),
            up=self._weight(mlp.up_proj),
            down=self._weight(mlp.down_proj),
            window=window,
        )
        for linear in (*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            release(linear)
        return taken

    def _weight(self, *linears: Any) -> Any:
        product, pairs = weight_of(*linears), pairs_of(*linears)
        return AdaptedWeight(product, pairs, self._owners) if pairs else product

    def __call__(self, tokens: Tensor, positions: Tensor, attention: StepAttention, rows: Tensor) -> Tensor:
        """(num_tokens,) tokens and positions -> (len(rows), vocab_size) logits."""
        if self._compiled is not None and attention.adapters is None:
            plan = attention.plan(self._heads)
            if isinstance(plan, PagedAttention):
                return self._call_compiled(self._compiled, tokens, positions, attention, plan, rows)
        # 1. Embed. The hidden states live in tiles of rows: a tile's numbers stay near while it is worked on.
        num_rows = len(tokens)
        parts = -(-num_rows // TILE_ROWS)
        hidden = list(_split(self._embed(tokens), parts))
        places = _split(positions, parts)
        adapters = attention.adapters
        owned = [None] * parts if adapters is None else _split(adapters, parts)

        # 2. All layers but the last: project each tile, attend as a whole, and finish each tile.
        shape = (num_rows, self._heads + 2 * self._kv_heads, self._head_dim)
        state = torch.empty(shape, dtype=self._dtype) if parts > 1 else None
        targets = state.tensor_split(parts) if state is not None else (None,)
        for tile, target, place, own in zip(hidden, targets, places, owned, strict=True):
            self._owners.take(own)
            projected = self._project(self._layers[0], tile, place, target)
        for index, layer in enumerate(self._layers[:-1]):
            attended = self._attend(index, layer, projected if state is None else state, attention)
            following = self._layers[index + 1]
            for part, (answer, target) in enumerate(zip(_split(attended, parts), targets, strict=True)):
                attention.go_on()
                self._owners.take(owned[part])
                hidden[part] = self._finish(layer, answer, hidden[part])
                projected = self._project(following, hidden[part], places[part], target)

        # 3. The last layer stores every row's keys and values, and goes on with the asked rows alone.
        index, last = len(self._layers) - 1, self._layers[-1]
        projected = projected if state is None else state
        residual = torch.cat(hidden) if parts > 1 else hidden[0]
        if attention.asks_every_row and not attention.num_scored:
            answer = self._attend(index, last, projected, attention)
        else:
            attention.write(index, self._key_value(projected))
            answer = self._answer_asked(projected, attention, rows)
            residual = residual.index_select(0, rows)
        attention.go_on()
        self._owners.take(None if adapters is None else adapters[rows])
        final = self._finish(last, answer, residual)
        attention.go_on()
        return self._head(rms_norm(final, self._final_norm, self._epsilon))

    def _call_compiled(
        self,
        compiled: CompiledLayers,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        plan: PagedAttention,
        rows: Tensor,
    ) -> Tensor:
        assert len(tokens) == len(attention.slots), "a row that is padding has no slot to be written to"
        hidden, end = self._embed(tokens), len(self._layers)
        state = torch.empty(len(hidden), self._heads + 2 * self._kv_heads, self._head_dim)
        attended = torch.empty(len(hidden), self._heads * self._head_dim)
        logits = torch.empty(len(rows), self._head.out_features)
        if attention.asks_every_row and not attention.num_scored:
            compiled((0, end), hidden, state, attended, positions, attention, plan, logits)
        else:
            compiled((0, end - 1), hidden, state, attended, positions, attention, plan)
            attended = self._answer_asked(state, attention, rows)
            compiled((end, end), hidden.index_select(0, rows), state, attended, positions, attention, plan, logits)
        return logits

    def _answer_asked(self, state: Tensor, attention: StepAttention, rows: Tensor) -> Tensor:
        """What the last layer attends to for the asked rows alone, (len(rows), num_heads * head_dim)."""
        index, window = len(self._layers) - 1, self._layers[-1].window
        every, ends = self._query(state), rows[: len(rows) - attention.num_scored]
        query = every.index_select(0, ends)
        answer = attention.asked_rows().attend(index, query, self._scale, window).view(len(ends), -1)
        if attention.num_scored:  # beside the others, whose numbers stay what they are without them
            attended = attention.attend(index, every, self._scale, window).view(len(every), -1)
            answer = torch.cat((answer, attended.index_select(0, rows[len(ends) :])))
        return answer

    def _project(self, layer: _Layer, hidden: Tensor, positions: Tensor, target: Tensor | None) -> Tensor:
        """Queries, keys and values of a tile, (rows, num_heads + 2 * num_kv_heads, head_dim), positions applied.

        They are written to `target`, or to memory of their own without one.
        """
        projected = layer.qkv(rms_norm(hidden, layer.input_norm, self._epsilon))
        projected = projected.view(len(hidden), -1, self._head_dim)
        turn(projected, self._heads + self._kv_heads, layer.qk_norm, self._epsilon, self._tables, positions)
        return projected if target is None else target.copy_(projected)

    def _attend(self, index: int, layer: _Layer, state: Tensor, attention: StepAttention) -> Tensor:
        attention.write(index, self._key_value(state))
        return attention.attend(index, self._query(state), self._scale, layer.window).view(len(state), -1)

    def _query(self, state: Tensor) -> Tensor:
        return state[:, : self._heads]

    def _key_value(self, state: Tensor) -> Tensor:
        return state[:, self._heads :].view(len(state), 2, self._kv_heads, self._head_dim)

    def _finish(self, layer: _Layer, answer: Tensor, hidden: Tensor) -> Tensor:
        """What comes after attention: output projection and MLP, each added to the hidden states."""
        hidden = layer.output.add(answer, hidden)
        normed = rms_norm(hidden, layer.mlp_norm, self._epsilon)
        return layer.down.add(layer.up.multiply(normed, layer.gate.swish(normed)), hidden)


def _split(rows: Tensor, parts: int) -> Sequence[Tensor]:
    return rows.tensor_split(parts) if parts > 1 else (rows,)


def fuse(
    module: Any, context_tokens: int, windows: list[int | None], owners: Owners | None = None
) -> FusedForward | None:
    """The fused forward of a loaded model; None for one that is not of the family, or not on a CPU that packs.

    windows  for each layer the positions its attention reaches back, None for all (engine/compute/probe.py observed
    them)
    """
    if type(module) not in _FAMILY or not _is_plain(module):
        return None
    return FusedForward(module, context_tokens, windows, owners or Owners())


def _is_plain(module: Any) -> bool:
    """Whether every part is what FusedForward takes it for."""
    config, model = module.config, module.model
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    linears = [part for part in module.modules() if isinstance(part, nn.Linear | QuantizedLinear)]
    parameter = module.lm_head.weight
    return (
        config.hidden_act == "silu"
        and rope in _STEADY_ROPE
        and 2 * len(model.rotary_emb.inv_freq) == model.layers[0].self_attn.head_dim  # all of a head is turned
        and len(model.layers) == config.num_hidden_layers
        and all(type(linear) in (nn.Linear, QuantizedLinear) for linear in linears)
        and len({linear.weight.dtype for linear in linears}) == 1
        and can_pack(parameter.dtype, parameter.device)
    )


def _norm_weight(norm: Any) -> Tensor:
    """float32, times sqrt(size): rms_norm divides by the norm of the row instead of its mean square."""
    weight: Tensor = norm.weight.detach().float()
    return weight * math.sqrt(weight.shape[-1])


def _rope_table(rotary: Any, context_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, (context_tokens, head_dim) each, for x * cos + roll(x, half) * sin.

    The sines of the first half are negated: rotate_half(x) is roll(x, half) with its first half negated.
    """
    positions = torch.arange(context_tokens)[None]
    cos, sin = rotary(torch.empty(0, dtype=torch.float32), positions)
    sin = torch.cat((-sin[..., : head_dim // 2], sin[..., head_dim // 2 :]), -1)
    return cos[0].to(dtype).contiguous(), sin[0].to(dtype).contiguous()
