"""What steps name as what they come from: digests, versions and the rollout's precision, read from
the journal."""

from typing import Any

from fp8rl.context import RunContext
from fp8rl.guard import rollout_is_bf16
from fp8rl.recipe.precision import Linear
from fp8rl.reward.functions import function_digests


def in_bf16(context: RunContext, version: int) -> bool:
    """Whether the guard has taken the rollout under weight `version` out of FP8."""
    return rollout_is_bf16(context.journal, context.recipe.guard, version, context.origin)


def has_fp8_kv(context: RunContext, version: int) -> bool:
    """Whether the KV cache of the rollout under weight `version` is FP8."""
    fp8 = context.recipe.precision.kv_cache is Linear.FP8
    return fp8 and not in_bf16(context, version)


def kv_scales_of(context: RunContext, version: int) -> str | None:
    """The KV scales (JSON) of weight `version`; None where the rollout under it has a BF16 cache."""
    if not has_fp8_kv(context, version):
        return None
    return context.journal.read_file(version, "recalibrate_kv", "kv_scales.json").decode()


def kv_scales_inputs(context: RunContext, version: int) -> dict[str, Any]:
    """The KV scales of `version`, for steps that use them; nothing with a BF16 cache."""
    if not has_fp8_kv(context, version):
        return {}
    record = context.journal.record(version, "recalibrate_kv")
    return {"kv_scales": record.digest_of("kv_scales.json")}


def masters_digest(context: RunContext, version: int) -> str:
    """Digest of the learner's weights `version`: as recorded by the train step that made them, or by
    what came before the first one."""
    step = "warm_start" if version == context.origin else "train"
    return str(context.journal.record(version, step).output["weights"])


def weights_inputs(context: RunContext, version: int) -> dict[str, Any]:
    """The published weights and KV scales of `version`, for steps that sample with them."""
    return {
        "weight_version": version,
        "weights": context.journal.record(version, "requantize").output["digest"],
        **kv_scales_inputs(context, version),
    }


def prompts_digest(context: RunContext, split: str) -> str:
    """Digest of the run's prompts, "train" or "val"."""
    return context.journal.record(context.origin, "prepare_data").digest_of(f"{split}.parquet")


def file_digest(context: RunContext, iteration: int, step: str, name: str) -> str:
    """Digest of a file that `step` of `iteration` committed."""
    return context.journal.record(iteration, step).digest_of(name)


def functions_inputs(context: RunContext) -> dict[str, Any]:
    """The files of the recipe's reward functions, for steps that score; nothing where it has none."""
    digests = function_digests(context.recipe.task)
    return {"functions": digests} if digests else {}


def probe_sequences_of(context: RunContext) -> list[list[int]]:
    """The tokens that learner and engine both score."""
    from fp8rl.data.prepare import read_prompts
    from fp8rl.sync.probe import probe_sequences

    return probe_sequences(read_prompts(context.data_dir, "val"), context.recipe)
