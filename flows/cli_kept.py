"""The parts of the `fp8rl` command that are about runs which are there: what they hold, what they are
worth, what can be taken away or put right. Who registers them tells the user of errors.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from flows.environment import set_environment
from flows.terminal import RunName, RunsDir, console
from fp8rl.comparison.selection import DEFAULT_MARGIN
from fp8rl.export import ExportFormat
from fp8rl.runs import Run


def runs(runs_dir: RunsDir = Path("runs")) -> None:
    """List the runs: state, last committed step, why they stopped, and what resumes them."""
    from flows.cli_runs import list_runs

    list_runs(runs_dir.resolve(), console)


def verify(name: RunName, runs_dir: RunsDir = Path("runs")) -> None:
    """Check every digest of a run, and name what is damaged or missing."""
    from flows.cli_runs import verify as check

    if not check(Run.find(runs_dir.resolve(), name), console):
        raise typer.Exit(1)


def clean(
    names: Annotated[list[str] | None, typer.Argument(help="Runs; all of them without")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete it")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show what runs hold that they do not need, and delete it with --yes."""
    from flows.cli_runs import clean as free

    free(runs_dir.resolve(), names or [], yes=yes, console=console)


def watch(
    name: RunName,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Watch a run that another process trains: state, last iterations, trends, what the guard did."""
    from flows.watching import watch as look

    look(Run.find(runs_dir.resolve(), name), console, every=every, once=once)


def samples(
    name: RunName,
    step: Annotated[
        int | None, typer.Option(help="The iteration whose evaluation to show; the last one's")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="How many of the best, and of the worst")] = 3,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show a run's answers to its validation prompts: the best and the worst of an evaluation."""
    from flows.cli_runs import show_samples

    show_samples(Run.find(runs_dir.resolve(), name), step, count, console)


def compare(
    experiment: Annotated[
        str | None,
        typer.Argument(help="An experiment (tracking.experiment); the only one there is without"),
    ] = None,
    runs: Annotated[str | None, typer.Option(help="Only these runs of it: a,b,c")] = None,
    reference: Annotated[
        str | None, typer.Option(help="The arm to compare with; the one that is BF16 everywhere")
    ] = None,
    margin: Annotated[
        float, typer.Option(help="Differences of accuracy up to this count as equal")
    ] = DEFAULT_MARGIN,
    allow_different: Annotated[
        list[str] | None,
        typer.Option(help="A recipe key, or a section, in which runs may differ; can be repeated"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the page; runs/compare/<experiment> by default")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Compare the arms of an experiment over their seeds, and say which equal the reference."""
    from flows.cli_runs import compare_arms
    from fp8rl.comparison.compare import Request

    names = tuple(name.strip() for name in (runs or "").split(",") if name.strip())
    request = Request(
        runs_dir.resolve(), experiment, names, reference, margin, tuple(allow_different or ())
    )
    compare_arms(request, out, console)


def export(
    name: RunName,
    step: Annotated[
        int | None, typer.Option(help="The iteration whose weights to take; the newest checkpoint's")
    ] = None,
    fmt: Annotated[
        ExportFormat, typer.Option("--format", help="bf16, or fp8 with 128x128 blocks")
    ] = ExportFormat.BF16,
    out: Annotated[
        Path | None, typer.Option(help="The folder to make; runs/<run>/export/... by default")
    ] = None,
    log: Annotated[
        bool, typer.Option("--log-model", help="Log it to MLflow too, as a model (BF16)")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a run's weights as a Hugging Face checkpoint, with tokenizer and chat template."""
    from fp8rl.export import export as write
    from fp8rl.logged_model import log_model, require_loggable

    with console.status("writing the checkpoint"):
        run = Run.find(runs_dir.resolve(), name)
        if log:
            require_loggable(run, fmt)
        done = write(run, fmt, version=step, out=out)
        uri = log_model(run, done) if log else ""
    text = f"weights after iteration {done.version} of run {name}, {fmt}: {done.folder}"
    console.print(text, soft_wrap=True, highlight=False)
    if uri:
        console.print(f"logged as {uri}: mlflow.transformers.load_model loads it", highlight=False)
    for note in done.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True, highlight=False)


def reap(runs_dir: RunsDir = Path("runs")) -> None:
    """Put right what killed processes left: records, MLflow, Prefect, leftover servers."""
    from flows.cli_runs import reap as put_right

    set_environment(str(runs_dir))
    put_right(runs_dir.resolve(), console)


def mark_crashed(
    within: Annotated[float, typer.Option(help="Seconds without a heartbeat")] = 90.0,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Have the Prefect server mark runs as crashed whose machine is gone (an automation)."""
    set_environment(str(runs_dir))
    from flows.automations import install_zombie_automation  # Prefect reads its settings on import

    console.print(asyncio.run(install_zombie_automation(within)), highlight=False)


COMMANDS = (runs, watch, samples, compare, export, verify, clean, reap, mark_crashed)
