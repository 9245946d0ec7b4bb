"""The rollout engine on CUDA: vLLM's own FP8 linears and attention, asleep while the learner works.

NOT YET RUN ON A GPU, and named by no recipe: fp8rl/device.py refuses `device: cuda`.

The order around a sleep, each step a method here:

    sleep                 weights and KV cache are given up; the engine refuses to generate
    wake_for_weights      then Engine.load_weights
    wake_for_generation   the KV cache, and after_wake: scales applied, read back, prefix cache dropped

Scales come last because vLLM has, over its versions, reset them to 1.0 when the KV cache woke (since
PR 28783), and stopped doing so (PR 53508). Applied after the wake they are right under either.
"""

from pathlib import Path
from typing import Any

from fp8rl.model.kv_scales import KvScales, LayerScales
from fp8rl.rollout import cuda_config
from fp8rl.rollout.engine import Engine, EngineStateError


class CudaEngine(Engine):
    """As Engine, for a CUDA device. Not yet run on a GPU.

    Raises EngineStateError naming recipe keys or tensors where vLLM's FP8 would not be the published
    one, and UnprovableEngineError where vLLM chose kernels that hide what arrived.
    """

    environment = cuda_config.ENVIRONMENT

    def _start(self, model_dir: Path, max_len: int) -> Any:
        wrong = [f"{key}: {why}" for key, why in cuda_config.problems(self.recipe.precision)]
        wrong += cuda_config.unequal_grids(self.dims, self.plan)
        if wrong:
            raise EngineStateError("vLLM's own FP8 cannot run this:\n  " + "\n  ".join(wrong))
        return super()._start(model_dir, max_len)

    def _options(self, model_dir: Path, max_len: int) -> dict[str, Any]:
        return cuda_config.engine_options(self.recipe, self.plan, model_dir, max_len=max_len)

    def _weights_view(self, model: Any) -> Any:
        from fp8rl.rollout.cuda_weights import CudaWeights

        return CudaWeights(model, self.dims)

    def _hook_kv_writes(self) -> Any:
        """None: a CUDA graph would go past a Python hook, and vLLM's kernels there round to nearest."""
        return None

    def _switch_linears(self, bf16: bool) -> None:
        raise EngineStateError(
            "vLLM's own FP8 linears are not switched to BF16 yet: take the action rollout_bf16 out of "
            "guard.rules"
        )

    def sleep(self) -> None:
        """Gives up weights and KV cache. What the engine held no longer counts."""
        self.version = self.kv_version = None
        self.llm.sleep(level=2)

    def wake_for_weights(self) -> None:
        """Brings back memory for the weights, empty: `load_weights` comes next."""
        self.llm.wake_up(["weights"])
        self.weights.require_same_storage()

    def wake_for_generation(self, scales: KvScales | None) -> list[LayerScales]:
        """Brings back the KV cache and does what `after_wake` says.

        Raises EngineStateError where vLLM does not report itself awake.
        """
        if not self.llm.wake_up(["kv_cache"]):
            raise EngineStateError("vLLM is not awake: wake the weights, and load them, first")
        return self.after_wake(scales)

    def after_wake(self, scales: KvScales | None) -> list[LayerScales]:
        """What must follow every wake of the KV cache, whoever woke it: KV scales applied and read
        back, prefix cache dropped. scales: None for a BF16 cache. Returns the scales read back.

        Raises EngineStateError where an FP8 cache gets no scales, and as `apply_kv_scales`.
        """
        self.kv_version = None
        self._drop_prefix_cache()
        if not self.fp8_kv:
            return []
        if scales is None:
            raise EngineStateError("the KV cache is FP8 and woke: its scales must be applied again")
        return self.apply_kv_scales(scales)
