"""The parts of the `fp8rl` command that are about runs which are there: resume, runs, verify, compare,
clean, reap.
"""

import asyncio
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.environment import set_environment
from flows.opening import identity
from fp8rl import progress
from fp8rl.comparison.compare import Request, require_comparable
from fp8rl.data.fingerprint import source_digests
from fp8rl.device import settled
from fp8rl.disk import Removable, removable, remove, size_of
from fp8rl.fork import fork, number_changes, require_resumable
from fp8rl.identity import IdentityError
from fp8rl.journal import JournalError
from fp8rl.lock import LockedError, RunLock
from fp8rl.position import first_open_iteration
from fp8rl.preflight import require_runnable
from fp8rl.recipe.load import check_name, with_overrides
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe
from fp8rl.rewind import parse_step, rewind
from fp8rl.runs import Run, all_runs
from fp8rl.samples import best_and_worst, evaluated, evaluation_table
from fp8rl.verification import verify_run


def prepare_resume(
    runs: Path,
    name: str,
    overrides: list[str],
    *,
    from_step: str | None,
    fork_as: str | None,
    at: int | None,
    console: Console,
) -> tuple[Recipe, str]:
    """Readies a run to be carried on; returns its recipe and the name of the run to resume.

    Raises RecipeError, RewindError, NoRunError, RunExistsError or LockedError; then nothing was
    changed.
    """
    if fork_as is not None and from_step is not None:
        raise RecipeError("--fork and --from-step: one at a time; a fork starts at a checkpoint (--at)")
    if at is not None and fork_as is None:
        raise RecipeError("--at is for --fork NEW_NAME; to go back within the run use --from-step")
    run = Run.find(runs, name)
    recipe = with_overrides(run.recipe, overrides)
    for key in ("name", "runs_dir"):
        if getattr(recipe, key) != getattr(run.recipe, key):
            raise RecipeError(f"{key}: a run stays what and where it is; --fork NEW_NAME makes another")
    if fork_as is not None:
        return _fork(run, recipe, fork_as, at, console)
    done = first_open_iteration(run.journal, run.origin) - 1
    step = None if from_step is None else parse_step(from_step, done + 1)
    require_resumable(run, recipe, done if step is None else min(done, step[0] - 1))
    if step is None and done >= recipe.iterations and run.state().state == "finished":
        raise RecipeError(
            f"run {name!r} is finished ({done} iterations). For more of them: "
            f"`fp8rl resume {name} iterations={2 * done}`"
        )
    lock = RunLock(run.folder)
    try:
        if step is not None:
            count = rewind(run, *step)
            console.print(
                f"{count} step records from {step[1]} of iteration {step[0]} on are set aside in "
                f"{run.folder / 'set_aside'}",
                soft_wrap=True,
                highlight=False,
            )
        if recipe != run.recipe:
            run.change_recipe(recipe)
    finally:
        lock.release()
    return recipe, run.name


def _fork(
    parent: Run, recipe: Recipe, name: str, at: int | None, console: Console
) -> tuple[Recipe, str]:
    check_name(name)
    # What was settled for the parent's machine stays; the rest is settled for this one.
    recipe = settled(recipe.model_copy(update={"name": name}))
    require_runnable(recipe)
    run, lock = fork(parent, name, recipe, identity(recipe), at)
    lock.release()
    if other := _other_files(parent, recipe):
        text = f"{', '.join(other)}: not what run {parent.name} had; the prompts are others"
        console.print(f"warning: {text}", style="yellow", highlight=False, soft_wrap=True)
    order = {"seed", "rollout.prompts", "task.train_prompts", "task.sources"}
    if order & number_changes(parent.recipe, recipe).keys():
        text = "the order of prompts is another: some are seen again in this epoch, others not"
        console.print(f"warning: {text}", style="yellow", highlight=False)
    console.print(
        f"run {name} starts from the checkpoint of iteration {run.origin} of run {parent.name}",
        highlight=False,
    )
    return recipe, name


def _other_files(parent: Run, recipe: Recipe) -> list[str]:
    """Local files of `recipe` that have another content than when the parent's prompts were made."""
    try:
        before = parent.journal.record(parent.origin, "prepare_data").inputs.get("files", {})
    except JournalError:  # it was not needed for a fork so far, and is not now
        return []
    now = source_digests(recipe.task)
    return [path for path, digest in now.items() if before.get(path, digest) != digest]


def list_runs(runs: Path, console: Console) -> None:
    """A table of all runs: state, how far they got, why they stopped, and what resumes them."""
    table = Table(title=f"Runs in {runs}", title_justify="left")
    for heading in ("run", "started", "state", "last committed step", "of", "why", "to carry on"):
        table.add_column(heading, overflow="fold")
    for run in all_runs(runs):
        try:
            started = datetime.fromisoformat(run.about["started"]).strftime("%m-%d %H:%M")
            state = run.state()
            of = str(run.recipe.iterations)
            cells = (run.name, started, state.state, run.last_step(), of, state.reason)
            table.add_row(*cells, run.resume_command())
        except IdentityError as error:
            table.add_row(run.name, "", "damaged", "", "", str(error), "")
    console.print(table)


