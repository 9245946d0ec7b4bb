"""reward: verifiers score the samples, spread over the CPUs."""

import statistics
from typing import Any

from fp8rl.context import RunContext
from fp8rl.recipe.schema import Task
from fp8rl.tables import from_parquet, to_parquet
from tasks.inputs import file_digest
from tasks.ray_runtime import wait
from tasks.step import step


def _score(task: Task, texts: list[str], entries: list[str]) -> list[tuple[float, str, str]]:
    from fp8rl.reward.score import score_all

    return [(v.reward, v.status.value, v.detail) for v in score_all(task, texts, entries)]


async def score(task: Task, texts: list[str], entries: list[str]) -> dict[str, list[Any]]:
    """Columns reward, status and detail of the completions, by Ray tasks over the CPUs."""
    import ray

    workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
    size = -(-len(texts) // workers)
    remote = ray.remote(_score).options(num_cpus=1, max_retries=0)
    refs = [
        remote.remote(task, texts[i : i + size], entries[i : i + size])
        for i in range(0, len(texts), size)
    ]
    try:
        rows = [row for ref in refs for row in await wait(ref)]
    except BaseException:
        for ref in refs:  # one that hangs would keep its CPU, and the next try would wait for it
            ray.cancel(ref, force=True)
        raise
    if all(row[1] == "error" for row in rows):
        what = task.name or "task.sources"
        raise RuntimeError(f"the verifier of {what} failed on every sample; first: {rows[0][2]}")
    return {
        "reward": [row[0] for row in rows],
        "status": [row[1] for row in rows],
        "detail": [row[2] for row in rows],
    }


def status_shares(statuses: list[str]) -> dict[str, float]:
    """Share of the completions in each status, by its name."""
    from fp8rl.reward.score import count_statuses

    return {name: count / len(statuses) for name, count in count_statuses(statuses).items()}


def _inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    return {"rollouts": file_digest(context, iteration, "rollout", "rollouts.parquet")}


@step("reward", _inputs)
async def reward(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Writes rewards.parquet."""
    content = context.journal.read_file(iteration, "rollout", "rollouts.parquet")
    rollouts = from_parquet(content)
    scores = await score(context.recipe.task, rollouts["text"], rollouts["entry"])
    table = {"prompt_id": rollouts["prompt_id"], "sample": rollouts["sample"], **scores}
    rewards = scores["reward"]
    samples = context.recipe.rollout.samples
    groups = [rewards[i : i + samples] for i in range(0, len(rewards), samples)]
    metrics = {
        "train/reward_mean": statistics.fmean(rewards),
        "reward/groups_without_signal": statistics.fmean(len(set(group)) == 1 for group in groups),
        **{f"reward/{name}": share for name, share in status_shares(scores["status"]).items()},
    }
    return {"rewards.parquet": to_parquet(table)}, {"metrics": metrics}
