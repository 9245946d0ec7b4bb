"""The `fp8rl` command: starts flows, and asks fp8rl.

Exit codes: 0 done, or stopped in good order where the recipe says so; 1 a run failed; 2 the recipe, its
run name or the command's words are wrong, and nothing was started.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from flows import cli_kept, cli_measure
from flows.cli_up import down, status, up
from flows.environment import embedded_home, set_environment, stop_leftover_servers
from flows.terminal import Overrides, RecipePath, RunName, RunsDir, console, errors
from fp8rl import progress
from fp8rl.checkpoints import CheckpointError
from fp8rl.comparison.selection import ComparisonError
from fp8rl.export import ExportError
from fp8rl.identity import IdentityError
from fp8rl.journal import JournalError
from fp8rl.lock import LockedError
from fp8rl.model.dims import UnsupportedModelError
from fp8rl.recipe.load import LoadedRecipe, load_recipe
from fp8rl.recipe.rules import RecipeError, warnings
from fp8rl.recipe.schema import Recipe
from fp8rl.rewind import RewindError
from fp8rl.runs import NoRunError, Run, RunExistsError
from fp8rl.services.config import UpError
from fp8rl.tracking_server import TrackingError, tracking_uri

app = typer.Typer(
    help="GRPO reinforcement learning of language models in FP8, as a pipeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_FOR_THE_USER = (
    *(RecipeError, RewindError, RunExistsError, NoRunError, UnsupportedModelError),
    *(LockedError, JournalError, IdentityError, TrackingError, ExportError, CheckpointError),
    *(ComparisonError, UpError),
)


@contextmanager
def _user_errors() -> Iterator[None]:
    """What the user can put right is said in words, without a trace."""
    try:
        yield
    except _FOR_THE_USER as error:
        errors.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _checked(path: Path, overrides: list[str] | None) -> LoadedRecipe:
    loaded = load_recipe(path, overrides)
    _require_runnable(loaded.recipe)
    return loaded


def _require_runnable(recipe: Recipe) -> None:
    """Everything that can be known before an engine starts; raises with every reason."""
    from fp8rl.preflight import require_runnable

    with progress.listening(_say):
        require_runnable(recipe)
    if recipe.name is not None:
        run = Run(Path(recipe.runs_dir).resolve() / recipe.name)
        if run.folder.exists():
            raise RunExistsError(run.describe())


def _say(event: progress.Event) -> None:
    console.print(event.text, soft_wrap=True, highlight=False)


@app.command()
def validate(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Check a recipe and every combination in it, without starting anything."""
    from fp8rl.reward.isolation import places  # which imports the generators

    with _user_errors():
        loaded = _checked(recipe, overrides)
    console.print(f"{recipe}: valid (digest {loaded.recipe.digest()[:12]})", highlight=False)
    for name, place in places(loaded.recipe.task).items():
        console.print(f"reward {name}: {place}", soft_wrap=True, highlight=False)
    for warning in warnings(loaded.recipe):
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, highlight=False)


