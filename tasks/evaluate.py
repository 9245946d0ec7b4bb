"""evaluate: accuracy on the validation prompts, greedy and sampled at temperature 1."""

import statistics
from typing import Any

from fp8rl.context import RunContext
from fp8rl.tables import to_parquet
from fp8rl.validation import accuracy_metrics
from tasks.ensure import ensure_engine
from tasks.inputs import functions_inputs, prompts_digest, weights_inputs
from tasks.ray_runtime import wait
from tasks.reward import score, status_shares
from tasks.step import step


def _inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    prompts = prompts_digest(context, "val")
    return {**weights_inputs(context, iteration), "prompts": prompts, **functions_inputs(context)}


@step("evaluate", _inputs)
async def evaluate(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Writes evaluation.parquet. Accuracy is the share of answers that the first verifier of
    task.rewards finds right (status ok), with a 95% interval over prompts, and pass@k beside it."""
    engine = await ensure_engine(context, iteration)
    columns = await wait(engine.evaluate.remote(iteration))
    scores = await score(context.recipe.task, columns["text"], columns["entry"])
    rows = list(zip(columns["kind"], columns["prompt_id"], scores["status"], strict=True))
    sampled = [(prompt, status == "ok") for kind, prompt, status in rows if kind == "sampled"]
    found = accuracy_metrics([prompt for prompt, _ in sampled], [right for _, right in sampled])
    metrics = {f"val/{name}": value for name, value in found.items()}
    metrics["val/greedy_accuracy"] = statistics.fmean(
        status == "ok" for kind, _, status in rows if kind == "greedy"
    )
    shares = status_shares(scores["status"], context.recipe.task.rewards[0])
    metrics |= {f"val/{name}": share for name, share in shares.items()}
    return {"evaluation.parquet": to_parquet(columns | scores)}, {
        "metrics": metrics,
    }
