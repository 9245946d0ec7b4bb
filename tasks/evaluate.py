"""evaluate: answers to the validation prompts, greedy and sampled, in the rollout's precision and, with
evaluate.bf16, in BF16 beside it."""

import shutil
from typing import Any

from fp8rl import progress
from fp8rl.context import RunContext
from fp8rl.recipe.precision import Linear
from fp8rl.samples import BF16_FILE, FILE
from fp8rl.tables import to_parquet
from fp8rl.validation import evaluation_metrics
from tasks.ensure import ensure_engine, ensure_learner, require_digest, status_of
from tasks.inputs import functions_inputs, in_bf16, prompts_digest, weights_inputs
from tasks.ray_runtime import BF16_ENGINE, wait
from tasks.reward import reward_metrics, score
from tasks.step import step


def _inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    prompts = prompts_digest(context, "val")
    return {**weights_inputs(context, iteration), "prompts": prompts, **functions_inputs(context)}


async def evaluation(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Writes evaluation.parquet and, with evaluate.bf16, evaluation_bf16.parquet; metrics val/... and
    val_bf16/... (see `evaluation_metrics`). An answer is right where the first verifier of task.rewards
    says so (status ok)."""
    table = await _answers(context, await ensure_engine(context, iteration), iteration)
    files, metrics = {FILE: to_parquet(table)}, _metrics(context, "val", table)
    if context.recipe.evaluate.bf16:
        if not _is_bf16(context, iteration):
            table = await _answers(context, await _bf16_engine(context, iteration), iteration)
        files[BF16_FILE] = to_parquet(table)
        metrics |= _metrics(context, "val_bf16", table)
    return files, {"metrics": metrics}


evaluate = step("evaluate", _inputs)(evaluation)


async def _answers(context: RunContext, engine: Any, version: int) -> dict[str, list[Any]]:
    columns = await wait(engine.evaluate.remote(version))
    scores = await score(context.recipe.task, columns["text"], columns["entry"])
    table: dict[str, list[Any]] = columns | scores
    return table


def _metrics(context: RunContext, group: str, table: dict[str, list[Any]]) -> dict[str, float]:
    found = evaluation_metrics(table) | reward_metrics(context.recipe.task, table)
    return {f"{group}/{name}": value for name, value in found.items()}


def _is_bf16(context: RunContext, version: int) -> bool:
    """Whether the rollout under weight `version` is in BF16, linears and KV cache."""
    precision = context.recipe.precision
    fp8 = Linear.FP8 in (precision.rollout, precision.kv_cache)
    return not fp8 or in_bf16(context, version)


async def _bf16_engine(context: RunContext, version: int) -> Any:
    """An engine in BF16, holding weight `version`: the run's second, made at the first evaluation."""
    bf16 = {key: Linear.BF16 for key in ("rollout", "learner", "kv_cache")}
    recipe = context.recipe
    recipe = recipe.model_copy(update={"precision": recipe.precision.model_copy(update=bf16)})
    other = context.model_copy(update={"recipe": recipe})
    learner = await ensure_learner(context, version)
    progress.emit(progress.Event("phase", "evaluation in BF16"))
    actor, status = await status_of(other, BF16_ENGINE)
    if status["version"] != version:
        # Beside the published weights, not among them: nobody asks for these again.
        folder = context.folder / ".bf16"
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed here
        published = await wait(learner.publish.remote(folder, version, True))
        loaded = await wait(actor.load_weights.remote(folder, version, False))
        shutil.rmtree(folder)
        require_digest(version, loaded.get("digest", loaded.get("fault")), published["digest"])
    return actor
