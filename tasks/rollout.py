"""rollout: the engine samples the iteration's prompts under the current weights, chunk by chunk.

Each chunk is committed as it comes, so that an engine that dies costs one chunk: what is generated
again is only what is missing, and comes out the same. With rollout.max_draws above 1 it draws more
prompts until enough groups have rewards that differ (fp8rl/rollout/dynamic_sampling.py).
"""

from dataclasses import dataclass, field
from typing import Any

from fp8rl import faults, progress
from fp8rl.context import RunContext
from fp8rl.data.cursor import cursor_inputs, draws_allowed, first_batch, train_prompts
from fp8rl.journal import JournalError, StepRecord
from fp8rl.recipe.guard import Action
from fp8rl.recipe.precision import Linear
from fp8rl.reward.verdict import Status
from fp8rl.rollout.dynamic_sampling import Draw, Selection, informative_groups, next_draw, select
from fp8rl.rollout.kv_shares import kv_metrics, total
from fp8rl.rollout.pressure import Pressure
from fp8rl.rollout.samples import Columns, join, rollout_metrics
from fp8rl.tables import from_parquet, to_parquet
from tasks.ensure import ensure_engine
from tasks.inputs import functions_inputs, has_fp8_kv, in_bf16, prompts_digest, weights_inputs
from tasks.ray_runtime import wait
from tasks.reward import score, settled_rewards, status_shares
from tasks.step import step


def _chunk_inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    prompts = prompts_digest(context, "train")
    cursor = cursor_inputs(context, iteration)
    return {**weights_inputs(context, iteration - 1), "prompts": prompts, **cursor}


def _inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    """Reward functions decide what is kept of the chunks, where it is not all of them."""
    selects = context.recipe.rollout.max_draws > 1
    functions = functions_inputs(context) if selects else {}
    return {**_chunk_inputs(context, iteration), **functions}


@dataclass
class _Drawn:
    """What an iteration drew. columns: of each draw. records: of all chunks. scores: of each draw,
    where the recipe asks for dynamic sampling."""

    columns: list[Columns] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    scores: list[Columns] = field(default_factory=list)

    def informative(self) -> int:
        """How many groups so far have rewards that differ."""
        rewards = [reward for scores in self.scores for reward in scores["reward"]]
        return len(informative_groups(rewards, [i for c in self.columns for i in c["prompt_id"]]))

    def select(self, wanted: int) -> Selection:
        return select(
            [columns["prompt_id"] for columns in self.columns],
            [scores["reward"] for scores in self.scores],
            wanted,
        )


