"""Builds Megatron-core's GPTModel from a Hugging Face config, and moves weights in and out of it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from safetensors.torch import load_file
from torch import Tensor, nn

from fp8rl.model.cpu_megatron import (
    CPU_CONFIG,
    CoreAttention,
    init_single_rank,
)
from fp8rl.model.dims import ModelDims
from fp8rl.model.kv_scales import KvScales, LayerScales
from fp8rl.model.layers import (
    PlannedColumnLinear,
    PlannedLinear,
    PlannedRowLinear,
    ResidualAdd,
    RmsNorm,
    rows_linear,
)
from fp8rl.model.names import Slot, megatron_row_order, name_table
from fp8rl.model.precision import Decision, Format
from fp8rl.model.rotary import Rotary
from fp8rl.model.rounding import MEGATRON, Rounding
from fp8rl.numerics.backends import Projections, backend
from fp8rl.numerics.formats import Fp8Recipe, Scheme, fp8_recipe
from fp8rl.numerics.linear import quantise_parts
from fp8rl.numerics.quantise import Quantised
from fp8rl.recipe.precision import Head


class WeightsError(ValueError):
    """Weights that do not fit the model: the text names the tensors."""


def layer_spec(*, qk_norm: bool = False) -> ModuleSpec:
    """Megatron-core's spec of one transformer block."""
    head_norm = RmsNorm if qk_norm else None
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=PlannedColumnLinear,
                    core_attention=CoreAttention,
                    linear_proj=PlannedRowLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=ResidualAdd,
            pre_mlp_layernorm=RmsNorm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=PlannedColumnLinear, linear_fc2=PlannedRowLinear),
            ),
            mlp_bda=ResidualAdd,
        ),
    )


def transformer_config(dims: ModelDims, **more: Any) -> TransformerConfig:
    """Megatron-core's config of a model of `dims`. more: fields that the device or backend decides."""
    return TransformerConfig(
        num_layers=dims.layers,
        hidden_size=dims.hidden,
        ffn_hidden_size=dims.intermediate,
        num_attention_heads=dims.heads,
        num_query_groups=dims.kv_heads,
        kv_channels=dims.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=dims.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=dims.qkv_bias,
        qk_layernorm=dims.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **more,
    )


