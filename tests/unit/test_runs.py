"""Runs: made whole or not at all, found again, and told what state they are in."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli_runs import list_runs
from fp8rl import faults
from fp8rl.files import DiskFullError, from_sealed, to_sealed
from fp8rl.identity import IdentityError, read_identity, restore_identity
from fp8rl.journal import ITERATION, StepRecord
from fp8rl.lock import Owner, RunLock, read_owner
from fp8rl.runs import (
    NoRunError,
    Run,
    RunExistsError,
    State,
    all_runs,
    remove_unborn,
    run_of_flow,
)
from fp8rl.verification import verify_run
from tests.folders import (
    about,
    copy_of,
    files_in,
    flipped,
    held,
    make_run,
    replace_file,
    small_recipe,
    this_attempt,
)

ROOT = Path(__file__).parents[2]


def new(runs: Path, name: str = "r", **values) -> tuple[Run, RunLock]:
    recipe = small_recipe()
    return Run.create(runs, name, recipe, about(recipe) | values)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("stopped"), until=(1, ITERATION), saved=(1,))


# --- making one


def test_new_run_is_whole_locked_and_named(tmp_path):
    run, lock = new(tmp_path)
    assert sorted(files_in(run)) == [".run.json.copy", "recipe.yaml", "run.json"]
    assert read_owner(run.folder).pid == os.getpid()
    assert (run.name, run.about["name"], run.origin) == ("r", "r", 0)
    assert run.recipe == small_recipe().model_copy(update={"name": "r", "runs_dir": str(tmp_path)})
    assert run.about["step_digest"] == small_recipe().step_digest()
    assert verify_run(run).faults == []
    lock.release()
    assert not (run.folder / "lock.json").exists()
    other, lock = new(tmp_path, "s")
    assert other.id != run.id
    lock.release()


CREATE = """
import sys
from pathlib import Path
from fp8rl.recipe.schema import Recipe
from fp8rl.runs import Run
Run.create(Path(sys.argv[1]), "r", Recipe(), {"started": "2026-01-02T03:04:05+00:00"})
"""
POINTS = ["write:.run.json.copy", "write:run.json", "write:recipe.yaml", "write:lock.json"]


@pytest.mark.parametrize("at", [*POINTS, None])
def test_kill_while_a_run_is_made_leaves_none_or_a_whole_one(tmp_path, at):
    planted = json.dumps([{"at": at or "nowhere", "do": "kill", "once": str(tmp_path / "fired")}])
    runs = tmp_path / "runs"
    done = subprocess.run(
        [sys.executable, "-c", CREATE, str(runs)],
        cwd=ROOT,
        env=os.environ | {faults.VARIABLE: planted},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (-9 if at else 0), done.stderr
    assert [run.name for run in all_runs(runs)] == ([] if at else ["r"])
    if at:
        (leftover,) = runs.iterdir()
        assert leftover.name.startswith(".r.")
        # A process that has the dead one's number now began after it.
        os.utime(leftover, (0, 0))
        mine = runs / f".mine.{os.getpid()}.new"
        mine.mkdir()
        remove_unborn(runs)
        assert list(runs.iterdir()) == [mine]
        run, lock = new(runs)
        lock.release()
        assert verify_run(run).faults == []
    else:
        assert verify_run(Run(runs / "r")).faults == []


@pytest.mark.parametrize("at", POINTS)
def test_full_disk_while_a_run_is_made_leaves_nothing(tmp_path, monkeypatch, at):
    planted = [{"at": at, "do": "disk_full", "once": str(tmp_path / "fired")}]
    monkeypatch.setenv(faults.VARIABLE, json.dumps(planted))
    runs = tmp_path / "runs"
    with pytest.raises(DiskFullError, match="no room to write"):
        new(runs)
    assert list(runs.iterdir()) == []
    run, lock = new(runs)
    lock.release()
    assert verify_run(run).faults == []


def test_what_another_process_left_under_this_ones_number_is_not_taken_in(tmp_path):
    left = tmp_path / f".r.{os.getpid()}.new"
    (left / "iterations").mkdir(parents=True)
    run, lock = new(tmp_path)
    lock.release()
    assert not (run.folder / "iterations").exists()


def test_of_two_that_make_the_same_run_one_is_told_so(tmp_path, monkeypatch):
    elsewhere, lock = new(tmp_path / "elsewhere")
    lock.release()
    runs, rename = tmp_path / "runs", Path.rename

    def late(path, target):
        shutil.copytree(elsewhere.folder, runs / "r")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(RunExistsError, match="a run named 'r' exists"):
        new(runs)
    assert [path.name for path in runs.iterdir()] == ["r"]
    assert Run(runs / "r").id == elsewhere.id


def test_taken_name_says_what_is_there_and_changes_nothing(stopped, tmp_path):
    run = copy_of(stopped, tmp_path)
    before = files_in(run)
    with pytest.raises(RunExistsError) as refused:
        new(tmp_path)
    digest = run.about["recipe_digest"][:12]
    assert str(refused.value) == (
        f"a run named 'r' exists in {tmp_path}:\n"
        f"  started 2026-01-02T03:04:05+00:00, recipe {digest}\n"
        "  last committed step: iteration 1 is complete\n"
        "  state: stopped\n"
        "Nothing was changed. Start under another name (name=...), or carry on with `fp8rl resume r`."
    )
    assert files_in(run) == before
    with held(run):
        assert f"state: running (process {os.getpid()} on" in run.describe()
        assert "carry on" not in run.describe()
    (tmp_path / "other").mkdir()
    with pytest.raises(RunExistsError, match=r"no whole run\.json: it is not a run") as refused:
        new(tmp_path, "other")
    assert "carry on" not in str(refused.value)


# --- finding one


def test_run_is_found_by_name_and_near_names_are_told(stopped, tmp_path):
    run = copy_of(stopped, tmp_path)
    run.folder.rename(tmp_path / "fp8-long")
    assert Run.find(tmp_path, "fp8-long").id == stopped.id
    with pytest.raises(NoRunError, match=r"no run 'fp8-lomg' in .*; did you mean fp8-long"):
        Run.find(tmp_path, "fp8-lomg")
    with pytest.raises(NoRunError, match="`fp8rl runs` lists those there are"):
        Run.find(tmp_path, "zzz")
    (tmp_path / "notes").mkdir()
    with pytest.raises(NoRunError, match=r"has no run\.json, so it is not a run"):
        Run.find(tmp_path, "notes")


def test_runs_are_listed_by_age_also_without_run_json(tmp_path):
    made = {}
    for name, day in (("b", 2), ("a", 3), ("c", 1)):
        made[name], lock = new(tmp_path, name, started=f"2026-01-0{day}T00:00:00+00:00")
        lock.release()
    replace_file(made["a"].folder / "run.json", None)
    made["c"].change_recipe(small_recipe("iterations=9"))  # changed last, but it began first
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".x.1.new").mkdir()
    (tmp_path / ".x.1.new/run.json").write_text("{}")
    assert [run.name for run in all_runs(tmp_path)] == ["c", "b", "a"]
    assert Run.find(tmp_path, "a").origin == 0


def test_run_of_a_flow_is_the_one_it_worked_on(stopped, tmp_path):
    run, (other, lock) = copy_of(stopped, tmp_path), new(tmp_path, "s")
    with held(run):
        run.begin_attempt(this_attempt("flow-2"))
    other.begin_attempt(this_attempt("flow-3"))
    lock.release()
    found = {flow: run_of_flow(tmp_path, flow) for flow in ("flow-1", "flow-2", "flow-3", "flow-4")}
    assert {flow: run and run.name for flow, run in found.items()} == {
        "flow-1": "r",
        "flow-2": "r",
        "flow-3": "s",
        "flow-4": None,
    }


# --- attempts and states


def test_attempts_are_numbered_kept_and_ended(tmp_path):
    run, lock = new(tmp_path)
    assert run.state() == State("running", str(read_owner(run.folder)))
    assert run.begin_attempt(this_attempt("f1")) == 1
    run.update_attempt(1, first_iteration=3)
    run.end_attempt(1, State("failed", "ValueError: x"))
    assert run.begin_attempt(this_attempt("f2")) == 2
    lock.release()
    first, second = run.attempts()
    assert (first["number"], first["state"], first["reason"]) == (1, "failed", "ValueError: x")
    assert first["first_iteration"] == 3
    assert first["ended"] >= first["started"]
    assert (second["number"], second["state"], "ended" in second) == (2, "running", False)


@pytest.mark.parametrize("ended", ["finished", "failed", "cancelled", "stopped"])
def test_state_is_what_the_last_attempt_ended_as(tmp_path, ended):
    run, lock = new(tmp_path)
    assert run.begin_attempt(this_attempt()) == 1
    run.end_attempt(1, State(ended, "why"))
    lock.release()
    assert run.state() == State(ended, "why")
    assert run.state().is_over
    assert run.resume_command() == ("" if ended == "finished" else "fp8rl resume r")
    assert not run.is_dead_without_a_word()


def test_states_of_runs_that_said_nothing(tmp_path):
    run, lock = new(tmp_path)
    assert run.state().state == "running"
    assert run.resume_command() == ""
    lock.release()
    assert run.state() == State("new", "it was created, and no step of it began")
    with held(run):
        run.begin_attempt(this_attempt())
        assert (run.state().state, run.is_dead_without_a_word()) == ("running", False)
    state = run.state()  # as after a kill: nobody holds the lock, and nobody said how it ended
    assert state.state == "killed"
    assert (
        f"process {os.getpid()} on {Owner.this_process().host} is gone without a word" in state.reason
    )
    assert run.is_dead_without_a_word()
    assert run.resume_command() == "fp8rl resume r"
    # A lock that was left by a dead process says nothing else.
    owner = replace(Owner.this_process(), pid_started=0.0)
    (run.folder / "lock.json").write_text(json.dumps(asdict(owner)))
    assert run.state().state == "killed"


def test_damaged_attempts_are_left_out_named_and_not_written_over(stopped, tmp_path):
    run = copy_of(stopped, tmp_path)
    with held(run):
        run.begin_attempt(this_attempt())
        run.end_attempt(2, State("failed", "x"))
        path = run.folder / "attempts/00002.json"
        damaged = flipped(path.read_bytes())
        replace_file(path, damaged)
        assert [a["number"] for a in run.attempts()] == [1]
        assert run.damaged_attempts() == [path]
        run.update_attempt(2, first_iteration=1)
        assert path.read_bytes() == damaged
    assert run.state() == State("killed", f"{path} is damaged, which would say how it ended")
    with held(run):
        assert run.begin_attempt(this_attempt()) == 3
    assert [a["number"] for a in run.attempts()] == [1, 3]


def test_last_step_in_words(stopped, tmp_path):
    run, lock = new(tmp_path)
    assert run.last_step() == "none"
    lock.release()
    (tmp_path / "x").mkdir()
    run = copy_of(stopped, tmp_path / "x")
    assert run.last_step() == "iteration 1 is complete"
    with held(run):
        run.journal.commit(StepRecord("rollout.0003", 2, 0.1), {})
        assert run.last_step() == "rollout.0003 of iteration 2"
        run.journal.commit(StepRecord("train", 2, 0.1), {})
    replace_file(run.journal.record_path(2, "train"), b"")
    assert run.last_step() == "rollout.0003 of iteration 2"


# --- what a run is


def test_identity_is_read_from_either_copy_and_restored(stopped, tmp_path):
    run = copy_of(stopped, tmp_path)
    wanted = read_identity(run.folder)
    assert restore_identity(run.folder) is None
    for name, other in (("run.json", ".run.json.copy"), (".run.json.copy", "run.json")):
        for content in (None, b"", b"{}", b"[]", flipped((run.folder / name).read_bytes())):
            replace_file(run.folder / name, content)
            assert read_identity(run.folder) == wanted
            note = restore_identity(run.folder)
            assert f"{run.folder / name} was missing or damaged; written again from {other}" == note
            assert restore_identity(run.folder) is None


def test_identity_without_what_is_needed_is_damaged(stopped, tmp_path):
    run = copy_of(stopped, tmp_path)
    values = read_identity(run.folder)
    del values["recipe"]
    for name in ("run.json", ".run.json.copy"):
        replace_file(run.folder / name, to_sealed(values))
    with pytest.raises(IdentityError, match="missing or damaged"):
        run.about  # noqa: B018


def test_kill_in_the_middle_of_a_change_keeps_the_old_recipe_and_both_copies_agree(
    stopped, tmp_path, monkeypatch
):
    run = copy_of(stopped, tmp_path)
    planted = [{"at": "write:run.json", "do": "raise", "once": str(tmp_path / "fired")}]
    monkeypatch.setenv(faults.VARIABLE, json.dumps(planted))
    with pytest.raises(faults.FaultError):
        run.change_recipe(small_recipe("iterations=9"))
    assert run.recipe.iterations == 4
    assert "was not that of run.json" in restore_identity(run.folder)
    assert from_sealed((run.folder / ".run.json.copy").read_bytes()) == run.about
    run.change_recipe(small_recipe("iterations=9"))
    assert run.recipe.iterations == 9
    assert verify_run(run).faults == []


def test_recipe_file_is_checked_and_written_again(stopped, tmp_path):
    run = copy_of(stopped, tmp_path)
    assert run.restore_recipe_file() is None
    text = run.recipe_file.read_bytes()
    for content in (None, b"[", b"\xff", text.replace(b"iterations: 4", b"iterations: 5")):
        replace_file(run.recipe_file, content)
        assert not run.is_recipe_file_whole()
        assert "written again from run.json" in run.restore_recipe_file()
        assert run.recipe_file.read_bytes() == text


# --- the list


def test_list_of_runs_says_how_far_they_got_and_what_resumes_them(stopped, tmp_path):
    runs = tmp_path
    copy_of(stopped, runs)
    done, lock = new(runs, "done", started="2026-03-01T00:00:00+00:00")
    done.begin_attempt(this_attempt())
    done.end_attempt(1, State("finished"))
    lock.release()
    broken, lock = new(runs, "broken", started="2026-02-01T00:00:00+00:00")
    lock.release()
    for name in ("run.json", ".run.json.copy"):
        replace_file(broken.folder / name, b"?")
    _, lock = new(runs, "living", started="2026-04-01T00:00:00+00:00")
    console = Console(width=600, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    list_runs(runs, console)
    lock.release()
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in console.export_text().splitlines()
        if len(cells := line.replace("┃", "│").split("│")) > 3
    }
    assert rows["r"][1:5] == ["stopped", "iteration 1 is complete", "4", ""]
    assert rows["r"][5] == "fp8rl resume r"
    assert rows["done"] == ["03-01 00:00", "finished", "none", "4", "", ""]
    assert rows["broken"][1] == "damaged"
    assert "missing or damaged" in rows["broken"][4]
    assert rows["living"][1] == "running"
    assert rows["living"][4] == f"process {os.getpid()} on {Owner.this_process().host}"
    assert rows["living"][5] == ""
