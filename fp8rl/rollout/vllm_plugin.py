"""fp8rl's quantisation method for vLLM: W8A8 linears by our own numerics.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). The method
is asked for by the model config that the engine passes:

    quantization_config = {"quant_method": "fp8rl", "formats": {vLLM parameter name: format},
                           "precision": the recipe's section, "backend": its name}

(`quantization_config` writes it.) FP8 linears hold E4M3 codes and FP32 descales, one grid of tiles
over each Hugging Face projection, and compute with the backend that is named. BF16 linears are
vLLM's own, except that their weight is kept after packing so that it can be replaced. Attention gets
vLLM's own KV cache method, which gives it the q, k and v scales.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from fp8rl.model.precision import FORMAT_OF_DTYPE, Format
from fp8rl.numerics.backends import Backend, FusedWeight, Projections, backend
from fp8rl.numerics.formats import Fp8Recipe
from fp8rl.numerics.quantise import NonFiniteError, Quantised
from fp8rl.recipe.precision import Head, Precision
from fp8rl.recipe.rules import rollout_fp8

METHOD = "fp8rl"


def register() -> None:
    """Makes the method known to vLLM. Called by vLLM; safe to call again."""
    register_quantization_config(METHOD)(Fp8rlConfig)


def quantization_config(
    formats: dict[str, Format], precision: Precision, fp8_backend: str
) -> dict[str, Any]:
    """What the model config says to this method: plain values, as JSON has them."""
    return {
        "quant_method": METHOD,
        "formats": {name: fmt.value for name, fmt in formats.items()},
        "precision": precision.model_dump(mode="json"),
        "backend": fp8_backend,
    }


class Fp8rlConfig(QuantizationConfig):
    """The formats of a model's parameters, as the precision plan decided them."""

    def __init__(
        self, formats: dict[str, Format], recipe: Fp8Recipe, products: Backend, *, fp32_head: bool
    ) -> None:
        super().__init__()
        self.fp32_head = fp32_head
        self.formats = formats
        self.recipe = recipe
        self.products = products

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Fp8rlConfig":
        formats = {name: Format(value) for name, value in config["formats"].items()}
        precision = Precision.model_validate(config["precision"])
        recipe = rollout_fp8(precision)
        products = backend(config["backend"])
        if any(fmt.is_fp8 for fmt in formats.values()):
            products.check(recipe)
        return cls(formats, recipe, products, fp32_head=precision.head is Head.FP32)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of the module `prefix`; None leaves it to vLLM (embeddings, output)."""
        if isinstance(layer, Attention):
            return BaseKVCacheMethod(self)
        if isinstance(layer, ParallelLMHead) and self.fp32_head:
            return Fp32Head()
        if not isinstance(layer, LinearBase):
            return None
        fmt = self.formats.get(f"{prefix}.weight")
        if fmt is None:
            raise ValueError(f"vLLM module {prefix}: the precision plan does not know it")
        if fmt.is_fp8:
            return Fp8Linear(prefix, self.recipe, self.products)
        return ReplaceableBf16Linear()


class ReplaceableBf16Linear(UnquantizedLinearMethod):
    """vLLM's own BF16 linear, which on a CPU packs the weight and throws the original away.

    Here the original stays, and `process_weights_after_loading` packs it again after a change.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        layer.fp8rl_effective = FORMAT_OF_DTYPE[str(x.dtype)]
        return super().apply(layer, x, bias)


class Fp32Head(UnquantizedEmbeddingMethod):
    """An output projection in FP32: products of the BF16 weight that is held, by an FP32 copy of it.

    `process_weights_after_loading` makes the copy anew after a change. A tied projection has a module
    of its own in vLLM, which shares the embedding's weight: the embedding stays in BF16.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.fp8rl_head = layer.weight.detach().float()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, hidden] -> FP32 logits [tokens, vocab]."""
        layer.fp8rl_effective = FORMAT_OF_DTYPE["torch.float32"]
        return torch.nn.functional.linear(x.float(), layer.fp8rl_head, bias)


