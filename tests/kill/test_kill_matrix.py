"""The kill matrix: every process of a run is killed at every step, and nothing is lost or done twice.

`make test-kill` runs it and writes docs/kill_matrix.md and benchmarks/results/kill_matrix.json.
"""

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.compare import run_differences
from tests.kill.cases import ACTORS, FLOW, UNBORN, in_words
from tests.kill.harness import (
    ROOT,
    Commands,
    Row,
    Table,
    WarmCommands,
    faults_of,
    flow_chain,
    free_port,
    kill_tree,
    server,
    standing_services,
    went_on,
)

pytestmark = pytest.mark.kill

TINY = ROOT / "configs" / "tiny"
# Set by `make test-kill`: a part of the tests alone must not replace the published table.
WRITE = "FP8RL_WRITE_KILL_MATRIX"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kill")


@pytest.fixture(scope="session")
def table():
    made, began = Table(), time.monotonic()
    yield made
    if os.environ.get(WRITE):
        made.write(ROOT / "docs" / "kill_matrix.md", time.monotonic() - began)


@pytest.fixture(scope="session")
def sizes(folder):
    return [
        f"runs_dir={folder / 'runs'}",
        "iterations=3",
        "warm_start.steps=80",
        "task.val_prompts=16",
        "evaluate.every=2",
        "rollout.prompts=8",
        "rollout.samples=8",
        "rollout.chunk_size=32",
        "checkpoint.every=2",
        "retry.delay_s=0.1",
        "sync.bucket_mib=1",
    ]


@pytest.fixture(scope="session")
def plain(folder):
    """Commands as a user gives them, with the embedded services."""
    return Commands(folder / "runs", folder / "logs")


@pytest.fixture(scope="session")
def warm(folder):
    """Commands with standing services; they start faster."""
    with standing_services(folder / "services") as services:
        commands = WarmCommands(folder / "runs", folder / "logs-warm", services)
        yield commands
        commands.close()


def begin(arm: str, name: str, *overrides: str) -> list[str]:
    return ["run", str(TINY / f"{arm}.yaml"), *overrides, f"name={name}"]


def resume(commands: Commands, name: str, *overrides: str) -> list[str]:
    return ["resume", name, *overrides, f"--runs-dir={commands.runs}"]


@pytest.fixture(scope="session")
def reference(plain, sizes):
    """The run of an arm that is never killed, made once."""

    def of(arm: str):
        name = f"reference-{arm}"
        if not plain.has(name):
            ended = plain.call(*begin(arm, name, *sizes))
            assert ended.code == 0, ended.text[-3000:]
        return plain.run_of(name)

    return of


def test_two_runs_that_nobody_kills_are_the_same(plain, sizes, reference):
    """Without this no comparison below says anything."""
    ended = plain.call(*begin("fp8-e2e-kv", "twin", *sizes))
    assert ended.code == 0, ended.text[-3000:]
    found, _, _ = faults_of(reference("fp8-e2e-kv"), plain.run_of("twin"), whole=True)
    assert found == []


def test_flow_process_killed_at_every_step(folder, warm, sizes, reference, table):
    wanted = reference("fp8-e2e-kv")
    # Its own MLflow file, so that it is killed while that is made too.
    tracking = f"tracking.uri=sqlite:///{folder / 'runs' / 'chain.db'}"
    points = (*UNBORN, *FLOW)
    first = len(table.rows)
    flow_chain(warm, table, wanted, "chain", begin("fp8-e2e-kv", "chain", *sizes, tracking), points)
    rows = table.rows[first:]
    assert [row.when for row in rows if row.faults] == [], table.failures()
    assert len(rows) == len(points)
    # One killed before its attempt's record is known to Prefect alone, which goes on showing it.
    known = {attempt["prefect_flow_run"] for attempt in warm.run_of("chain").attempts()}
    assert known.isdisjoint(warm.unfinished_flow_runs())


def test_engine_and_learner_killed_all_over_one_run(plain, sizes, reference, table):
    name = "actors"
    ended = plain.call(*begin("fp8-e2e-kv", name, *sizes, "checkpoint.every=1"), kill=ACTORS)
    found, duplicate, missing = [f"exit code {ended.code}: {ended.text[-1000:]}"], 0, 0
    if ended.code == 0:
        found, duplicate, missing = faults_of(reference("fp8-e2e-kv"), plain.run_of(name), whole=True)
    for point in ACTORS:
        engine = point.startswith("engine")
        wrong = list(found) if point in ended.reached else [*found, "the fault was not reached"]
        what = "rollout engine" if engine else "learner"
        then = f"made again by the same command; {'weights loaded' if engine else 'training replayed'}"
        table.add(Row("fp8-e2e-kv", what, in_words(point), then, wrong))
    table.rows[-1].duplicate_points += duplicate
    table.rows[-1].missing_points += missing
    assert set(ended.reached) == set(ACTORS)
    assert found == []