def verify(run: Run, console: Console) -> bool:
    """Prints what is damaged or missing in `run`; True where nothing is."""
    started = time.perf_counter()
    verdict = verify_run(run)
    checked = ", ".join(f"{count} {what}" for what, count in verdict.checked.items())
    seconds = time.perf_counter() - started
    for fault in verdict.faults:
        console.print(f"damaged: {fault}", style="red", soft_wrap=True, highlight=False)
    for path in verdict.unfinished:
        console.print(f"unfinished (no fault): {path} is of a step that never ended", soft_wrap=True)
    what = f"{len(verdict.faults)} faults" if verdict.faults else "whole"
    console.print(f"run {run.name}: {what} (checked {checked}, {seconds:.1f} s)", highlight=False)
    return not verdict.faults


def show_samples(run: Run, step: int | None, count: int, console: Console) -> None:
    """Prints the best and the worst answers of an evaluation; step: of which, None: the last one.

    Raises JournalError where there is none.
    """
    numbers = evaluated(run.journal)
    if step is None and not numbers:
        raise JournalError(f"run {run.name} was not evaluated yet")
    number = numbers[-1] if step is None else step
    table = evaluation_table(run.journal, number)
    best, worst = best_and_worst(table, count)
    for title, rows in (("best", best), ("worst", worst)):
        shown = Table(title=f"run {run.name}, iteration {number}: the {title}", title_justify="left")
        headings = ("reward", "status", "kind", "prompt", "completion", "answer")
        for heading in headings:
            shown.add_column(heading, overflow="fold")
        for row in rows:
            cells = (table[heading][row] for heading in headings)
            shown.add_row(*(f"{c:g}" if isinstance(c, float) else escape(str(c)) for c in cells))
        console.print(shown)
    counts = Counter(table["status"])
    text = ", ".join(f"{status} {counts[status]}" for status in sorted(counts))
    console.print(f"{len(table['status'])} answers: {text}", highlight=False)


def compare_arms(request: Request, out: Path | None, console: Console) -> None:
    """Makes the comparison by its flow, and prints its first tables and where the page is.

    Raises ComparisonError, NoRunError, IdentityError or JournalError where it cannot be done.
    """
    require_comparable(request)  # before Prefect starts
    set_environment(str(request.runs_dir))
    from flows.compare import compare

    with progress.listening(lambda event: _say(event.text, console)):
        made = asyncio.run(
            compare(
                experiment=request.experiment,
                runs=request.runs,
                runs_dir=str(request.runs_dir),
                reference=request.reference,
                margin=request.margin,
                allow_different=request.allowed,
                out=None if out is None else str(out),
            )
        )
    for title, table in made["tables"].items():
        shown = Table(title=title, title_justify="left")
        for heading in table["headings"]:
            shown.add_column(heading, overflow="fold")
        for row in table["rows"]:
            shown.add_row(*map(escape, row))
        console.print(shown)
    _say(f"The page: {made['files'][0]}; as Markdown and CSV: {', '.join(made['files'][1:])}", console)


def _say(text: str, console: Console) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def clean(runs: Path, names: list[str], *, yes: bool, console: Console) -> None:
    """Shows what can go, and with `yes` deletes it. Of a damaged run nothing goes."""
    chosen = [Run.find(runs, name) for name in names] if names else all_runs(runs)
    items: dict[Run, list[Removable]] = {}
    for run in chosen:
        try:
            items[run] = removable(run)
        except (IdentityError, JournalError) as error:
            console.print(
                f"run {run.name} is damaged, and left as it is: {error}",
                soft_wrap=True,
                highlight=False,
            )
    total = sum(item.size for found in items.values() for item in found) / 1e6
    kept = sum(size_of(run.folder) for run in chosen) / 1e6 - total
    if not any(items.values()):
        console.print(f"nothing to free; {len(chosen)} runs hold {kept:.0f} MB", highlight=False)
        return
    table = Table(title="What can go", title_justify="left")
    for heading in ("path", "MB", "why"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "MB" else "left")
    for item in (item for found in items.values() for item in found):
        table.add_row(str(item.path.relative_to(runs)), f"{item.size / 1e6:.2f}", item.why)
    console.print(table)
    if not yes:
        console.print(
            f"{total:.1f} MB can be freed, {kept:.0f} MB stay. Nothing was deleted: add --yes",
            highlight=False,
        )
        return
    freed = 0
    for run, found in items.items():
        try:
            freed += remove(run, found)
        except LockedError as error:  # it was resumed just now
            console.print(str(error), soft_wrap=True, highlight=False)
    stay = total + kept - freed / 1e6
    console.print(f"{freed / 1e6:.1f} MB freed, {stay:.0f} MB stay", highlight=False)


def reap(runs: Path, console: Console) -> None:
    """Puts right what killed processes left, and says what that was."""
    from flows.environment import stop_leftover_servers
    from flows.reap import put_right

    stopped = stop_leftover_servers(str(runs))
    done = asyncio.run(put_right(runs))
    lines = [f"stopped a Prefect server left by a killed run (process {pid})" for pid in stopped]
    for line in (lines + done) or ["nothing to put right"]:
        console.print(line, soft_wrap=True, highlight=False)
