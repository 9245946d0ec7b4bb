"""reward: verifiers score the samples, spread over the CPUs."""

import statistics
from typing import Any

from fp8rl.context import RunContext
from fp8rl.recipe.reward import TaskVerifier, Verifier, are_default
from fp8rl.recipe.schema import Task
from fp8rl.reward.functions import FunctionSource, function_sources
from fp8rl.reward.verdict import Status
from fp8rl.tables import from_parquet, to_parquet
from tasks.inputs import file_digest, functions_inputs
from tasks.ray_runtime import wait
from tasks.step import step

# A sample's verdict, and those of each reward: (reward, status, detail).
_Row = tuple[tuple[float, str, str], ...]


def _score(
    task: Task, texts: list[str], entries: list[str], functions: dict[str, FunctionSource]
) -> list[_Row]:
    from fp8rl.reward.score import score_all

    scores = score_all(task, texts, entries, functions)
    return [tuple((v.reward, v.status.value, v.detail) for v in (s, *s.parts)) for s in scores]


async def score(task: Task, texts: list[str], entries: list[str]) -> dict[str, list[Any]]:
    """Columns reward, status and detail of the completions, by Ray tasks over the CPUs; with other
    rewards than the task's own also reward_<name>, status_<name> and detail_<name> of each.

    Raises RuntimeError where the first verifier failed on every sample.
    """
    import ray

    functions = function_sources(task)
    workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
    size = -(-len(texts) // workers)
    remote = ray.remote(_score).options(num_cpus=1, max_retries=0)
    refs = [
        remote.remote(task, texts[i : i + size], entries[i : i + size], functions)
        for i in range(0, len(texts), size)
    ]
    try:
        rows = [row for ref in refs for row in await wait(ref)]
    except BaseException:
        for ref in refs:  # one that hangs would keep its CPU, and the next try would wait for it
            ray.cancel(ref, force=True)
        raise
    return score_columns(task, rows)


def score_columns(task: Task, rows: list[_Row]) -> dict[str, list[Any]]:
    """The columns of `score`, and its error, from what its Ray tasks return."""
    if all(Status(status).is_failure for (_, status, _), *_ in rows):
        main = task.rewards[0]
        what = (task.name or "task.sources") if isinstance(main, TaskVerifier) else main.title
        raise RuntimeError(f"the verifier of {what} failed on every sample; first: {rows[0][0][2]}")
    columns: dict[str, list[Any]] = {}
    suffixes = ["", *(f"_{verifier.title}" for verifier in task.rewards)]
    for place, suffix in enumerate([""] if are_default(task.rewards) else suffixes):
        for part, column in enumerate(("reward", "status", "detail")):
            columns[column + suffix] = [row[place][part] for row in rows]
    return columns


def status_shares(statuses: list[str], verifier: Verifier) -> dict[str, float]:
    """Share of the completions in each status that `verifier` can give, by its name. Of one whose
    `isolate` is left open timeouts are told where there are some: see `settled_rewards`."""
    from fp8rl.reward.score import count_statuses

    timeouts = bool(verifier.isolation) or Status.TIMEOUT in statuses
    counts = count_statuses(statuses, timeouts=timeouts)
    return {name: count / len(statuses) for name, count in counts.items()}


def settled_rewards(task: Task) -> tuple[Verifier, ...]:
    """The rewards of `task`, each of which knows whether it runs in a worker process."""
    from fp8rl.reward.isolation import settled

    return settled(task).rewards


def reward_metrics(task: Task, scores: dict[str, list[Any]]) -> dict[str, float]:
    """Shares of the first verifier's statuses, which are the samples', by status. With other rewards
    than the task's own also <name>_mean (unweighted) and <name>_<status> of each."""
    rewards = settled_rewards(task)
    metrics = status_shares(scores["status"], rewards[0])
    if are_default(task.rewards):
        return metrics
    for verifier in rewards:
        name = verifier.title
        metrics[f"{name}_mean"] = statistics.fmean(scores[f"reward_{name}"])
        shares = status_shares(scores[f"status_{name}"], verifier)
        metrics |= {f"{name}_{status}": share for status, share in shares.items()}
    return metrics


def _inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    rollouts = file_digest(context, iteration, "rollout", "rollouts.parquet")
    return {"rollouts": rollouts, **functions_inputs(context)}


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
    measured = reward_metrics(context.recipe.task, scores)
    metrics = {
        "train/reward_mean": statistics.fmean(rewards),
        "reward/groups_without_signal": statistics.fmean(len(set(group)) == 1 for group in groups),
        **{f"reward/{name}": value for name, value in measured.items()},
    }
    return {"rewards.parquet": to_parquet(table)}, {"metrics": metrics}