def wait_for(path: Path, process) -> None:
    while not path.exists():
        assert process.poll() is None, f"ended before {path.name} was there"
        time.sleep(0.01)


def child_of(process, word: str) -> psutil.Process:
    for child in psutil.Process(process.pid).children(recursive=True):
        if any(word in part for part in child.cmdline()):
            return child
    raise AssertionError(f"no process with {word} in its command")


@pytest.mark.parametrize(
    ("what", "word"), [("raylet", "raylet/raylet"), ("embedded Prefect server", "prefect.server")]
)
def test_service_killed_in_mid_run(plain, sizes, reference, table, what, word):
    name = f"without-{word.partition('/')[0].replace('.', '-')}"
    run = plain.run_of(name)
    with plain.started(*begin("fp8-e2e-kv", name, *sizes)) as (process, end):
        wait_for(run.journal.record_path(1, "rollout"), process)
        child_of(process, word).kill()
        ended = end()
    then, tries = "the same command went on to the end", 0
    while ended.code != 0 and tries < 3:
        tries += 1
        ended = plain.call(*resume(plain, name))
        then = f"the command failed; {went_on(ended.text)}"
    found, duplicate, missing = [f"exit code {ended.code}: {ended.text[-1000:]}"], 0, 0
    if ended.code == 0:
        found, duplicate, missing = faults_of(reference("fp8-e2e-kv"), run, whole=True)
    table.add(
        Row("fp8-e2e-kv", what, "after the rollout of iteration 1", then, found, duplicate, missing)
    )
    assert found == []


def test_mlflow_server_killed_in_mid_run(folder, plain, sizes, reference, table):
    port, name = free_port(), "without-mlflow"
    uri = f"http://127.0.0.1:{port}"
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'standing.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    run = plain.run_of(name)
    with server(command, f"{uri}/health", folder / "mlflow.log") as tracking:
        begun = begin("fp8-e2e-kv", name, *sizes, f"tracking.uri={uri}")
        with plain.started(*begun) as (process, end):
            wait_for(run.journal.record_path(1, "rollout"), process)
            kill_tree(tracking.pid)
            ended = end()
    assert ended.code == 0, ended.text[-3000:]
    assert "MLflow has not got" in ended.text
    with server(command, f"{uri}/health", folder / "mlflow2.log"):
        reaped = plain.call("reap", f"--runs-dir={plain.runs}")
        assert reaped.code == 0, reaped.text
        found, duplicate, missing = faults_of(reference("fp8-e2e-kv"), run, whole=True)
    then = "training went on to the end; `fp8rl reap` brought the points to the restarted server"
    when = "after the rollout of iteration 1"
    table.add(Row("fp8-e2e-kv", "mlflow server", when, then, found, duplicate, missing))
    assert found == []


def test_bf16_flow_and_learner_killed_in_train(plain, sizes, reference, table):
    name, arm = "bf16", "bf16"
    wanted, run = reference(arm), plain.run_of(name)
    point, second = "commit:train:2:before-record", "learner:train:3:middle"
    ended = plain.call(*begin(arm, name, *sizes), kill=(point,))
    assert ended.reached
    assert run_differences(wanted, run, whole=False) == []
    ended = plain.call(*resume(plain, name), kill=(second,))
    found, duplicate, missing = [f"exit code {ended.code}: {ended.text[-1000:]}"], 0, 0
    if ended.code == 0:
        found, duplicate, missing = faults_of(wanted, run, whole=True)
    if not ended.reached:
        found.append("the second fault was not reached")
    table.add(Row(arm, "flow process", in_words(point), went_on(ended.text), list(found)))
    then = "made again by the same command; training replayed"
    table.add(Row(arm, "learner", in_words(second), then, list(found), duplicate, missing))
    assert found == []


@pytest.mark.parametrize("arm", ["bf16", "fp8-e2e-kv"])
def test_twenty_iterations_are_seven_and_five_and_eight(warm, sizes, arm):
    more = [*sizes, "iterations=20", "evaluate.every=10", "checkpoint.every=4"]
    ended = warm.call(*begin(arm, f"straight-{arm}", *more))
    assert ended.code == 0, ended.text[-3000:]
    name = f"parts-{arm}"
    ended = warm.call(*begin(arm, name, *more, "stop.after_iteration=7"))
    assert ended.code == 0, ended.text[-3000:]
    run = warm.run_of(name)
    assert (run.state().state, run.last_step()) == ("stopped", "iteration 7 is complete")
    ended = warm.call(*resume(warm, name, "stop.after_iteration=12"))
    assert ended.code == 0, ended.text[-3000:]
    assert (run.state().state, run.last_step()) == ("stopped", "iteration 12 is complete")
    ended = warm.call(*resume(warm, name, "stop.after_iteration=null"))
    assert ended.code == 0, ended.text[-3000:]
    found, _, _ = faults_of(warm.run_of(f"straight-{arm}"), run, whole=True)
    assert found == []
