"""`fp8rl sweep`: shows the plan of a sweep, and works through it."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fp8rl.recipe.schema import Recipe
from fp8rl.sweep.check import checked_sweep
from fp8rl.sweep.expand import Child, LoadedSweep
from fp8rl.sweep.look import look
from fp8rl.sweep.plan import Plan
from fp8rl.sweep.study import source_of

# For children of a start that was killed: they were told to end, and save what they have.
_ENDING_S = 120.0


def show_plan(loaded: LoadedSweep, plan: Plan, console: Console) -> None:
    """Prints the sweep's children, what they amount to, and which of them are begun."""
    sweep, study = loaded.sweep, loaded.sweep.optuna
    table = Table(title=f"Sweep {sweep.name}", title_justify="left")
    headings = ("child", "arm", "seed", "values", "iterations", "now")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for child in loaded.children:
        name, values, state = child.name, child.what, look(plan, child).state
        if study is not None:
            name, state = f"{name}-t0000 ...", ""
            values = ", ".join(f"{key} in {s.extremes()}" for key, s in study.space.items())
        cells = (child.arm, str(child.seed), values, str(child.recipe.iterations), state)
        table.add_row(name, *cells)
    console.print(table)
    total = loaded.iterations
    text = f"{loaded.count} children, {total} iterations"
    if study is not None:
        text += f", {study.trials} trials for the best {study.metric} ({study.direction})"
    if sweep.budget.iterations is not None and total > sweep.budget.iterations:
        text += f"; the budget of {sweep.budget.iterations} iterations is too small for all of them"
    console.print(text, soft_wrap=True, highlight=False)


def run_sweep(
    path: Path,
    overrides: list[str],
    *,
    plan_only: bool,
    console: Console,
    start_environment: Callable[[Recipe], None],
) -> int:
    """Shows the plan, and works through it unless `plan_only`; the command's exit code.

    start_environment: of the `fp8rl` command. Raises what `checked_sweep` does.
    """
    loaded, plan = checked_sweep(path, overrides)
    show_plan(loaded, plan, console)
    if plan_only:
        return 0
    if plan.folder.exists():
        _let_end(plan, source_of(plan).known(), console)
    start_environment(loaded.children[0].recipe)
    # The day in its name is that of this moment, also after midnight.
    overrides = [*overrides, f"name={loaded.sweep.name}"]
    return _work(path, overrides, plan, console)


def _work(path: Path, overrides: list[str], plan: Plan, console: Console) -> int:
    # Not before the environment is set: Prefect reads it when it is imported.
    from prefect.exceptions import CancelledRun

    from flows.sweep import SweepFailedError, sweep
    from flows.sweep_view import SweepView

    code = 0
    with SweepView(console, f"Sweep {plan.name}"):
        try:
            asyncio.run(sweep(str(path), overrides))
        except CancelledRun as stopped:
            console.print(str(stopped), style="yellow", soft_wrap=True, highlight=False, markup=False)
        except SweepFailedError as error:
            console.print(str(error), style="red", soft_wrap=True, highlight=False, markup=False)
            code = 1
    console.print(f"What became of it: {plan.folder}/summary.json", soft_wrap=True, highlight=False)
    return code


def _let_end(plan: Plan, children: list[Child], console: Console) -> None:
    """Lets children of an earlier start end, before their Prefect server is stopped. One that somebody
    has resumed by hand goes on, and is waited for later."""
    until = time.monotonic() + _ENDING_S
    said = False
    while time.monotonic() < until:
        running = [c.name for c in children if look(plan, c).state == "running"]
        if not running:
            return
        if not said:
            console.print(f"waiting for {', '.join(running)} to end", soft_wrap=True)
            said = True
        time.sleep(1.0)
