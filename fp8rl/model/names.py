"""The one table of weight names: Hugging Face, Megatron-core and vLLM. Imports without torch.

Hugging Face names are the common language: the precision plan decides on them, published weights
carry them, blocks of 128x128 lie over each of them. Megatron-core and vLLM fuse some into one
matrix: vLLM lays q, k, v (and gate, up) one after the other; Megatron lays gate, up likewise but
interleaves q, k, v by KV group:

    q heads of group 0 | k head 0 | v head 0 | q heads of group 1 | k head 1 | v head 1 | ...
"""

from dataclasses import dataclass

from fp8rl.model.dims import ModelDims


@dataclass(frozen=True)
class Slot:
    """One matrix or vector of an engine and the Hugging Face tensors that it holds.

    hf: parameter names, in the order in which they are fused. rows: output rows of each.
    columns: input size, or None for a vector. interleaved: Megatron's q, k, v order.
    is_linear: a linear layer of a transformer block, the only kind that may be FP8.
    """

    hf: tuple[str, ...]
    megatron: str
    vllm: str
    rows: tuple[int, ...]
    columns: int | None
    interleaved: bool = False
    is_linear: bool = False


def name_table(dims: ModelDims) -> list[Slot]:
    """Every parameter of a model of one of the families, exactly once."""
    hidden, inter = dims.hidden, dims.intermediate
    table = [_embedding(dims)]
    for i in range(dims.layers):
        hf, meg = f"model.layers.{i}", f"decoder.layers.{i}"
        attention, mlp = f"{hf}.self_attn", f"{hf}.mlp"
        table += [
            _vector(f"{hf}.input_layernorm.weight", f"{meg}.input_layernorm.weight", hidden),
            _qkv(attention, f"{meg}.self_attention", dims, "weight"),
            *_attention_vectors(attention, f"{meg}.self_attention", dims),
            Slot(
                hf=(f"{attention}.o_proj.weight",),
                megatron=f"{meg}.self_attention.linear_proj.weight",
                vllm=f"{attention}.o_proj.weight",
                rows=(hidden,),
                columns=dims.q_rows,
                is_linear=True,
            ),
            _vector(f"{hf}.post_attention_layernorm.weight", f"{meg}.pre_mlp_layernorm.weight", hidden),
            Slot(
                hf=(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
                megatron=f"{meg}.mlp.linear_fc1.weight",
                vllm=f"{mlp}.gate_up_proj.weight",
                rows=(inter, inter),
                columns=hidden,
                is_linear=True,
            ),
            Slot(
                hf=(f"{mlp}.down_proj.weight",),
                megatron=f"{meg}.mlp.linear_fc2.weight",
                vllm=f"{mlp}.down_proj.weight",
                rows=(hidden,),
                columns=inter,
                is_linear=True,
            ),
        ]
    table.append(_vector("model.norm.weight", "decoder.final_layernorm.weight", hidden))
    if not dims.tied_embeddings:
        table.append(_head(dims))
    return table


def _qkv(hf: str, megatron: str, dims: ModelDims, what: str) -> Slot:
    """q, k and v fused. what: "weight", or "bias"."""
    is_linear = what == "weight"
    return Slot(
        hf=tuple(f"{hf}.{p}_proj.{what}" for p in "qkv"),
        megatron=f"{megatron}.linear_qkv.{what}",
        vllm=f"{hf}.qkv_proj.{what}",
        rows=(dims.q_rows, dims.kv_rows, dims.kv_rows),
        columns=dims.hidden if is_linear else None,
        interleaved=True,
        is_linear=is_linear,
    )


def _attention_vectors(hf: str, megatron: str, dims: ModelDims) -> list[Slot]:
    """What a family has besides matrices: biases of q, k and v, norms of each query and key head."""
    slots = []
    if dims.qkv_bias:
        slots.append(_qkv(hf, megatron, dims, "bias"))
    if dims.qk_norm:
        slots += [
            _vector(f"{hf}.{p}_norm.weight", f"{megatron}.{p}_layernorm.weight", dims.head_dim)
            for p in "qk"
        ]
    return slots


def _embedding(dims: ModelDims) -> Slot:
    return Slot(
        hf=("model.embed_tokens.weight",),
        megatron="embedding.word_embeddings.weight",
        vllm="model.embed_tokens.weight",
        rows=(dims.vocab,),
        columns=dims.hidden,
    )


def _head(dims: ModelDims) -> Slot:
    return Slot(
        hf=("lm_head.weight",),
        megatron="output_layer.weight",
        vllm="lm_head.weight",
        rows=(dims.vocab,),
        columns=dims.hidden,
    )


def _vector(hf: str, megatron: str, size: int) -> Slot:
    return Slot(hf=(hf,), megatron=megatron, vllm=hf, rows=(size,), columns=None)


def megatron_row_order(slot: Slot, dims: ModelDims) -> list[int] | None:
    """Megatron row of each row of the slot's Hugging Face tensors laid one after the other.

    None where the two orders are the same.
    """
    if not slot.interleaved:
        return None
    head = dims.head_dim
    q_per_group = dims.heads // dims.kv_heads * head
    group = q_per_group + 2 * head
    order: list[int] = []
    for offset, rows in ((0, q_per_group), (q_per_group, head), (q_per_group + head, head)):
        for g in range(dims.kv_heads):
            start = g * group + offset
            order.extend(range(start, start + rows))
    return order


def attention_layer_name(layer: int) -> str:
    """vLLM's name of a layer's attention; KV scales are keyed by the layer's global number."""
    return f"model.layers.{layer}.self_attn.attn"
