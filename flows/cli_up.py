"""The parts of the `fp8rl` command that are about the machine's services: up, status, down."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from flows.environment import set_quiet
from flows.terminal import RunsDir, console, say
from fp8rl.runs import Run, all_runs
from fp8rl.services.config import UpConfig, UpError, load_config
from fp8rl.services.plan import public
from fp8rl.services.up import Up, bring_up, find_up, one_at_a_time
from fp8rl.sweep.plan import sweeps_at_work

CONFIG = Path("infra/up.yaml")
_COLOURS = {"healthy": "green", "starting": "yellow"}


def up(
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Values to change: key=value, for example prefect_port=4300"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings as YAML; infra/up.yaml where it is there")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on, as the setting of that name")
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Say yes to a host that others can reach")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Start Prefect, a worker, MLflow and Ray on this machine, and deploy the flows."""
    file = config or (CONFIG if CONFIG.is_file() else None)
    wanted = load_config(file, settings or [], host)
    runs = runs_dir.resolve()
    require_word(wanted, allow_remote)
    set_quiet()  # this and the password before Prefect is imported, which reads its settings then
    if password := os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):  # of the server that starts
        os.environ.setdefault("PREFECT_API_AUTH_STRING", password)  # of its clients here
    from flows.asked import ROOT
    from flows.deploying import PREFECT_FILE

    if not PREFECT_FILE.is_file():
        raise UpError(f"{PREFECT_FILE} is not there: `fp8rl up` needs a checkout of the repository")
    with one_at_a_time(runs):
        there = find_up(runs)
        if there is not None and there.is_alive():
            _say_is_up(there, wanted)
            return
        if there is not None:
            say("the services that were up here are gone without a word; starting anew")
            there.stop(say)
        started = bring_up(
            runs,
            wanted,
            yours=configured(),
            directory=ROOT,
            deploy=_deploy,
            say=say,
        )
    show(started)
    _say_what_next(started)


def status(runs_dir: RunsDir = Path("runs")) -> None:
    """Show how the services of `fp8rl up` are. Exit code 1 where they are not up and healthy."""
    there = find_up(runs_dir)
    if there is None:
        say(f"no services are up for {runs_dir.resolve()}; `fp8rl up` starts them")
    if there is None or not show(there):
        raise typer.Exit(1)