class PolicyModel(nn.Module):
    """A policy in Megatron-core, addressed by Hugging Face names.

    Parameters are FP32 masters. Activations are `compute_dtype` (BF16; FP32 for comparisons).
    `plan` decides the format of each linear; `fp8` and `fp8_backend` say how FP8 rounds and what
    computes its products; `rounding` says where the rest rounds, `head` what the output projection is
    in. Raises BackendError where that backend cannot run.
    """

    def __init__(
        self,
        dims: ModelDims,
        plan: Mapping[str, Decision],
        *,
        compute_dtype: torch.dtype = torch.bfloat16,
        fp8: Fp8Recipe = fp8_recipe(),  # noqa: B008  frozen
        fp8_backend: str = "reference",
        rounding: Rounding = MEGATRON,
        head: Head = Head.BF16,
    ) -> None:
        super().__init__()
        self._fp8, self._products = fp8, backend(fp8_backend)
        init_single_rank()
        self.dims = dims
        self.table = name_table(dims)
        self.compute_dtype = compute_dtype
        self.gpt = GPTModel(
            transformer_config(dims, params_dtype=torch.float32, **CPU_CONFIG),
            layer_spec(qk_norm=dims.qk_norm),
            vocab_size=dims.vocab,
            max_sequence_length=dims.max_positions,
            share_embeddings_and_output_weights=dims.tied_embeddings,
            position_embedding_type="none",  # attention rotates by itself
        )
        # GPTModel makes the last norm itself, so it is replaced rather than named in the spec.
        self.gpt.decoder.final_layernorm = RmsNorm(self.gpt.config, dims.hidden, eps=dims.norm_eps)
        # The residual stream is in the compute dtype from the embedding on.
        self.gpt.embedding.register_forward_hook(lambda _m, _i, out: out.to(compute_dtype))
        self._product_of_head = _fp32_head if head is Head.FP32 else _head
        self.gpt.output_layer._forward_impl = self._product_of_head
        rotary = Rotary(dims)
        self._attention = [m for m in self.gpt.modules() if isinstance(m, CoreAttention)]
        for attention in self._attention:
            attention.rotary = rotary
        for module in self.gpt.modules():
            if isinstance(module, RmsNorm | ResidualAdd):
                module.compute_dtype = compute_dtype
        self.set_rounding(rounding)
        self._order = {
            slot.megatron: None if rows is None else torch.tensor(rows)
            for slot in self.table
            for rows in [megatron_row_order(slot, dims)]
        }
        self._parameters_by_name = dict(self.gpt.named_parameters())
        self.linears: dict[str, tuple[Slot, PlannedLinear]] = {}
        for slot in self.table:
            if slot.is_linear:
                module = self.gpt.get_submodule(slot.megatron.removesuffix(".weight"))
                assert isinstance(module, PlannedLinear)
                self.linears[slot.megatron] = (slot, module)
        self.set_formats(plan)

    def _projections(self, slot: Slot) -> Projections:
        return Projections(slot.hf, slot.rows, self._order[slot.megatron])

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, seq], padded on the right -> logits [batch, seq, vocab], in the compute dtype,
        or in FP32 with an FP32 head."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits: Tensor = self.gpt(tokens, positions, attention_mask=None)
        return logits

    def split_outputs(self, slot: str, out: Tensor) -> list[Tensor]:
        """out [..., rows] of the linear of the Megatron parameter `slot` by Hugging Face projection."""
        projections = self._projections(self.linears[slot][0])
        parts = projections.split_columns(out.flatten(0, -2))
        return [part.unflatten(0, out.shape[:-1]) for part in parts]

    def project(self, normed: Tensor) -> Tensor:
        """The output projection: [..., hidden] after the last norm -> logits [..., vocab]."""
        tied = self.gpt.share_embeddings_and_output_weights
        weight = self.gpt.shared_embedding_or_output_weight() if tied else self.gpt.output_layer.weight
        logits: Tensor = self._product_of_head(normed, weight)
        return logits

    def set_formats(self, plan: Mapping[str, Decision]) -> None:
        """From the next forward on, each linear computes in the format that `plan` decides. Raises
        BackendError where the backend cannot run FP8."""
        if any(decision.format.is_fp8 for decision in plan.values()):
            self._products.check(self._fp8)
        for slot, module in self.linears.values():
            fmt = plan[slot.hf[0]].format
            if module.requested is not fmt:  # else what was quantised stays good
                module.plan(self._projections(slot), fmt, self._fp8, self._products)

    def set_rounding(self, rounding: Rounding) -> None:
        """From the next forward on, rounds at these points as the rollout engine does."""
        for module in self.gpt.modules():
            if isinstance(module, RmsNorm | ResidualAdd | CoreAttention):
                module.rounding = rounding

    def set_kv_scales(self, scales: KvScales | None) -> None:
        """From the next forward on, attention sees K and V as an FP8 KV cache with `scales` holds them;
        None: as they are. Raises KvScalesError where they are not of as many layers."""
        layers: Sequence[LayerScales | None] = [None] * self.dims.layers
        if scales is not None:
            scales.require_usable(layers=self.dims.layers, version=scales.version)
            layers = scales.layers
        for module in self._attention:
            module.kv_scales = layers[module.layer]

    def set_observer(self, observer: Callable[[int, Tensor, Tensor, Tensor], None] | None) -> None:
        """Lets `observer` see q, k, v of every layer (`CoreAttention`); None takes it away."""
        for module in self._attention:
            module.observer = observer

    def effective_formats(self) -> dict[str, Format]:
        """The format that each parameter was used in by the last forward, by Hugging Face name."""
        formats = {}
        for slot in self.table:
            if slot.is_linear:
                effective = self.linears[slot.megatron][1].effective
                if effective is None:
                    raise RuntimeError("effective formats are known after a first forward only")
            else:
                effective = Format.BF16
            formats.update(dict.fromkeys(slot.hf, effective))
        return formats

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sets every parameter from Hugging Face names, exactly once.

        Raises WeightsError naming missing, unknown and misshapen tensors; then nothing is loaded.
        """
        shapes = {
            name: (rows,) if slot.columns is None else (rows, slot.columns)
            for slot in self.table
            for name, rows in zip(slot.hf, slot.rows, strict=True)
        }
        problems = [f"{name}: missing" for name in shapes if name not in weights]
        problems += [f"{name}: not a parameter of this model" for name in weights.keys() - shapes]
        problems += [
            f"{name}: shape {tuple(weights[name].shape)}, needs {shape}"
            for name, shape in shapes.items()
            if name in weights and tuple(weights[name].shape) != shape
        ]
        if problems:
            raise WeightsError("weights do not fit the model:\n  " + "\n  ".join(sorted(problems)))
        for slot in self.table:
            parts = [weights[name].float() for name in slot.hf]
            self._parameters_by_name[slot.megatron].copy_(self._projections(slot).join(parts))

    @torch.no_grad()
    def export_slot(self, slot: Slot) -> dict[str, Tensor]:
        """Copies of a slot's FP32 masters by Hugging Face name."""
        parts = self._projections(slot).split(self._parameters_by_name[slot.megatron].detach())
        return {n: p.clone() for n, p in zip(slot.hf, parts, strict=True)}

    def export(self) -> dict[str, Tensor]:
        """Copies of all FP32 masters by Hugging Face name."""
        return {name: part for slot in self.table for name, part in self.export_slot(slot).items()}

    def quantised(self, slot: Slot, scheme: Scheme) -> dict[str, Quantised]:
        """Codes and descales of a linear slot by Hugging Face name.

        Where this model computes the slot in FP8 by the same scheme they are the very codes of its
        own forward.
        """
        master = self._parameters_by_name[slot.megatron]
        fp8 = self.linears[slot.megatron][1].fp8
        if fp8 is not None and fp8.recipe.weight == scheme:
            return fp8.quantised(master)
        parts = quantise_parts(master, self._projections(slot), scheme)
        return dict(zip(slot.hf, parts, strict=True))

    def reset(self, seed: int) -> None:
        """Random weights: normal with the config's standard deviation, norms at one, biases at zero.

        Matrices that write to the residual stream are scaled by 1 / sqrt(2 * layers), as in GPT-2.
        """
        generator = torch.Generator().manual_seed(seed)
        residual_std = self.dims.init_std / (2 * self.dims.layers) ** 0.5
        weights: dict[str, Tensor] = {}
        for slot in self.table:
            for name, rows in zip(slot.hf, slot.rows, strict=True):
                if slot.columns is None:
                    weights[name] = torch.full((rows,), 0.0 if name.endswith(".bias") else 1.0)
                else:
                    residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                    std = residual_std if residual else self.dims.init_std
                    weights[name] = std * torch.randn(rows, slot.columns, generator=generator)
        self.load(weights)


def _head(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    return rows_linear(input, weight.to(input.dtype))


def _fp32_head(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    # By the weight that the engine is sent.
    return rows_linear(input.float(), weight.to(input.dtype).float())


def read_hf_weights(folder: Path, dims: ModelDims) -> dict[str, Tensor]:
    """Tensors of a Hugging Face folder's safetensors files, by name.

    Raises WeightsError where there is no file, a tensor is in two, or a tied output projection is
    stored with values of its own.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder}: no *.safetensors file")
    weights: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in load_file(file).items():
            if name in weights:
                raise WeightsError(f"{name} is in two files of {folder}")
            weights[name] = tensor
    if dims.tied_embeddings and "lm_head.weight" in weights:
        head = weights.pop("lm_head.weight")
        if not torch.equal(head, weights.get("model.embed_tokens.weight", head.new_empty(0))):
            raise WeightsError(f"{folder}: tied embeddings, but lm_head.weight differs from them")
    return weights
