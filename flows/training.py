"""A training run: prepare, then iterations, with one MLflow run from beginning to end.

The same flow begins a run, carries one on, and is what a retry in the Prefect UI runs again: what is
committed is taken from the journal, and the rest is done.
"""

import asyncio
import time
from contextlib import ExitStack
from typing import Any

from prefect import flow
from prefect.artifacts import (
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled

from flows.asked import OptionalText, Overrides, RecipeFile, asked_name, asked_recipe, asked_runs
from flows.automations import mark_crashed
from flows.environment import set_quiet
from flows.hooks import put_right_after
from flows.iteration import first_weights, iteration
from flows.live_artifact import LiveArtifact
from flows.opening import Opened, open_run
from flows.reap import put_right
from flows.restart import StartTimes
from flows.showing import artifact_key, short, show_evaluation, show_guard, show_kv, show_worst
from flows.stopping import (
    StopInOrder,
    heed_guard,
    last_checkpoint,
    slowest_iteration,
    stop_if_asked,
)
from fp8rl import progress
from fp8rl.context import RunContext
from fp8rl.device import resolve
from fp8rl.journal import ITERATION
from fp8rl.lock import require_held
from fp8rl.model.precision import both_sides, count_formats
from fp8rl.recipe.rules import warnings
from fp8rl.recipe.schema import Recipe
from fp8rl.report import summarise
from fp8rl.runs import State
from fp8rl.tracking import MLFLOW_STATUS, Tracker
from fp8rl.turns import Turn
from tasks.causes import first_line
from tasks.checkpoint import finish_checkpoint, save_before_leaving
from tasks.log_model import log_final_model
from tasks.prepare import open_engines, precision_report, prepare_data, warm_start
from tasks.ray_runtime import release, start_ray
from tasks.step import with_retries


def _flow_run_name() -> str:
    return asked_name(flow_run.get_parameters())


@flow(
    name="train",
    flow_run_name=_flow_run_name,
    on_crashed=[put_right_after],
    on_cancellation=[put_right_after],
)
async def train(
    recipe_file: RecipeFile = "",
    overrides: Overrides = [],  # noqa: B006  never changed
    runs_dir: OptionalText = "",
    resume: OptionalText = "",
    recipe: Recipe = Recipe(),  # noqa: B008  a frozen model
) -> Any:
    """Trains a recipe from its first iteration to its last; returns the run's summary.

    A run that stops in good order (recipe.stop) ends as Cancelled, and can be retried or resumed.
    Raises RecipeError, RunExistsError, NoRunError, LockedError or JournalError before any engine
    starts.

    Args:
        recipe_file: The recipe to train. One of yours, put under configs/, is among these after the
            next `fp8rl up`.
        overrides: Values to change, one in each item, as key=value: iterations=10, name=my-run,
            learner.lr=2e-4. The keys are those of the whole recipe below.
        runs_dir: Where runs are kept. Empty: where the recipe says.
        resume: Name of a run to carry on with, by its own recipe, instead of a new one. The deployment
            `resume` asks for less.
        recipe: The whole recipe, instead of a file. With a recipe file, leave it as it is; Submit is at
            the end of the page.
    """
    if resume:
        place = asked_runs({"runs_dir": runs_dir, "resume": resume, "recipe": recipe})
        return await train_run(Recipe(runs_dir=str(place)), resume)
    return await train_run(asked_recipe(recipe_file, overrides, runs_dir, recipe), None)


async def train_run(recipe: Recipe, resume: str | None) -> Any:
    """In a flow: trains a new run of `recipe`, or carries on with `resume` in recipe.runs_dir."""
    set_quiet()  # a worker starts this flow without the command
    times = StartTimes()
    opened = open_run(recipe, resume, str(flow_run.get_id()))
    times.mark("journal and checkpoints checked")
    run, context = opened.run, opened.context()
    ends = State("failed", "the process ended before it could say why")
    tracker = Tracker(
        opened.recipe,
        run=run.name,
        run_id=run.id,
        folder=run.folder,
        records=run.journal.iterations,
        tags=_tags(opened),
    )
    with ExitStack() as at_the_end:
        # Whatever happens, and whichever of these fails: no engine is left running, all records say
        # how the run ended, and the lock is given up last.
        at_the_end.callback(opened.lock.release)
        at_the_end.callback(lambda: _end_records(opened, tracker, ends))
        at_the_end.callback(release, context)
        at_the_end.enter_context(times.listening())
        try:
            await put_right(run.folder.parent, but=run.name)
            for killed in opened.killed:
                await mark_crashed(killed, "fp8rl: its process was killed; another one carries on")
            _say_notes(opened)
            turn = Turn(run.name)
            at_the_end.callback(turn.give_up)
            await _wait_for(turn)
            times.mark("turn at the devices")
            progress.emit(progress.Event("phase", "MLflow and Ray start"))
            tracker.start(may_be_away=opened.resumed)
            at_the_end.enter_context(tracker.system_metrics())
            context = context.model_copy(update={"mlflow_run": tracker.run_id})
            times.mark("MLflow")
            start_ray()
            times.mark("Ray")
            tracker.put_json(
                "backends.json", {key: str(v) for key, v in vars(resolve(opened.recipe)).items()}
            )
            summary = await _train(context, opened, tracker, times)
            ends = State("finished")
            return summary
        except StopInOrder as stop:
            ends = State("stopped", str(stop))
            # Not by a retry: the recipe would stop it again at once.
            message = f"{stop}. To go on: fp8rl resume {run.name} {stop.without}".rstrip()
            return Cancelled(name="Stopped", message=message)
        except BaseException as error:
            # Cancelled, interrupted or told to terminate: not an error of the run's own.
            own = isinstance(error, Exception)
            ends = State("failed" if own else "cancelled", _reason(error))
            # First: whoever told this process to end may not wait for the checkpoint.
            run.end_attempt(opened.attempt, ends)
            log = get_run_logger()
            log.error(
                "run %s %s after %s: %s. Retry, or %s, goes on with the next step",
                *(run.name, ends.state, run.last_step(), ends.reason, f"fp8rl resume {run.name}"),
            )
            said = save_before_leaving(context)
            log.warning(said)
            progress.emit(progress.Event("note", said))
            raise


async def _train(
    context: RunContext, opened: Opened, tracker: Tracker, times: StartTimes
) -> dict[str, Any]:
    recipe, origin = context.recipe, context.origin
    data = await prepare_data(context, origin)
    tracker.put_inputs(data["output"])
    await warm_start(context, origin)
    times.mark("prompts and first weights")
    learner: list[dict[str, str]] = []
    if opened.position.iteration <= recipe.iterations:
        learner = await with_retries(open_engines, context)(context, opened.position.version)
        times.mark("engines")
    bar = await acreate_progress_artifact(
        progress=0.0,
        key=artifact_key(context.run, "progress"),
        description=f"Run {context.run}: share of its {recipe.iterations} iterations that is done",
    )
    live = LiveArtifact(context, tracker, artifact_key(context.run, "live"))
    said, slowest = False, slowest_iteration(context)
    for number in range(opened.first_iteration(), recipe.iterations + 1):
        started = time.time()
        if number > origin:
            await stop_if_asked(context, number, times.began, slowest)
            await heed_guard(context, opened, number)
        await _iterate(context, number, is_retry=opened.is_retry)
        said = said or await _say_precision(context, learner, tracker)
        tracker.flush()
        show_kv(context, tracker, number)
        await show_guard(context, tracker, number, artifact_key(context.run, "guard"))
        show_worst(context, tracker, number)
        show_evaluation(context, tracker, number)
        _emit(context, number)
        await live.update()
        await finish_checkpoint(context, block=False)
        await aupdate_progress_artifact(bar, progress=100.0 * number / recipe.iterations)
        slowest = max(slowest, time.time() - started)
        await _say_times(context, opened, times)
    await last_checkpoint(context, recipe.iterations)
    summary = summarise(context.journal.iterations())
    summary |= {"run": context.run, "arm": recipe.arm, "mlflow_run": tracker.run_id}
    if recipe.tracking.log_model:
        summary["model_uri"] = await log_final_model(context)
    tracker.put_json("summary.json", summary)
    rows = [{"what": key, "value": short(value)} for key, value in summary.items()]
    text = f"Run {context.run}: what it came to"
    await acreate_table_artifact(rows, key=artifact_key(context.run, "summary"), description=text)
    return summary


async def _wait_for(turn: Turn) -> None:
    """Waits while another run of this machine has the devices; can be cancelled."""
    told = ""
    while not turn.is_mine():
        if (holder := turn.holder()) != told:
            told = holder
            text = f"waits for the devices: {holder} has them"
            get_run_logger().warning(text)
            progress.emit(progress.Event("note", text))
        await asyncio.sleep(1.0)


async def _iterate(context: RunContext, number: int, *, is_retry: bool) -> None:
    """Has iteration `number` committed, by a subflow.

    A retried flow run calls its finished subflows again, since Prefect tells the subflow runs of one
    flow run apart by the order of their calls; they look into the journal and are shown as Cached.
    """
    part = first_weights if number == context.origin else iteration
    if is_retry or not context.journal.is_committed(number, ITERATION):
        state = await part(context, number, return_state=True)
        if not state.is_completed():
            await state.aresult()  # raises what the step raised


async def _say_precision(context: RunContext, learner: list[dict[str, str]], tracker: Tracker) -> bool:
    """Compares what both sides really run and tells it; False before the engine's first forward."""
    engine = await precision_report(context)
    if not engine:
        return False
    columns = both_sides(learner, engine["parameters"])
    kv_cache = engine["kv_cache"]
    tracker.put_table("precision.json", columns)
    tracker.put_json("kv_cache.json", {"requested": context.recipe.precision.kv_cache, **kv_cache})
    text = (
        f"effective precision: rollout {count_formats(columns['rollout_effective'])}; "
        f"KV cache {kv_cache['dtype']} ({kv_cache['storage']}); "
        f"learner {count_formats(columns['learner_effective'])}"
    )
    get_run_logger().info(text)
    progress.emit(progress.Event("note", text))
    return True


async def _say_times(context: RunContext, opened: Opened, times: StartTimes) -> None:
    """Tells once what the start cost, by part."""
    parts = times.take()
    if not parts:
        return
    opened.run.update_attempt(opened.attempt, start_s=parts, first_new_step=times.first_step)
    rows = [{"part": part, "seconds": seconds} for part, seconds in parts.items()]
    text = f"from the command to {times.first_step}, the first new step"
    await acreate_table_artifact(rows, key=artifact_key(context.run, "start"), description=text)
    if opened.resumed:
        parts_said = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items())
        progress.emit(progress.Event("note", f"{text} (s): {parts_said}"))


