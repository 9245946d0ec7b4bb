"""`make bench-orchestration`: what Prefect and MLflow cost an iteration, as
benchmarks/results/orchestration.json.

The same iterations twice, turn about, each in a process of its own: by the `train` flow, and by calling
the steps' work and committing it, without flow, task or MLflow. The overhead is the wall time of the
flow's iteration, end to end, less the direct one's; its parts are timed inside the flow's process. The
journal is in both, and shown beside.
"""

import asyncio
import inspect
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import record
from fp8rl.recipe.load import load_recipe
from fp8rl.recipe.schema import Recipe

CONFIG = Path(__file__).parent.parent / "configs" / "tiny" / "bf16.yaml"
ITERATIONS, WARM_UP, ROUNDS = 16, 3, 2
LIMIT_S = 1.0


def recipe_in(runs: Path, name: str) -> Recipe:
    """Evaluated and checkpointed at the ends only: neither is part of an iteration."""
    overrides = [f"runs_dir={runs}", f"name={name}", f"iterations={ITERATIONS}"]
    overrides += ["evaluate.every=1000", "checkpoint.every=1000", "evaluate.samples=1"]
    return load_recipe(CONFIG, overrides).recipe


@contextmanager
def timed(owner: Any, name: str, part: str, seconds: dict[str, float]) -> Iterator[None]:
    """Adds what calls of `owner.name` take, own awaits included, to seconds[part]."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = original(*args, **kwargs)
        if not inspect.isawaitable(result):
            seconds[part] += time.perf_counter() - started
            return result
        return waited(result, started)

    async def waited(result: Any, started: float) -> Any:
        try:
            return await result
        finally:
            seconds[part] += time.perf_counter() - started

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def by_flow(recipe: Recipe) -> dict[str, list[float]]:
    """Seconds of each iteration after the warm-up: wall, end to end, and its parts."""
    from flows.environment import set_environment

    set_environment(recipe.runs_dir)
    from flows import training
    from flows.live_artifact import LiveArtifact
    from fp8rl import progress
    from fp8rl.journal import Journal
    from fp8rl.report import STEPS
    from fp8rl.tracking import Tracker

    seconds: dict[str, float] = defaultdict(float)
    found: dict[str, list[float]] = defaultdict(list)
    last = time.perf_counter()

    def on_event(event: progress.Event) -> None:
        nonlocal last
        if event.kind != "iteration":
            return
        now = time.perf_counter()
        if WARM_UP < event.iteration < ITERATIONS:  # the last one is evaluated
            work = sum(event.metrics[f"timing/{step}_s"] for step in STEPS)
            parts = {"journal": seconds["commit"], "mlflow": seconds["flush"]}
            parts["artifacts"] = seconds["live"] + seconds["bar"]
            parts["prefect"] = seconds["iterate"] - work - seconds["commit"]
            for part, value in parts.items():
                found[part].append(value)
            found["wall"].append(now - last)
            found["other"].append(now - last - work - sum(parts.values()))
        seconds.clear()
        last = now

    with ExitStack() as patched:
        for owner, name, part in (
            (Journal, "commit", "commit"),
            (Tracker, "flush", "flush"),
            (LiveArtifact, "update", "live"),
            (training, "aupdate_progress_artifact", "bar"),
            (training, "_iterate", "iterate"),
        ):
            patched.enter_context(timed(owner, name, part, seconds))
        patched.enter_context(progress.listening(on_event))
        asyncio.run(training.train(recipe=recipe))
    return found


def directly(recipe: Recipe) -> dict[str, list[float]]:
    """Seconds of each iteration after the warm-up, by calling the steps' work alone."""
    from flows.environment import set_quiet

    set_quiet()
    from prefect.logging import disable_run_logger

    from flows.opening import open_run
    from fp8rl.journal import StepRecord
    from tasks import prepare, ray_runtime
    from tasks.evaluate import evaluate
    from tasks.recalibrate_kv import recalibrate_kv
    from tasks.requantize import requantize
    from tasks.reward import reward
    from tasks.rollout import rollout
    from tasks.train import train

    opened = open_run(recipe, None, "benchmark")
    context = opened.context()
    ray_runtime.start_ray()

    async def do(step: Any, iteration: int) -> None:
        started = time.perf_counter()
        files, fields = await step.work(context, iteration)
        seconds = time.perf_counter() - started
        written = fields.pop("written", ())
        done = StepRecord(step.__name__, iteration, seconds, inputs={}, **fields)
        context.journal.commit(done, files, written)  # later steps read it

    async def all_of_it() -> list[float]:
        for step in (prepare.prepare_data, prepare.warm_start):
            await do(step, 0)
        await prepare.open_engines.fn(context, 0)
        for step in (requantize, recalibrate_kv, evaluate):
            await do(step, 0)
        found = []
        for iteration in range(1, ITERATIONS):
            started = time.perf_counter()
            for step in (rollout, reward, train, requantize, recalibrate_kv):
                await do(step, iteration)
            if iteration > WARM_UP:
                found.append(time.perf_counter() - started)
        return found

    try:
        with disable_run_logger():  # there is no flow run whose log it could be
            return {"wall": asyncio.run(all_of_it())}
    finally:
        ray_runtime.release(context)
        opened.lock.release()


def measure(folder: Path) -> dict[str, Any]:
    """Both ways, in turns; medians over all iterations of a way."""
    found: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in ("flow", "direct")}
    for turn in range(ROUNDS):
        for way, parts in found.items():
            command = [
                sys.executable,
                "-m",
                "benchmarks.orchestration",
                way,
                str(folder),
                f"{way}-{turn}",
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{way}: {done.stderr[-4000:]}")
            for part, values in json.loads(done.stdout.splitlines()[-1]).items():
                parts[part] += values
            print(way, turn, {part: round(statistics.median(v), 3) for part, v in parts.items()})
    medians = {part: statistics.median(values) for part, values in found["flow"].items()}
    journal = medians.pop("journal")
    flow, direct = medians.pop("wall"), statistics.median(found["direct"]["wall"])
    return {
        "overhead_s_per_iteration": flow - direct,
        "limit_s": LIMIT_S,
        "parts_s": medians,
        "journal_s": journal,
        "flow_iteration_s": flow,
        "direct_iteration_s": direct,
        "iterations": len(found["direct"]["wall"]),
    }


def main(arguments: list[str]) -> None:
    """Without words: measures, prints and writes. WAY RUNS NAME: one way, as JSON on the last line."""
    if arguments:
        way, runs, name = arguments
        recipe = recipe_in(Path(runs), name)
        print(json.dumps(by_flow(recipe) if way == "flow" else directly(recipe)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        values = measure(Path(temporary))
    print(json.dumps(values, indent=1))
    print(record.write("orchestration", values))


if __name__ == "__main__":
    main(sys.argv[1:])
