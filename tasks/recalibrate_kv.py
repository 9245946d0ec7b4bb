"""recalibrate_kv: scales of the FP8 KV cache for the new weights, applied, read back, and probed."""

from typing import Any

from fp8rl.context import RunContext
from fp8rl.model.kv_scales import KvScales
from fp8rl.recipe.precision import KvCalibration
from tasks.ensure import ensure_engine, ensure_learner
from tasks.inputs import file_digest, has_fp8_kv, masters_digest, prompts_digest
from tasks.ray_runtime import wait
from tasks.step import step
from tasks.sync import probe_engine


def _inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    inputs = {"weight_version": iteration, "weights": masters_digest(context, iteration)}
    if not has_fp8_kv(context, iteration):
        return inputs
    if iteration == context.origin:
        return inputs | {"prompts": prompts_digest(context, "train")}
    return inputs | {"rollouts": file_digest(context, iteration, "rollout", "rollouts.parquet")}


@step("recalibrate_kv", _inputs)
async def recalibrate_kv(
    context: RunContext, iteration: int
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Writes kv_scales.json; with a BF16 KV cache there is nothing to calibrate, and it says so.

    Either way the engine is whole now, and its log-probs are compared with the learner's.
    """
    learner = await ensure_learner(context, iteration)
    engine = await ensure_engine(context, iteration, scales=False)
    if not has_fp8_kv(context, iteration):
        await wait(learner.use_kv_scales.remote(iteration, None))
        probed, metrics = await probe_engine(context, learner, engine, iteration)
        return {}, {"output": {"needed": False, **probed}, "metrics": metrics}
    content: str
    if context.recipe.precision.kv_calibration is KvCalibration.ENGINE:
        content = await wait(engine.calibrate_kv.remote(iteration))
    else:
        content = await wait(learner.calibrate_kv.remote(context, iteration))
    used = await wait(engine.apply_kv_scales.remote(content))
    await wait(learner.use_kv_scales.remote(iteration, content))
    probed, metrics = await probe_engine(context, learner, engine, iteration)
    scales = KvScales.from_json(content)
    return {"kv_scales.json": content.encode()}, {
        "output": {
            "needed": True,
            "weight_version": scales.version,
            "side": scales.side,
            "statistic": scales.statistic,
            "source": scales.source,
            "used": used,
            **probed,
        },
        "metrics": {
            **metrics,
            "kv/tokens": float(scales.tokens),
            "kv/tokens_available": float(scales.tokens_available or scales.tokens),
            "kv/k_scale_max": max(layer.k for layer in scales.layers),
            "kv/v_scale_max": max(layer.v for layer in scales.layers),
        },
    }