def _say_notes(opened: Opened) -> None:
    """What a reader of the log should know before the first step."""
    position = opened.position
    notes = [f"warning: {warning}" for warning in warnings(opened.recipe)] + opened.notes
    if opened.resumed:
        since = "the initial weights" if position.checkpoint is None else "its checkpoint"
        notes.append(
            f"run {opened.run.name} goes on at iteration {position.iteration}; the learner at weight "
            f"version {position.version}, from {since} and {position.replay} replayed training steps"
        )
    for note in notes:
        get_run_logger().warning(note)
        progress.emit(progress.Event("note", note))


def _emit(context: RunContext, number: int) -> None:
    progress.emit(
        progress.Event(
            "iteration",
            iteration=number,
            total=context.recipe.iterations,
            metrics=context.journal.record(number, ITERATION).metrics,
        )
    )


def _reason(error: BaseException) -> str:
    if not isinstance(error, Exception):
        return f"told to end ({type(error).__name__})"
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name


def _end_records(opened: Opened, tracker: Tracker, ends: State) -> None:
    """Says in both records how the run ended, unless another process has taken it over.

    Never raises: what ended the run is what the user is to see.
    """
    try:
        require_held(opened.run.folder)
        opened.run.end_attempt(opened.attempt, ends)
        tracker.set_status(MLFLOW_STATUS[ends.state], ends.reason or None)
        tracker.flush()
        pending = tracker.pending()
        if pending:
            text = f"MLflow has not got {pending} yet; `fp8rl reap` sends it once the server is back"
            progress.emit(progress.Event("note", text))
    except Exception as error:
        text = f"the end of the run ({ends.state}) is not recorded everywhere: {error}"
        progress.emit(progress.Event("note", f"{text}. `fp8rl reap` puts that right"))


def _tags(opened: Opened) -> dict[str, str]:
    recipe = opened.recipe
    tags = {
        **recipe.tracking.tags,
        "fp8rl.arm": recipe.arm or "",
        "fp8rl.recipe_digest": recipe.digest(),
        "fp8rl.seed": str(recipe.seed),
        "fp8rl.model": recipe.model.title,
        "fp8rl.commit": opened.run.attempts()[-1]["machine"]["commit"],
        "prefect.flow_run_id": str(flow_run.get_id()),
        "prefect.flow_run_name": str(flow_run.get_name()),
    }
    parent = opened.run.about.get("parent")
    if parent is not None:
        tags["fp8rl.parent"] = f"{parent['run']}@{parent['version']}"
        tags["fp8rl.parent_id"] = parent["id"]
    url = str(flow_run.get_flow_run_ui_url())
    if url.startswith("http"):  # the embedded server has no page of its own
        tags["prefect.flow_run_url"] = url
    return tags