@step("rollout", _inputs)
async def rollout(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Writes rollouts.parquet, what is trained on; with dynamic sampling also drawn.parquet, a row for
    each prompt that was drawn."""
    return await sample(context, iteration)


async def sample(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The work of the rollout step: its files, and the fields of its record."""
    drawn = await _draw_until_enough(context, iteration)
    columns, records = join(drawn.columns), drawn.records
    seconds = sum(record.seconds for record in records)
    pressures = [Pressure.from_dict(record.output["pressure"]) for record in records]
    metrics = rollout_metrics(columns, seconds, pressures)
    _say_where_the_cache_ran_full(context, iteration, metrics)
    output: dict[str, Any] = {
        "generated_tokens": sum(map(len, columns["tokens"])),
        "chunks": len(records),
    }
    if has_fp8_kv(context, iteration - 1):
        output["kv"] = total([record.output["kv"] for record in records])
        metrics |= kv_metrics(output["kv"])
    if context.recipe.guard.has(Action.ROLLOUT_BF16):
        metrics["guard/rollout_bf16"] = float(in_bf16(context, iteration - 1))
    files = {}
    if context.recipe.rollout.max_draws > 1:
        # All above is of what was generated; from here on it is what is trained on.
        selection = drawn.select(context.recipe.rollout.prompts)
        columns = {
            name: [value for value, kept in zip(values, selection.kept, strict=True) if kept]
            for name, values in columns.items()
        }
        output["next_batch"] = first_batch(context, iteration) + len(drawn.columns)
        statuses = [status for scores in drawn.scores for status in scores["status"]]
        shares = status_shares(statuses, settled_rewards(context.recipe.task)[0])
        failed = {name: share for name, share in shares.items() if Status(name).is_failure}
        metrics |= selection.metrics
        metrics |= {f"rollout/{name}_drawn": share for name, share in failed.items()}
        files["drawn.parquet"] = to_parquet(selection.table)
        _say_where_groups_are_missing(context, iteration, metrics)
    content = to_parquet(columns)
    faults.point(f"rollout:{iteration}:joined")
    return {"rollouts.parquet": content, **files}, {"metrics": metrics, "output": output}


async def _draw_until_enough(context: RunContext, iteration: int) -> _Drawn:
    """One draw, or with dynamic sampling as many as it needs and may have.

    Whether there is another follows from the committed chunks alone, since verifiers score the same
    completion alike: a rollout that is gone on with comes to the same draws. Only a verifier at its
    time limit may not, on a machine that is busier than it was; what is committed then stands.
    """
    recipe, first, drawn = context.recipe, first_batch(context, iteration), _Drawn()
    inputs = {"recipe": recipe.step_digest(), **_chunk_inputs(context, iteration)}
    budget = draws_allowed(recipe, first, train_prompts(context))
    while True:
        columns, records = await _draw(context, iteration, first, len(drawn.columns), inputs)
        drawn.columns.append(columns)
        drawn.records += records
        if recipe.rollout.max_draws == 1:
            return drawn
        drawn.scores.append(await score(recipe.task, columns["text"], columns["entry"]))
        then = next_draw(
            drawn.informative(),
            wanted=recipe.rollout.prompts,
            drawn=len(drawn.columns),
            budget=budget,
        )
        if then is not Draw.AGAIN:
            return drawn


async def _draw(
    context: RunContext, iteration: int, first: int, draw: int, inputs: dict[str, Any]
) -> tuple[Columns, list[StepRecord]]:
    """The completions of draw `draw` (from 0), and the records of its chunks.

    first: the iteration's first batch of prompts. Chunks are numbered over all draws of the iteration.
    """
    journal, version = context.journal, iteration - 1
    count = context.recipe.rollout.chunks
    numbers = range(draw * count, (draw + 1) * count)
    records, tables = [], []
    for number in numbers:
        chunk = f"rollout.{number:04d}"
        progress.emit(progress.Event("chunk", iteration=iteration, done=number, total=numbers.stop))
        record = _committed(context, iteration, chunk, inputs)
        if record is None:
            engine = await ensure_engine(context, version)
            made = engine.rollout.remote(iteration, version, first + draw, number)
            table, seconds, counted = await wait(made)
            record = StepRecord(chunk, iteration, seconds, inputs=inputs, output=counted)
            record = journal.commit(record, {f"{chunk}.parquet": table})
        records.append(record)
        tables.append(from_parquet(journal.read_file(iteration, chunk, f"{chunk}.parquet")))
    return join(tables), records


def _say_where_the_cache_ran_full(
    context: RunContext, iteration: int, metrics: dict[str, float]
) -> None:
    """A progress note, where sequences were preempted: that is when an FP8 cache pays."""
    preemptions = int(metrics["kv/preemptions"])
    if not preemptions:
        return
    more = "more rollout.kv_cache_mib, or fewer sequences at a time (rollout.chunk_size)"
    if context.recipe.precision.kv_cache is Linear.BF16:
        more += "; precision.kv_cache=fp8 holds twice as many tokens"
    text = (
        f"iteration {iteration}: the KV cache of {metrics['kv/capacity_tokens']:,.0f} tokens ran full: "
        f"{preemptions} times a sequence was thrown out, to be computed again. What helps: {more}"
    )
    progress.emit(progress.Event("note", text))


def _say_where_groups_are_missing(
    context: RunContext, iteration: int, metrics: dict[str, float]
) -> None:
    """A progress note, where the draws ended with fewer groups to learn from than wanted."""
    rollout = context.recipe.rollout
    kept, draws = int(metrics["rollout/groups_kept"]), int(metrics["rollout/draws"])
    if kept >= rollout.prompts:
        return
    ended, more = "", "more draws (rollout.max_draws), "
    if draws < rollout.max_draws:
        ended, more = ", with which the epoch ended", ""
    text = (
        f"iteration {iteration}: {kept} of {rollout.prompts} groups after {draws} draws{ended}; of "
        f"each other prompt all samples have the same reward. What helps: {more}more samples of a "
        "prompt (rollout.samples), or prompts neither too easy nor too hard for the model (task)"
    )
    if not kept:
        text += ". The first draw is kept whole: its rewards teach nothing"
    progress.emit(progress.Event("note", text))


def _committed(
    context: RunContext, iteration: int, chunk: str, inputs: dict[str, Any]
) -> StepRecord | None:
    """The record of a chunk that is committed, whole and of these inputs; None for any other."""
    journal = context.journal
    if not journal.is_committed(iteration, chunk):
        return None
    try:
        record = journal.whole(iteration, chunk)
        if record.inputs == inputs and "pressure" in record.output:
            return record
        what = "by an older version" if record.inputs == inputs else "from other inputs"
        fault = f"chunk {chunk} of iteration {iteration} was made {what}"
    except JournalError as error:
        fault = str(error)
    progress.emit(progress.Event("note", f"{fault}; it is generated again"))
    return None


def forget_chunks(context: RunContext, iteration: int) -> None:
    """Deletes the chunks of a committed rollout, which holds all of them that is kept."""
    for number, name in list(context.journal.steps()):
        if number == iteration and name.startswith("rollout."):
            context.journal.forget(number, name)
