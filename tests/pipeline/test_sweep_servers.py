"""Sweeps under `fp8rl up`: two at once, and what restarts of the servers do to one. Each is of the same
two runs, so that all come to the same bits."""

import signal

import pytest

from fp8rl.runs import Run
from fp8rl.services.up import find_up
from tests.compare import point_faults, run_differences
from tests.services import SMALL, services_of
from tests.serving import mlflow_sweep, overlaps, write_sweep

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

SEEDS = (0, 1)
LONGER = [*SMALL[1:], "iterations=4"]


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    with services_of(tmp_path_factory.mktemp("served") / "runs") as found:
        yield found


class Sweep:
    """A sweep of two runs, as its form starts it."""

    def __init__(self, services, name):
        self.services, self.name = services, name
        file = services.runs.parent / f"{name}.yaml"
        write_sweep(file, name, ["bf16"], SEEDS, LONGER, experiment=name)
        self.id = services.run("sweep/sweep", file=str(file))
        self.runs = [Run(services.runs / f"{name}-bf16-s{seed}") for seed in SEEDS]

    def middle_of(self, run):
        self.services.until(f"the middle of {run.name}", lambda: run.journal.is_committed(1, "train"))

    def require_whole(self, reference=None, attempts=(1, 1)):
        """It is over, and nothing of it is lost or there twice."""
        for run in self.runs:
            self.services.until(f"{run.name}", lambda run=run: run.state().state == "finished")
        ended = self.services.end_of(self.id)
        assert ended["type"] == "COMPLETED", ended
        for run, count in zip(self.runs, attempts, strict=True):
            assert run.state().state == "finished"
            assert len(run.attempts()) == count
            assert point_faults(run) == ([], [])
        parent, rows = mlflow_sweep(self.services, self.name)
        assert parent.info.status == "FINISHED"
        assert parent.data.metrics["sweep/finished"] == len(SEEDS)
        assert [row["state"] for row in rows] == ["finished"] * len(SEEDS)
        if reference is not None:
            for run, one in zip(self.runs, reference.runs, strict=True):
                assert run_differences(one, run, whole=True) == []


@pytest.fixture(scope="module")
def undisturbed(services):
    """Two sweeps, begun at once, that nothing has happened to."""
    pair = [Sweep(services, name) for name in ("one", "other")]
    for run in (run for sweep in pair for run in sweep.runs):
        services.until(f"the end of {run.name}", lambda run=run: run.state().state == "finished")
    return pair


def test_two_sweeps_at_once_take_turns(undisturbed):
    one, other = undisturbed
    one.require_whole()
    other.require_whole(one)
    assert overlaps([*one.runs, *other.runs]) == []


def test_sweep_outlives_the_death_of_each_server(services, undisturbed):
    sweep = Sweep(services, "servers")
    first, second = sweep.runs
    sweep.middle_of(first)
    services.service_process("prefect").send_signal(signal.SIGKILL)
    sweep.middle_of(second)
    services.service_process("mlflow").send_signal(signal.SIGKILL)
    sweep.require_whole(undisturbed[0])
    shown = services("status")
    assert shown.returncode == 0, shown.stdout


def test_sweep_goes_on_after_down_and_up(services, undisturbed):
    sweep = Sweep(services, "machine")
    sweep.middle_of(sweep.runs[0])
    done = services("down", "--force")
    assert done.returncode == 0, done.stdout + done.stderr
    assert find_up(services.runs) is None
    assert sweep.runs[0].state().state == "cancelled"
    services.up()
    services.retry(sweep.id)
    services.until("the sweep at work again", lambda: services.state(sweep.id) == "RUNNING")
    sweep.require_whole(undisturbed[0], attempts=(2, 1))
