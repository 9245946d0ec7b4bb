"""A run that is killed and carried on. `make test-kill` does this at every step."""

import pytest

from fp8rl.runs import Run
from tests.arms import SHORT, TINY
from tests.compare import run_differences
from tests.kill.harness import KILLED, Commands, faults_of

pytestmark = pytest.mark.pipeline


def test_killed_run_is_left_alone_until_resumed_and_then_ends_as_if_never_killed(
    runs_dir, run_arm, tmp_path
):
    reference = Run(run_arm("fp8-e2e-kv").journal.folder)
    commands = Commands(runs_dir, tmp_path)
    run = commands.run_of("killed")
    begin = ["run", str(TINY / "fp8-e2e-kv.yaml"), *SHORT, f"runs_dir={runs_dir}", "name=killed"]

    # The flow process, when one of two chunks of a rollout is committed.
    ended = commands.call(*begin, kill=("commit:rollout.0001:2:before-record",))
    assert (ended.code, ended.reached) == (KILLED, ("commit:rollout.0001:2:before-record",))
    assert run.journal.is_committed(2, "rollout.0000")
    assert not run.journal.is_committed(2, "rollout.0001")
    assert run_differences(reference, run, whole=False) == []

    # Its name is taken.
    before = {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()}
    refused = commands.call(*begin)
    assert refused.code == 2
    for text in (
        "a run named 'killed' exists",
        "state: killed",
        "last committed step: rollout.0000 of iteration 2",
        "fp8rl resume killed",
    ):
        assert text in refused.text
    assert {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()} == before

    # Carried on, with an engine and a learner that die: the command survives those.
    deaths = (
        "learner:send:2:1",
        "engine:evaluate:2:greedy",
        "learner:train:3:middle",
        "engine:load:3:1",
    )
    ended = commands.call("resume", "killed", f"--runs-dir={runs_dir}", kill=deaths)
    assert ended.code == 0, ended.text[-3000:]
    assert ended.reached == deaths
    assert faults_of(reference, run, whole=True) == ([], 0, 0)
