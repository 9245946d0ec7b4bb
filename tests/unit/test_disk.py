"""What a run keeps, what `clean` lets go, and what `verify` says."""

import json
import math
import os
import shutil
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from flows.cli_runs import clean, verify
from fp8rl import checkpoints, files
from fp8rl.disk import Removable, removable, remove, size_of
from fp8rl.journal import ITERATION, StepRecord
from fp8rl.lock import LockedError, Owner
from fp8rl.position import Position, settle
from fp8rl.retention import best, metric_values, old_checkpoints
from fp8rl.rewind import rewind
from fp8rl.runs import NoRunError, Run
from fp8rl.verification import verify_run
from tests.folders import copy_of, files_in, flipped, held, make_run, replace_file

KEEP = ("checkpoint.keep_last=1", "checkpoint.keep_best=0")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Four iterations; checkpoints of 1, 2 and 4, of which the recipe keeps the last."""
    runs = tmp_path_factory.mktemp("made")
    return make_run(runs, until=(4, ITERATION), saved=(1, 2, 4), overrides=KEEP)


@pytest.fixture
def run(made, tmp_path):
    return copy_of(made, tmp_path)


def said() -> Console:
    return Console(width=250, record=True, file=open(os.devnull, "w"))


def names(items: list[Removable], run: Run) -> set[str]:
    return {item.path.relative_to(run.folder).as_posix() for item in items}


# --- retention


def test_metric_and_best_iteration_are_read_from_the_journal(run):
    assert metric_values(run, "val/accuracy") == {0: 0.0, 2: 0.2, 4: 0.4}
    assert best(run) == {"metric": "val/accuracy", "iteration": 4, "value": 0.4}
    run.change_recipe(run.recipe.model_copy(update={"checkpoint": checkpoint_options(run, mode="min")}))
    assert best(run)["iteration"] == 0
    run.change_recipe(run.recipe.model_copy(update={"checkpoint": checkpoint_options(run, metric="x")}))
    assert best(run) == {"metric": "x", "iteration": None, "value": None}


def checkpoint_options(run: Run, **values):
    return type(run.recipe.checkpoint).model_validate(run.recipe.checkpoint.model_dump() | values)


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({}, [1, 2]),
        ({"keep_last": 2}, [1]),
        ({"keep_best": 1}, [1, 2]),  # the newest is the best
        ({"keep_best": 1, "mode": "min"}, [1]),
        ({"keep_best": 9, "metric": "train/loss"}, []),
        ({"keep_last": 9}, []),
    ],
)
def test_checkpoints_that_the_recipe_lets_go(run, options, dropped):
    changed = checkpoint_options(run, **options)
    run.change_recipe(run.recipe.model_copy(update={"checkpoint": changed}))
    assert old_checkpoints(run) == dropped
    assert old_checkpoints(Run(run.folder)) == dropped  # nothing is remembered in the process


def test_a_metric_that_is_not_a_number_is_never_the_best(run):
    with held(run):
        run.journal.commit(StepRecord(ITERATION, 5, 0.1, metrics={"val/accuracy": math.nan}), {})
    assert old_checkpoints(run) == [1, 2]
    assert best(run)["iteration"] == 4


# --- what can go


def test_clean_offers_what_nothing_needs(run):
    with held(run):
        rewind(run, 4, "recalibrate_kv")
    left = {
        "checkpoints/.00009.1.tmp/learner/a": "left by a process",
        "iterations/00004/.rollouts.parquet.tmp": "left by a process",
        "iterations/00005/rollouts.parquet": "of a step that never ended",
        "weights/v00002/weights.safetensors": "tensors of an older weight version",
    }
    for name in left:
        (run.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (run.folder / name).write_bytes(b"123")
    items = removable(run)
    assert names(items, run) == {
        "set_aside",
        "checkpoints/00001",
        "checkpoints/00002",
        "checkpoints/.00009.1.tmp",
        *list(left)[1:],
    }
    why = {item.path.relative_to(run.folder).as_posix(): item for item in items}
    for name, text in list(left.items())[1:]:
        assert why[name].why.startswith(text)
        assert why[name].size == 3
    assert why["set_aside"].size == size_of(run.folder / "set_aside") > 0
    assert "keep_last" in why["checkpoints/00001"].why


def test_what_goes_is_needed_by_nobody(run):
    with held(run):
        rewind(run, 4, "requantize")
        before = settle(run)
    kept = {name: content for name, content in files_in(run).items() if "set_aside" not in name}
    freed = sum(item.size for item in removable(run))
    size = size_of(run.folder)
    assert remove(run, removable(run)) == freed > 0
    assert size_of(run.folder) == size - freed
    assert removable(run) == []
    with held(run):
        assert settle(run) == before == (Position(4, 4, 4), [])
    assert verify_run(run).faults == []
    after = files_in(run)
    assert {n for n in kept if n not in after} == {
        n for n in kept if n.startswith(("checkpoints/00001", "checkpoints/00002"))
    }


def test_data_of_a_damaged_record_are_not_called_unfinished(run):
    """They may be all that is left of the step."""
    replace_file(run.journal.record_path(3, "rollout"), b"{")
    stray = run.journal.step_folder(3) / "stray.parquet"
    stray.write_bytes(b"x")
    assert not any("00003" in name for name in names(removable(run), run))
    replace_file(run.journal.record_path(3, "rollout"), None)
    assert {"iterations/00003/stray.parquet", "iterations/00003/rollouts.parquet"} <= names(
        removable(run), run
    )


def test_nothing_of_a_living_run_can_go(run):
    items = removable(run)
    assert items
    with held(run):
        assert removable(run) == []
        before = files_in(run)
        with pytest.raises(LockedError, match="is being written"):
            remove(run, items)
        assert files_in(run) == before


def test_what_was_committed_since_it_was_listed_stays(run):
    path = run.journal.step_folder(5) / "rollouts.parquet"
    path.parent.mkdir()
    path.write_bytes(b"data")
    items = removable(run)
    assert path in {item.path for item in items}
    with held(run):
        run.journal.commit(StepRecord("rollout", 5, 0.1), {}, (path,))
    remove(run, items)
    assert path.is_file()
    assert run.journal.fault(5, "rollout") is None


def test_a_full_disk_does_not_keep_from_freeing_it(run, monkeypatch):
    def full(path, content):
        raise files.DiskFullError(28, "no room")

    for name in ("fp8rl.files.write_atomic", "fp8rl.lock.write_atomic", "fp8rl.runs.write_atomic"):
        monkeypatch.setattr(name, full)
    assert remove(run, removable(run)) > 0
    assert checkpoints.listing(run.folder) == [4]


def test_fork_keeps_the_checkpoint_it_began_with(made, tmp_path):
    from fp8rl.fork import fork
    from tests.folders import about

    parent = copy_of(made, tmp_path)
    recipe = parent.recipe.model_copy(update={"iterations": 9})
    child, lock = fork(parent, "child", recipe, about(recipe), at=2)
    lock.release()
    for version in (3, 4):
        shutil.copytree(child.folder / "checkpoints/00002", child.folder / f"checkpoints/{version:05d}")
    assert old_checkpoints(child) == [3]


# --- the commands


def test_clean_shows_and_only_with_yes_deletes(run):
    runs, before = run.folder.parent, files_in(run)
    console = said()
    clean(runs, [], yes=False, console=console)
    text = console.export_text()
    assert "r/checkpoints/00001" in text
    assert "Nothing was deleted: add --yes" in text
    assert files_in(run) == before
    console = said()
    clean(runs, ["r"], yes=True, console=console)
    assert "MB freed" in console.export_text()
    assert checkpoints.listing(run.folder) == [4]
    console = said()
    clean(runs, [], yes=True, console=console)
    assert "nothing to free; 1 runs hold" in console.export_text()
    with pytest.raises(NoRunError):
        clean(runs, ["q"], yes=True, console=console)


def test_clean_leaves_damaged_and_living_runs_and_does_the_others(made, tmp_path):
    for name in "abc":
        copy_of(made, tmp_path).folder.rename(tmp_path / name)
    lost, record = Run(tmp_path / "a"), Run(tmp_path / "b")
    for name in ("run.json", ".run.json.copy"):
        replace_file(lost.folder / name, b"")
    replace_file(record.journal.record_path(2, ITERATION), b"")
    before = files_in(lost), files_in(record)
    console = said()
    clean(tmp_path, [], yes=True, console=console)
    text = console.export_text()
    assert "run a is damaged, and left as it is" in text
    assert "run b is damaged, and left as it is" in text
    assert (files_in(lost), files_in(record)) == before
    assert checkpoints.listing(tmp_path / "c") == [4]


def test_clean_goes_on_where_a_run_was_resumed_meanwhile(made, tmp_path, monkeypatch):
    for name in "ab":
        copy_of(made, tmp_path).folder.rename(tmp_path / name)
    console = said()
    table = console.print
    parent = replace(Owner.this_process(), pid=os.getppid(), pid_started=started(os.getppid()))

    def resumed(*args, **options):
        (tmp_path / "a/lock.json").write_text(json.dumps(asdict(parent)))
        table(*args, **options)

    monkeypatch.setattr(console, "print", resumed)
    clean(tmp_path, [], yes=True, console=console)
    assert f"run 'a' is being written by process {os.getppid()}" in console.export_text()
    assert checkpoints.listing(tmp_path / "a") == [1, 2, 4]
    assert checkpoints.listing(tmp_path / "b") == [4]


def started(pid: int) -> float:
    from fp8rl.lock import process_start

    start = process_start(pid)
    assert start is not None
    return start


def test_verify_says_what_it_looked_at(run):
    console = said()
    assert verify(run, console)
    text = console.export_text()
    assert (
        "run r: whole (checked 32 step records, 3 checkpoints, 2 weight versions with tensors" in text
    )


def test_verify_names_all_faults_and_what_is_none(run):
    broken = run.journal.step_folder(2) / "rewards.parquet"
    replace_file(broken, flipped(broken.read_bytes()))
    replace_file(run.folder / "checkpoints/00001/state.json", None)
    stray = run.journal.step_folder(5) / "rollouts.parquet"
    stray.parent.mkdir()
    stray.write_bytes(b"x")
    before = files_in(run)
    console = said()
    assert not verify(run, console)
    lines = console.export_text().splitlines()
    assert f"damaged: {broken} was changed after step reward of iteration 2 wrote it" in lines
    assert any("checkpoints/00001: state.json is missing" in line for line in lines)
    assert f"unfinished (no fault): {stray} is of a step that never ended" in lines
    assert lines[-1].startswith("run r: 2 faults (checked ")
    assert files_in(run) == before


def test_manifests_are_checked_where_their_tensors_are_long_gone(run):
    path = run.folder / "weights/v00001/manifest.json"
    content = path.read_text()
    assert not (path.parent / "weights.safetensors").exists()
    values = json.loads(content)
    digest = next(entry["sha256"] for entry in values["tensors"] if entry["name"] == "bias")
    for changed in (
        content.replace(digest, "0" * 64),
        content.replace(values["digest"], "0" * 64),
        content.replace('"version": 1', '"version": 2'),
        content.replace('"version"', '"edition"'),
        "[]",
    ):
        replace_file(path, changed.encode())
        (fault,) = verify_run(run).faults
        assert str(path) in fault


def test_verify_of_a_run_that_is_at_work_finds_no_fault(tmp_path):
    stops = [(0, "prepare_data"), (0, "requantize"), (1, "rollout.0001"), (1, "rollout")]
    for number, until in enumerate(stops):
        run = make_run(tmp_path / str(number), until=until, state="running")
        assert verify_run(run).faults == []
        assert verify_run(run).unfinished == []


def test_a_checkpoint_of_a_step_that_is_not_there_is_named(run):
    with held(run):
        for step in (ITERATION, "evaluate", "recalibrate_kv", "requantize", "train"):
            run.journal.record_path(4, step).unlink()
        assert any("train.json is missing" in fault for fault in verify_run(run).faults)
        position, notes = settle(run)
    assert position == Position(4, 3, 2)
    assert notes == [
        f"checkpoint {run.folder}/checkpoints/00004 is of a train step that is not committed; it is "
        "set aside"
    ]
    assert verify_run(run).faults == []
