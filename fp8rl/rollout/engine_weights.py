"""Puts published weights and KV scales into a live vLLM model, and reads them back.

What each function relies on in vLLM is held by tests/contract/test_vllm_engine.py.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from fp8rl.model.dims import ModelDims
from fp8rl.model.kv_scales import KvScales, KvScalesError, LayerScales
from fp8rl.model.manifest import SCALE_SUFFIX, PublishedWeightsError
from fp8rl.model.names import Slot, attention_layer_name, name_table
from fp8rl.model.precision import Format
from fp8rl.numerics.backends import backend
from fp8rl.rollout.vllm_plugin import Fp8Linear, ReplaceableBf16Linear

_REPACKED = (Fp8Linear, ReplaceableBf16Linear, UnquantizedEmbeddingMethod)


class EngineWeights:
    """A live vLLM model seen through the name table."""

    def __init__(self, model: nn.Module, dims: ModelDims) -> None:
        self.model = model
        self.dims = dims
        self.table = name_table(dims)
        self._parameters = dict(model.named_parameters())
        known = {slot.vllm for slot in self.table}
        known |= {self._scale_name(slot) for slot in self.table if self._is_fp8(slot)}
        if known != self._parameters.keys():
            raise PublishedWeightsError(
                "vLLM's parameters are not those of the name table: "
                + ", ".join(sorted(known ^ self._parameters.keys()))
            )

    @staticmethod
    def _scale_name(slot: Slot) -> str:
        return slot.vllm.removesuffix("weight") + "weight_scale_inv"

    def _is_fp8(self, slot: Slot) -> bool:
        return self._parameters[slot.vllm].dtype is torch.float8_e4m3fn

    def linear(self, slot: Slot) -> Any:
        """vLLM's module that holds the slot."""
        return self.model.get_submodule(slot.vllm.removesuffix(".weight"))

    def views(self) -> dict[str, Tensor]:
        """Where each published tensor lives in the engine, by Hugging Face name."""
        views: dict[str, Tensor] = {}
        for slot in self.table:
            weight, row, block = self._parameters[slot.vllm].data, 0, 0
            for name, rows in zip(slot.hf, slot.rows, strict=True):
                views[name] = weight[row : row + rows]
                row += rows
                if self._is_fp8(slot):
                    scales = self._parameters[self._scale_name(slot)].data
                    high = self._scale_rows(slot, rows)
                    views[name + SCALE_SUFFIX] = scales[block : block + high]
                    block += high
        return views

    def _scale_rows(self, slot: Slot, rows: int) -> int:
        """Rows of descales of a projection of `rows` rows in `slot`."""
        high: int = self.linear(slot).quant_method.scale_rows(rows, slot.columns)
        return high

    def reference_product(self, slot: Slot, x: Tensor) -> Tensor:
        """FP32 [T, N]: what the linear `slot` should make of x [T, K] with the weights it holds."""
        layer = self.linear(slot)
        method = layer.quant_method
        if not isinstance(method, Fp8Linear):
            return x.float() @ layer.weight.float().t()
        reference = backend("reference")
        product: Tensor = reference.forward(
            x, reference.prepare(method.fused_weight(layer)), method.recipe.input
        )
        return product.float()

    @torch.no_grad()
    def repack(self) -> None:
        """Has what vLLM computes with made anew from the weights, which were changed in place."""
        for slot in self.table:  # vLLM pads the vocabulary; the padding must not hold noise
            self._parameters[slot.vllm].data[sum(slot.rows) :].zero_()
        self._repack()

    def _repack(self) -> None:
        """Has vLLM prepare its products from the weights that were just written."""
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, _REPACKED):
                method.process_weights_after_loading(module)

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Copies of what the engine holds, by Hugging Face name; of all where `names` is None."""
        views = self.views()
        return {name: views[name].clone() for name in (views if names is None else names)}

    def effective_formats(self) -> dict[str, Format]:
        """The format that each parameter was used in by the last forward."""
        formats: dict[str, Format] = {}
        for slot in self.table:
            effective = Format.BF16
            if slot.is_linear:
                module = self.linear(slot)
                if not hasattr(module, "fp8rl_effective"):
                    raise RuntimeError("effective formats are known after a first forward only")
                effective = module.fp8rl_effective
            formats.update(dict.fromkeys(slot.hf, effective))
        return formats

    def head_type(self) -> str:
        """What the last forward's output projection was in: "fp32" or "bf16"."""
        head = self.model.get_submodule("lm_head")
        effective = getattr(head, "fp8rl_effective", Format.BF16)
        return str(effective.value)

    def attention(self) -> list[Any]:
        """vLLM's `Attention` modules, in the order of the layers."""
        modules = dict(self.model.named_modules())
        return [modules[attention_layer_name(i)] for i in range(self.dims.layers)]

    def kv_cache_types(self) -> dict[str, str]:
        """What the KV cache is: {"dtype": as vLLM names it, "storage": torch dtype of its memory}."""
        layers = self.attention()
        caches = [c for layer in layers for c in _cache_tensors(layer.kv_cache)]
        found = {(layer.kv_cache_dtype, str(c.dtype)) for layer, c in zip(layers, caches, strict=True)}
        if len(found) != 1:
            raise RuntimeError(f"layers differ in their KV cache: {sorted(found)}")
        dtype, storage = found.pop()
        return {"dtype": dtype, "storage": storage.removeprefix("torch.")}

    def apply_kv_scales(self, scales: KvScales) -> list[LayerScales]:
        """Sets q, k and v scales of every layer, the tensors and the host copies that kernels read."""
        for layer, values in zip(self.attention(), scales.layers, strict=True):
            for name, value in (("q", values.q), ("k", values.k), ("v", values.v)):
                getattr(layer, f"_{name}_scale").fill_(value)
                setattr(layer, f"_{name}_scale_float", value)
                if hasattr(layer, f"_{name}_scale_cpu"):
                    getattr(layer, f"_{name}_scale_cpu").fill_(value)
        used = self.read_kv_scales()
        if used != list(scales.layers):
            raise KvScalesError(f"scales read back {used} are not those sent {scales.layers}")
        return used

    def read_kv_scales(self) -> list[LayerScales]:
        """The scales in use; raises KvScalesError where a tensor and its host copy differ."""
        result = []
        for number, layer in enumerate(self.attention()):
            values = {}
            for name in "qkv":
                host = getattr(layer, f"_{name}_scale_float")
                tensors = [getattr(layer, f"_{name}_scale{s}", None) for s in ("", "_cpu")]
                for tensor in tensors:
                    if tensor is not None and float(tensor) != float(torch.tensor(host)):
                        raise KvScalesError(
                            f"layer {number}: {name}_scale is {float(tensor)} on the device, "
                            f"{host} on the host"
                        )
                values[name] = host
            result.append(LayerScales(**values))
        return result


def _cache_tensors(cache: Any) -> list[Tensor]:
    """The cache of one layer: a tensor, or a list with one per virtual engine."""
    return [cache] if isinstance(cache, Tensor) else list(cache)[:1]
