"""fp8rl's quantisation method for vLLM: block-wise W8A8 linears by our own numerics.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). The method
is asked for by the model config that the engine passes:

    quantization_config = {"quant_method": "fp8rl", "formats": {vLLM parameter name: format},
                           "pow2_activations": bool}

FP8 linears hold E4M3 codes and FP32 descales, one 128x128 grid over each Hugging Face projection,
and compute the FP32 product of the dequantised operands. BF16 linears are vLLM's own, except that
their weight is kept after packing so that it can be replaced. Attention gets vLLM's own KV cache
method, which gives it the q, k and v scales.
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

from fp8rl.model.precision import FORMAT_OF_DTYPE, Format
from fp8rl.numerics.blockwise import dequantise_weight, round_trip_groups
from fp8rl.numerics.formats import BLOCK
from fp8rl.numerics.padding import padded_size

METHOD = "fp8rl"


def register() -> None:
    """Makes the method known to vLLM. Called by vLLM; safe to call again."""
    register_quantization_config(METHOD)(Fp8rlConfig)


def block_rows(rows: int) -> int:
    """Rows of descales of a projection with `rows` output rows."""
    return padded_size(rows, BLOCK) // BLOCK


class Fp8rlConfig(QuantizationConfig):
    """The formats of a model's parameters, as the precision plan decided them."""

    def __init__(self, formats: dict[str, Format], pow2_activations: bool) -> None:
        super().__init__()
        self.formats = formats
        self.pow2_activations = pow2_activations

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
        return cls(formats, config["pow2_activations"])

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of the module `prefix`; None leaves it to vLLM (embeddings, output)."""
        if isinstance(layer, Attention):
            return BaseKVCacheMethod(self)
        if not isinstance(layer, LinearBase):
            return None
        fmt = self.formats.get(f"{prefix}.weight")
        if fmt is None:
            raise ValueError(f"vLLM module {prefix}: the precision plan does not know it")
        if fmt is Format.FP8_BLOCK:
            return BlockFp8Linear(self.pow2_activations)
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


class BlockFp8Linear(LinearMethodBase):
    """Block-wise W8A8: weight codes and descales as sent, activations quantised at each call.

    layer.weight: float8_e4m3fn [N, K]. layer.weight_scale_inv: FP32 [blocks, ceil(K/128)], the
    descales of each projection one after the other (a projection's last block may be ragged).
    """

    def __init__(self, pow2_activations: bool) -> None:
        self.pow2_activations = pow2_activations

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
        blocks = sum(block_rows(rows) for rows in output_partition_sizes)
        codes = torch.zeros(n, k, dtype=torch.float8_e4m3fn)
        # vLLM builds models with BF16 as the default dtype.
        scales = torch.ones(blocks, block_rows(k), dtype=torch.float32)
        layer.register_parameter("weight", torch.nn.Parameter(codes, requires_grad=False))
        layer.register_parameter("weight_scale_inv", torch.nn.Parameter(scales, requires_grad=False))
        layer.fp8rl_rows = tuple(output_partition_sizes)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Dequantises the codes for the FP32 products; called again after each change."""
        parts = []
        row = block = 0
        for rows in layer.fp8rl_rows:
            blocks = block_rows(rows)
            codes = layer.weight.data[row : row + rows]
            scales = layer.weight_scale_inv.data[block : block + blocks]
            parts.append(dequantise_weight(codes, scales))
            row, block = row + rows, block + blocks
        layer.fp8rl_dequantised = torch.cat(parts)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] BF16 -> [..., N] BF16."""
        layer.fp8rl_effective = Format.FP8_BLOCK
        rounded = round_trip_groups(x, power_of_two=self.pow2_activations)
        out = (rounded @ layer.fp8rl_dequantised.t()).to(x.dtype)
        return out if bias is None else out + bias