@app.command()
def explain(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Show a recipe's values and where each came from, its backends and its precision plan."""
    from flows.explain import explain as show

    with _user_errors():
        show(_checked(recipe, overrides), console)


@app.command()
def run(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Train a recipe, from its first iteration to its last."""
    with _user_errors():
        loaded = _checked(recipe, overrides)
        _start_environment(loaded.recipe)
        _train_and_tell(loaded.recipe)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="Sweep file, for example configs/sweeps/precision.yaml")],
    overrides: Overrides = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only check it and show its runs")] = False,
) -> None:
    """Train every run of a sweep, or carry the sweep on."""
    from flows.cli_sweep import run_sweep

    with _user_errors():
        given = overrides or []
        done = run_sweep(
            file, given, plan_only=plan, console=console, start_environment=_start_environment
        )
    if done:
        raise typer.Exit(done)


@app.command()
def resume(
    name: RunName,
    overrides: Overrides = None,
    from_step: Annotated[
        str | None, typer.Option(help="Do a step and all after it again: train@4, or train")
    ] = None,
    fork: Annotated[
        str | None, typer.Option(help="Name of a new run that starts from a checkpoint of this one")
    ] = None,
    at: Annotated[int | None, typer.Option(help="The iteration whose checkpoint a fork takes")] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Carry a run on from the step that failed, or that was never reached."""
    from flows.cli_runs import prepare_resume

    runs = runs_dir.resolve()
    with _user_errors():
        recipe, run = prepare_resume(
            runs, name, overrides or [], from_step=from_step, fork_as=fork, at=at, console=console
        )
        _start_environment(recipe)
        _train_and_tell(recipe, run)


for _command in (*cli_measure.COMMANDS, *cli_kept.COMMANDS, up, status, down):
    app.command()(_user_errors()(_command))


@app.command()
def demo(overrides: Overrides = None) -> None:
    """Train FP8 end to end with FP8 KV cache, and BF16, on the tiny task, and compare the two."""
    from flows.demo import demo_recipes, run_demo

    with _user_errors():
        recipes = demo_recipes(overrides or [], f"{datetime.now():%Y%m%d-%H%M%S}")
        for recipe in recipes.values():
            _require_runnable(recipe)
        first = next(iter(recipes.values()))
        _start_environment(first)
        with _stopping_ray():
            arms, folder = run_demo(recipes, _train)
    _print_summary(arms, "The two arms side by side")
    console.print(f"The same as data: {folder / 'summary.json'}; as a picture: {folder / 'arms.png'}")
    _print_where(first, *arms.values())


def _start_environment(recipe: Recipe) -> None:
    """Sets up the embedded services where the user has configured none, and says which are used."""
    for pid in stop_leftover_servers(recipe.runs_dir):
        console.print(f"stopped a Prefect server left by a killed run (process {pid})")
    where = set_environment(recipe.runs_dir)
    ray = os.environ.get("RAY_ADDRESS", "embedded")
    line = f"Prefect: {where}. Ray: {ray}. MLflow: {tracking_uri(recipe)}"
    console.print(line, soft_wrap=True, highlight=False)


def _train_and_tell(recipe: Recipe, resume: str | None = None) -> None:
    from prefect.exceptions import CancelledRun

    with _stopping_ray():
        try:
            summary = _train(recipe, resume)
        except CancelledRun as stopped:
            console.print(str(stopped), style="yellow", soft_wrap=True, highlight=False)
            return
    _print_summary({recipe.arm or "run": summary}, "Result")
    _print_where(recipe, summary)


def _train(recipe: Recipe, resume: str | None = None) -> dict[str, Any]:
    from flows.live_view import LiveView
    from flows.training import train

    with LiveView(console, f"{resume or recipe.name or recipe.arm}: {recipe.iterations} iterations"):
        summary: dict[str, Any] = asyncio.run(train(recipe=recipe, resume=resume))
        return summary


@contextmanager
def _stopping_ray() -> Iterator[None]:
    try:
        yield
    finally:
        import ray

        ray.shutdown()


def _print_summary(arms: dict[str, dict[str, Any]], title: str) -> None:
    from fp8rl.report import comparison_rows

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for arm in arms:
        table.add_column(arm, justify="right")
    for row in comparison_rows(arms):
        table.add_row(*row)
    console.print(table)


def _print_where(recipe: Recipe, *summaries: dict[str, Any]) -> None:
    runs = Path(recipe.runs_dir).resolve()
    folders = ", ".join(str(runs / summary["run"]) for summary in summaries)
    uri = tracking_uri(recipe)
    curves = uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"
    lines = [f"Files of every step: {folders}", f"Curves: {curves}"]
    if os.environ.get("PREFECT_HOME") == str(embedded_home(recipe.runs_dir)):
        lines.append(f"Flow runs: PREFECT_HOME={os.environ['PREFECT_HOME']} prefect server start")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def main() -> None:
    """Entry point of the `fp8rl` command."""
    try:
        app()
    except KeyboardInterrupt:
        errors.print("stopped", style="red")
        sys.exit(130)


if __name__ == "__main__":
    main()
