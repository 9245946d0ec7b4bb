"""Sweeps whose runs are real folders, made by a fake that takes the place of the training."""

import asyncio
from pathlib import Path

import yaml

from flows.sweep_children import tagged
from fp8rl.journal import ITERATION, StepRecord
from fp8rl.lock import RunLock
from fp8rl.runs import Run, State
from fp8rl.sweep.drive import Drive, Tally
from fp8rl.sweep.expand import Child, load_sweep
from fp8rl.sweep.look import ACCURACY, MISMATCH, ChildState, look
from fp8rl.sweep.plan import Plan, open_plan
from fp8rl.sweep.study import source_of
from tests.folders import about, this_attempt

TINY = Path(__file__).parents[1] / "configs" / "tiny"


class Killed(BaseException):
    """The sweep's process is gone."""


class Training:
    """Makes the children's runs, one attempt at a time. script: {child: how its attempts end}, each
    (state, iterations), and ("finished", all) where it says no more. accuracy: of a child's recipe."""

    def __init__(self, plan: Plan, script=None, accuracy=lambda recipe: 0.5) -> None:
        self.plan, self.script, self.accuracy = plan, dict(script or {}), accuracy
        self.begun: list[str] = []
        self.at_once, self.most = 0, 0

    async def launch(self, child: Child, state: ChildState) -> str:
        self.begun.append(child.name)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(0)
            ends = self.script.get(child.name, [])
            how, iterations = ends.pop(0) if ends else ("finished", child.recipe.iterations)
            if how == "no run":
                return "it said why"
            self._train(child, how, iterations)
            if how == "sweep killed":
                raise Killed
        finally:
            self.at_once -= 1
        return ""

    def _train(self, child: Child, how: str, iterations: int) -> None:
        recipe = tagged(child.recipe, self.plan.tags("mlflow-run"))
        run = self.plan.run_of(child)
        if run is None:
            run, lock = Run.create(self.plan.runs, child.name, recipe, about(recipe))
        else:
            lock = RunLock(run.folder)
        attempt = run.begin_attempt(this_attempt())
        done = [record.iteration for record in run.journal.iterations()]
        for number in range(max(done, default=-1) + 1, iterations + 1):
            metrics = {ACCURACY: self.accuracy(recipe), MISMATCH: 1.0 + number / 100}
            run.journal.commit(StepRecord(ITERATION, number, 0.1, metrics=metrics), {})
        if how == "guard":
            run.update_attempt(attempt, guard_asked=iterations)
            run.end_attempt(attempt, State("stopped", "stopped by the guard"))
        elif how not in ("killed", "sweep killed"):
            run.end_attempt(attempt, State(how, f"{how} here"))
        lock.release()


def plan_of(folder: Path, *overrides: str, **values) -> Plan:
    path = folder / "sweep.yaml"
    given = {
        "name": "s",
        "arms": [str(TINY / "bf16.yaml")],
        "seeds": [0, 1, 2, 3],
        "overrides": {"iterations": 4},
        "runs_dir": str(folder),
        **values,
    }
    path.write_text(yaml.safe_dump(given))
    return open_plan(load_sweep(path, list(overrides)), "flow-1")


def start(plan: Plan, training: Training) -> tuple[Tally, list[dict[str, str]]]:
    """One start of the sweep; how it ended, and the children's states each time they were told."""
    told: list[dict[str, str]] = []
    source = source_of(plan)
    retry = plan.loaded.sweep.failures.retry

    async def tell(tally: Tally) -> None:
        told.append({name: state.state for name, state in tally.states.items()})

    driving = Drive(
        plan.loaded.sweep,
        source,
        look=lambda child: look(plan, child, retry=retry),
        launch=training.launch,
        tell=tell,
        poll_s=0.01,
    )
    return asyncio.run(driving.run()), told


def states(tally: Tally) -> list[str]:
    return [tally.states[name].state for name in sorted(tally.states)]
