"""rollout: the engine samples the iteration's prompts under the current weights, chunk by chunk.

Each chunk is committed as it comes, so that an engine that dies costs one chunk: what is generated
again is only what is missing, and comes out the same.
"""

from typing import Any

from fp8rl import faults, progress
from fp8rl.context import RunContext
from fp8rl.journal import JournalError, StepRecord
from fp8rl.recipe.guard import Action
from fp8rl.recipe.schema import Linear
from fp8rl.rollout.kv_shares import kv_metrics, total
from fp8rl.rollout.pressure import Pressure
from fp8rl.rollout.samples import join, rollout_metrics
from fp8rl.tables import from_parquet, to_parquet
from tasks.ensure import ensure_engine
from tasks.inputs import has_fp8_kv, in_bf16, prompts_digest, weights_inputs
from tasks.ray_runtime import wait
from tasks.step import step


def _inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    prompts = prompts_digest(context, "train")
    return {**weights_inputs(context, iteration - 1), "prompts": prompts}


@step("rollout", _inputs)
async def rollout(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Writes rollouts.parquet."""
    version = iteration - 1
    journal = context.journal
    sizes = context.recipe.rollout
    chunks = [f"rollout.{i:04d}" for i in range(-(-sizes.prompts * sizes.samples // sizes.chunk_size))]
    inputs = {"recipe": context.recipe.step_digest(), **_inputs(context, iteration)}
    records = []
    for number, chunk in enumerate(chunks):
        progress.emit(progress.Event("chunk", iteration=iteration, done=number, total=len(chunks)))
        record = _committed(context, iteration, chunk, inputs)
        if record is None:
            engine = await ensure_engine(context, version)
            table, seconds, counted = await wait(engine.rollout.remote(iteration, version, number))
            record = StepRecord(chunk, iteration, seconds, inputs=inputs, output=counted)
            record = journal.commit(record, {f"{chunk}.parquet": table})
        records.append(record)
    tables = [from_parquet(journal.read_file(iteration, c, f"{c}.parquet")) for c in chunks]
    columns = join(tables)
    seconds = sum(record.seconds for record in records)
    pressures = [Pressure.from_dict(record.output["pressure"]) for record in records]
    metrics = rollout_metrics(columns, seconds, pressures)
    _say_where_the_cache_ran_full(context, iteration, metrics)
    output: dict[str, Any] = {
        "generated_tokens": sum(map(len, columns["tokens"])),
        "chunks": len(chunks),
    }
    if has_fp8_kv(context, version):
        output["kv"] = total([record.output["kv"] for record in records])
        metrics |= kv_metrics(output["kv"])
    if context.recipe.guard.has(Action.ROLLOUT_BF16):
        metrics["guard/rollout_bf16"] = float(in_bf16(context, version))
    content = to_parquet(columns)
    faults.point(f"rollout:{iteration}:joined")
    return {"rollouts.parquet": content}, {"metrics": metrics, "output": output}


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
    """Deletes the chunks of a committed rollout, which holds them all."""
    for number, name in list(context.journal.steps()):
        if number == iteration and name.startswith("rollout."):
            context.journal.forget(number, name)