class Fp8Linear(LinearMethodBase):
    """W8A8: weight codes and descales as sent, activations quantised at each call.

    layer.weight: float8_e4m3fn [N, K]. layer.weight_scale_inv: FP32, the descales of each projection
    one after the other (with blocks, a projection's last one may be ragged).
    """

    def __init__(self, name: str, recipe: Fp8Recipe, products: Backend) -> None:
        self.name = name
        self.recipe = recipe
        self.products = products
        self.format = Format.of_weight(recipe.weight)

    def scale_rows(self, rows: int, columns: int) -> int:
        """Rows of descales of a projection [rows, columns]."""
        return self.recipe.weight.scale_shape(rows, columns)[0]

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        n, k = sum(output_partition_sizes), input_size_per_partition
        shapes = [self.recipe.weight.scale_shape(rows, k) for rows in output_partition_sizes]
        codes = torch.zeros(n, k, dtype=torch.float8_e4m3fn)
        # vLLM builds models with BF16 as the default dtype.
        scales = torch.ones(sum(s[0] for s in shapes), shapes[0][1], dtype=torch.float32)
        layer.register_parameter("weight", torch.nn.Parameter(codes, requires_grad=False))
        layer.register_parameter("weight_scale_inv", torch.nn.Parameter(scales, requires_grad=False))
        layer.fp8rl_rows = tuple(output_partition_sizes)

    def fused_weight(self, layer: Any) -> FusedWeight:
        """The weight that the layer holds; its memory is the layer's."""
        k = layer.weight.shape[1]
        down = [self.scale_rows(rows, k) for rows in layer.fp8rl_rows]
        codes = layer.weight.data.view(torch.uint8).split(layer.fp8rl_rows)
        scales = layer.weight_scale_inv.data.split(down)
        parts = [Quantised(c, s, self.recipe.weight) for c, s in zip(codes, scales, strict=True)]
        names = tuple(str(n) for n in range(len(parts)))
        return FusedWeight(Projections(names, layer.fp8rl_rows), parts, None)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepares the products from the codes; called again after each change."""
        layer.fp8rl_prepared = self.products.prepare(self.fused_weight(layer))

    def to_bf16(self, layer: Any) -> None:
        """Has `layer` hold and compute in BF16; its weight is to be loaded then."""
        self._give_up(layer)
        del layer.weight_scale_inv
        weight = torch.zeros(layer.weight.shape, dtype=torch.bfloat16)
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
        layer.quant_method = Bf16InsteadOfFp8(self)

    def back(self, layer: Any) -> None:
        """The way back from `to_bf16`; codes and descales are to be loaded then."""
        self._give_up(layer)
        n, k = layer.weight.shape
        self.create_weights(layer, k, list(layer.fp8rl_rows), k, n, torch.bfloat16)
        layer.quant_method = self

    @staticmethod
    def _give_up(layer: Any) -> None:
        """What was prepared from the weight, and what the last forward ran, do not count any more."""
        for name in ("fp8rl_effective", "fp8rl_prepared", "cpu_linear"):
            if hasattr(layer, name):
                delattr(layer, name)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        layer.fp8rl_effective = self.format
        rows = x.reshape(-1, x.shape[-1])
        try:
            out = self.products.forward(rows, layer.fp8rl_prepared, self.recipe.input)
        except NonFiniteError as error:
            raise error.of(self.name) from None
        out = out.view(*x.shape[:-1], -1)
        return out if bias is None else out + bias


class Bf16InsteadOfFp8(ReplaceableBf16Linear):
    """A linear that was built for FP8 and is in BF16 for now. fp8: its own method."""

    def __init__(self, fp8: Fp8Linear) -> None:
        super().__init__()
        self.fp8 = fp8


def switch_linears(model: torch.nn.Module, *, bf16: bool) -> int:
    """Has every FP8 linear of the live `model` hold and compute in BF16, or in FP8 again; how many.

    They hold nothing then: weights of that precision have to be loaded before the next forward.
    """
    switched = 0
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if bf16 and isinstance(method, Fp8Linear):
            method.to_bf16(layer)
        elif not bf16 and isinstance(method, Bf16InsteadOfFp8):
            method.fp8.back(layer)
        else:
            continue
        switched += 1
    return switched