def down(
    force: Annotated[
        bool, typer.Option("--force", help="Also where training runs are at work; they can be resumed")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Stop what `fp8rl up` started, and nothing else."""
    runs = runs_dir.resolve()
    with one_at_a_time(runs):
        there = find_up(runs)
        if there is None:
            say(f"no services are up for {runs}")
            return
        running = [run for run in all_runs(runs) if not run.state().is_over]
        sweeps = sweeps_at_work(runs)
        if (running or sweeps) and not force:
            runs_said = f"training runs are at work: {', '.join(map(_describe, running))}"
            sweeps_said = f"sweeps are at work: {', '.join(sweeps)}"
            said = [text for text, some in ((runs_said, running), (sweeps_said, sweeps)) if some]
            raise UpError(
                f"{'; '.join(said)}. Wait for them, or cancel them (in the Prefect UI, or Ctrl-C where "
                "they were started), or `fp8rl down --force`: they are ended, and can be carried on"
            )
        own = [service.name for service in there.services if service.own]
        others = [service.name for service in there.services if not service.own]
        there.stop(say)
        say(f"stopped: {', '.join(reversed(own))}. Logs and databases stay in {there.folder}")
        if others:
            say(f"left alone, since not started here: {', '.join(others)}")
        for run in running:
            state = Run(run.folder).state()
            text = "still runs, started elsewhere, and has lost its services"
            if state.is_over:
                text = f"{state.state}; to carry on: {run.resume_command()}"
            say(f"run {run.name}: {text}")
        for name in sweeps:
            say(f"sweep {name}: to carry on: Retry of its run, or `fp8rl sweep` with its file")


def configured() -> dict[str, tuple[str, str]]:
    """{service: (url, what names it)} of the servers that the user has said to use."""
    from prefect.settings import get_current_settings

    found = {}
    url = get_current_settings().api.url
    if url is not None:
        by = "PREFECT_API_URL" if "PREFECT_API_URL" in os.environ else "your Prefect profile"
        found["prefect"] = (url, by)
    for name, variable in (("mlflow", "MLFLOW_TRACKING_URI"), ("ray", "RAY_ADDRESS")):
        if os.environ.get(variable):
            found[name] = (os.environ[variable], variable)
    return found


def require_word(config: UpConfig, allow_remote: bool) -> None:
    """Raises UpError where `config` opens the servers to others and nobody said so; else warns."""
    if config.is_loopback:
        return
    if not allow_remote:
        raise UpError(
            f"host: {config.host} lets other machines reach Prefect and MLflow, and whoever reaches "
            "Prefect can run code here. Add --allow-remote if that is meant, and set a password "
            "(docs/operate.md). Without it: host=127.0.0.1, and an SSH tunnel"
        )
    if not os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        text = "Prefect asks for no password (PREFECT_SERVER_API_AUTH_STRING is unset)"
        say(f"warning: {text}, and whoever reaches {config.host} can run code here", style="yellow")


def _say_is_up(there: Up, config: UpConfig) -> None:
    """Says that services are up; raises UpError where other settings are asked for, or they are ill."""
    asked = public(config)
    other = [key for key, value in there.config.items() if asked[key] != value]
    if other:
        said = ", ".join(f"{key}={there.config[key]}" for key in other)
        raise UpError(
            f"it is up already, with {said}. `fp8rl down` first, to start with other settings"
        )
    say(f"it is up already (process {there.supervisor_pid})")
    if not show(there):
        raise UpError("it is up, and not healthy. See the logs; `fp8rl down` and `fp8rl up` start anew")


def show(there: Up) -> bool:
    """Prints a table of the services; True where all are healthy."""
    table = Table(title=f"Services of {there.runs}", title_justify="left")
    for heading in ("service", "health", "where", "started by", "log"):
        table.add_column(heading, overflow="fold")
    found = there.health()
    for one in found:
        service = one.service
        by = "fp8rl up" if service.own else f"you ({service.said_by})"
        health = f"{one.state}: {one.detail}" if one.detail else one.state
        log = "" if one.log is None else os.path.relpath(one.log)
        where = service.page or service.url
        style = _COLOURS.get(one.state, "red")
        table.add_row(service.name, f"[{style}]{health}[/{style}]", where, by, log)
    console.print(table)
    return all(one.is_well for one in found)


def _deploy(there: Up) -> None:
    """In this process, from here on: the Prefect server of `there`."""
    os.environ.update(there.environment)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.automations import install_zombie_automation
    from flows.deploying import deploy, make_pool

    with temporary_settings({PREFECT_API_URL: there.service("prefect").url}):
        say(asyncio.run(make_pool()))
        names = deploy(there.runs, there.folder / "logs" / "deploy.log")
        say(f"deployed: {', '.join(names)}")
        if there.service("prefect").own:
            say(asyncio.run(install_zombie_automation()))
        else:
            say("`fp8rl mark-crashed` has your server mark runs whose machine is gone as Crashed")


def _say_what_next(there: Up) -> None:
    runs = "" if there.runs == Path("runs").resolve() else f" --runs-dir {there.runs}"
    page = there.service("prefect").page
    say(f"Start a run: {page}/deployments, train, Run, Custom run; or `fp8rl run RECIPE`,")
    say("which uses these services, as does all of `fp8rl` for this runs folder. For others:")
    for key in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        say(f"  export {key}={there.environment[key]}")
    say(f"`fp8rl status{runs}` shows how they are, `fp8rl down{runs}` stops them.")


def _describe(run: Run) -> str:
    return f"{run.name} ({run.state().reason}, after {run.last_step()})"
