"""Puts published weights and KV scales into a live vLLM model on CUDA, and reads them back.

NOT YET RUN ON A GPU. What it relies on in vLLM is held by tests/contract/test_vllm_cuda.py.

The kernels that are allowed here (cuda_config.KERNELS) compute from the very memory that vLLM
registered: its `process_weights_after_loading` makes new Parameter objects over the same storage. So
published tensors are copied into that storage in place, from the first version on, and the hook is
not called again: a CUDA graph keeps the addresses that it was recorded with. Where the storage has
moved all the same, the load is refused, since graphs would go on with the old one.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

from fp8rl.model.dims import ModelDims
from fp8rl.model.names import Slot
from fp8rl.model.precision import Format
from fp8rl.numerics.formats import BLOCK, fp8_recipe
from fp8rl.numerics.quantise import round_trip
from fp8rl.rollout.cuda_config import ATTENTION, KERNELS
from fp8rl.rollout.engine_weights import EngineWeights


class UnprovableEngineError(RuntimeError):
    """vLLM runs something here that would hide whether weights or scales arrived."""


class CudaWeights(EngineWeights):
    """A live vLLM model on CUDA whose linears are vLLM's own. Not yet run on a GPU.

    Raises UnprovableEngineError naming the layer where vLLM chose a kernel or an attention backend
    that hides what arrived, and PublishedWeightsError as EngineWeights.
    """

    def __init__(self, model: nn.Module, dims: ModelDims) -> None:
        super().__init__(model, dims)
        for slot in self.table:
            if slot.is_linear:
                self._format(slot)
        for number, layer in enumerate(self.attention()):
            _require_readable_scales(number, layer)
        self._storage = self._addresses()

    def _scale_rows(self, slot: Slot, rows: int) -> int:
        """vLLM's rows of descales of a projection: its grid starts at a whole block."""
        return -(-rows // BLOCK)

    def _repack(self) -> None:
        """Nothing to repack: the kernels read the memory that was written."""
        self.require_same_storage()

    def _addresses(self) -> dict[str, int]:
        return {name: p.data_ptr() for name, p in self.model.named_parameters()}

    def require_same_storage(self) -> None:
        """Raises UnprovableEngineError where a parameter is no longer where it was at the start."""
        now = self._addresses()
        moved = sorted(
            n for n in now.keys() | self._storage.keys() if now.get(n) != self._storage.get(n)
        )
        if moved:
            raise UnprovableEngineError(
                f"vLLM moved parameters since the start, and CUDA graphs read the old ones: {moved}"
            )

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Copies of what the engine holds, by Hugging Face name, in host memory; of all where None."""
        self.require_same_storage()
        views = self.views()
        chosen = views if names is None else names
        return {name: views[name].to("cpu", copy=True) for name in chosen}

    def reference_product(self, slot: Slot, x: Tensor) -> Tensor:
        """As EngineWeights, from vLLM's own FP8 parameters."""
        layer = self.linear(slot)
        if not self._format(slot).is_fp8:
            return x.float() @ layer.weight.float().t()
        n, k = layer.weight.shape
        scales = layer.weight_scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        weight = layer.weight.float() * scales[:n, :k]
        return round_trip(x, fp8_recipe().input, name="activation") @ weight.t()

    def effective_formats(self) -> dict[str, Format]:
        """The format that each parameter is computed in, by the methods that vLLM gave its layers."""
        return {
            name: self._format(slot) if slot.is_linear else Format.BF16
            for slot in self.table
            for name in slot.hf
        }

    def _format(self, slot: Slot) -> Format:
        name = slot.vllm.removesuffix(".weight")
        method = self.linear(slot).quant_method
        if isinstance(method, UnquantizedLinearMethod):
            return Format.BF16
        if not isinstance(method, Fp8LinearMethod):
            raise UnprovableEngineError(f"{name}: {type(method).__name__} is not known here")
        _require_readable_weights(name, method.fp8_linear)
        return Format.FP8_BLOCK

    def kv_cache_types(self) -> dict[str, str]:
        """As EngineWeights, and "query": "fp8" where vLLM quantises queries too, by the q scale."""
        quantised = {layer.query_quant is not None for layer in self.attention()}
        if len(quantised) != 1:
            raise RuntimeError("layers differ in whether they quantise queries")
        return super().kv_cache_types() | {"query": "fp8" if quantised.pop() else "bf16"}


def _require_readable_weights(name: str, kernel: Any) -> None:
    """Raises UnprovableEngineError unless `kernel` leaves published bytes and scales as they are."""
    chosen = type(kernel).__name__
    reason = KERNELS.get(chosen, "it is not known here; see docs/vllm_adapter.md")
    if getattr(kernel, "use_deep_gemm_e8m0", False):
        reason = "it rounds scales to powers of two (UE8M0). Set VLLM_USE_DEEP_GEMM_E8M0=0"
    if reason is not None:
        raise UnprovableEngineError(f"{name}: vLLM chose {chosen} for its products: {reason}")


def _require_readable_scales(number: int, layer: Any) -> None:
    """Raises UnprovableEngineError unless attention reads its KV scales where they are written."""
    if not layer.kv_cache_dtype.startswith("fp8"):
        return
    backend = layer.attn_backend.get_name()
    reason = ATTENTION.get(backend, "it is not known here; see docs/vllm_adapter.md")
    if reason is not None:
        raise UnprovableEngineError(f"layer {number}: vLLM chose the attention {backend}: {reason}")
