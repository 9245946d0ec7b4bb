"""Carrying a run on: what may change within it, what needs a fork, and what a fork starts from."""

import json
import os

import pytest
from rich.console import Console

from flows.cli_runs import prepare_resume
from fp8rl import checkpoints, faults, fork
from fp8rl.files import DiskFullError
from fp8rl.journal import ITERATION, JournalError
from fp8rl.learner.checkpoint import load, weights_digest
from fp8rl.lock import LockedError, read_owner
from fp8rl.position import Position, settle
from fp8rl.recipe.rules import RecipeError
from fp8rl.rewind import RewindError
from fp8rl.runs import NoRunError, Run, RunExistsError, State
from fp8rl.verification import verify_run
from tests.folders import about, copy_of, files_in, held, make_run, replace_file, small_recipe

# Not every CPU has what an FP8 KV cache needs.
KV = ("precision.kv_cache=bf16",)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Three of four iterations, stopped; checkpoints of 1 and 3."""
    runs = tmp_path_factory.mktemp("stopped")
    return make_run(runs, "parent", until=(3, ITERATION), saved=(1, 3), overrides=KV)


@pytest.fixture
def run(stopped, tmp_path):
    return copy_of(stopped, tmp_path)


class Said(Console):
    def __init__(self) -> None:
        super().__init__(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115

    def text(self) -> str:
        return self.export_text()


def resume(run: Run, *overrides, from_step=None, fork_as=None, at=None, console=None):
    return prepare_resume(
        run.folder.parent,
        run.name,
        list(overrides),
        from_step=from_step,
        fork_as=fork_as,
        at=at,
        console=console or Said(),
    )


def refuses(run: Run, error: type[Exception], *overrides, **options) -> str:
    """The text of a refusal that changed nothing."""
    before = {p: p.read_bytes() for p in run.folder.parent.rglob("*") if p.is_file()}
    with pytest.raises(error) as refused:
        resume(run, *overrides, **options)
    assert {p: p.read_bytes() for p in run.folder.parent.rglob("*") if p.is_file()} == before
    return str(refused.value)


# --- going on within the run


def test_plain_resume_changes_nothing(run):
    before = files_in(run)
    recipe, name = resume(run)
    assert (recipe, name) == (run.recipe, "parent")
    assert files_in(run) == before
    assert read_owner(run.folder) is None


def test_changes_that_no_number_depends_on_are_taken(run):
    changed = ("iterations=7", "checkpoint.every=1", "retry.budget=3", "stop.after_iteration=5")
    recipe, _ = resume(run, *changed, "tracking.experiment=other", "step_timeout_s=60")
    assert recipe == run.recipe
    assert (run.recipe.iterations, run.recipe.checkpoint.every, run.recipe.retry.budget) == (7, 1, 3)
    assert verify_run(run).faults == []  # recipe.yaml says the same
    with held(run):
        assert settle(run)[0] == Position(4, 3, 3)


def test_changes_of_numbers_are_refused_by_their_keys(run):
    text = refuses(run, RecipeError, "learner.lr=0.5", "seed=3", "iterations=9")
    assert "run 'parent' cannot go on with another value of" in text
    assert "learner.lr: 0.0001 -> 0.5" in text
    assert "seed: 0 -> 3" in text
    assert "iterations" not in text
    assert "`--fork NEW_NAME`" in text


def test_run_stays_what_and_where_it_is(run, tmp_path):
    assert "name: a run stays" in refuses(run, RecipeError, "name=other")
    assert "runs_dir: a run stays" in refuses(run, RecipeError, f"runs_dir={tmp_path / 'x'}")


def test_bad_requests_are_refused(run):
    assert "but 3 of run 'parent' are done" in refuses(run, RecipeError, "iterations=2")
    assert "did you mean 'learner.lr'" in refuses(run, RecipeError, "learner.rl=1")
    assert "one at a time" in refuses(run, RecipeError, fork_as="x", from_step="train")
    assert "--at is for --fork NEW_NAME" in refuses(run, RecipeError, at=1)
    with pytest.raises(NoRunError, match="did you mean parent"):
        resume(Run(run.folder.parent / "parant"))


def test_finished_run_says_how_to_get_more(run):
    with held(run):
        run.end_attempt(1, State("finished"))
    text = refuses(run, RecipeError, "iterations=3")
    assert text == (
        "run 'parent' is finished (3 iterations). For more of them: `fp8rl resume parent iterations=6`"
    )
    assert resume(run, "iterations=6")[0].iterations == 6


def test_run_that_is_being_written_is_left_alone(run):
    with held(run):
        for options in ({}, {"from_step": "train@2"}):
            before = files_in(run)
            with pytest.raises(LockedError, match=f"being written by process {os.getpid()}"):
                resume(run, **options)
            assert files_in(run) == before


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("train@3", Position(3, 2, 1)),
        ("rollout@2", Position(2, 1, 1)),
        ("requantize@0", Position(0, 0, None)),
        ("evaluate@2", Position(2, 2, 1)),
        ("iteration@3", Position(3, 3, 3)),
    ],
)
def test_going_back_to_a_step(run, text, position):
    console = Said()
    resume(run, from_step=text, console=console)
    assert f"from {text.replace('@', ' of iteration ')} on are set aside in" in console.text()
    with held(run):
        assert settle(run) == (position, [])
    assert read_owner(run.folder) is None


def test_step_without_an_iteration_is_of_the_one_in_work(run):
    with held(run):
        (run.journal.record_path(3, ITERATION)).unlink()
    resume(run, from_step="train")
    with held(run):
        assert settle(run)[0] == Position(3, 2, 1)


def test_steps_that_are_not_there_are_refused(run):
    assert "for example train@4" in refuses(run, RewindError, from_step="trian@2")
    assert "has no train of iteration 9" in refuses(run, RewindError, from_step="train@9")
    assert "there is no rollout of iteration 0" in refuses(run, RewindError, from_step="rollout@0")


def test_going_back_with_a_change_of_numbers_is_refused_too(run):
    assert "learner.lr" in refuses(run, RecipeError, "learner.lr=1", from_step="train@2")


# --- a fork


def test_fork_starts_from_the_newest_checkpoint_under_the_new_recipe(run):
    console, before = Said(), files_in(run)
    recipe, name = resume(run, "learner.lr=0.5", "iterations=9", fork_as="child", console=console)
    assert "run child starts from the checkpoint of iteration 3 of run parent" in console.text()
    assert files_in(run) == before
    child = Run(run.folder.parent / "child")
    assert (name, recipe.name, recipe.learner.lr) == ("child", "child", 0.5)
    assert (child.recipe.learner.lr, child.recipe.iterations, child.origin) == (0.5, 9, 3)
    assert child.id != run.id
    assert read_owner(child.folder) is None
    assert child.about["parent"] == {
        "run": "parent",
        "id": run.id,
        "version": 3,
        "weights": run.journal.record(3, "train").output["weights"],
        "guard": {"1": [], "2": [], "3": []},
        "changes": {
            "iterations": ["4", "9"],
            "learner.lr": ["0.0001", "0.5"],
            "name": ["parent", "child"],
        },
    }
    # The checkpoint is the same, but belongs to the child; the journal is its own.
    found = checkpoints.verify(child.folder / "checkpoints/00003", child.id)
    one, other = (load(r.folder / "checkpoints/00003")[0] for r in (run, child))
    assert weights_digest(one) == weights_digest(other)
    assert found.weights_digest == child.about["parent"]["weights"]
    assert list(child.journal.steps()) == []
    assert (child.folder / "model/model.safetensors").read_bytes() == (
        run.folder / "model/model.safetensors"
    ).read_bytes()
    with held(child):
        assert settle(child) == (Position(3, 3, 3), [])


def test_fork_is_whole_by_verify(run):
    resume(run, "iterations=9", fork_as="child")
    assert verify_run(Run(run.folder.parent / "child")).faults == []


def test_fork_at_an_earlier_checkpoint_and_none_other(run):
    resume(run, fork_as="child", at=1)
    assert Run(run.folder.parent / "child").origin == 1
    text = refuses(run, RecipeError, fork_as="other", at=2)
    assert text == "run 'parent' has no whole checkpoint of version 2 (there: 1, 3)."
    replace_file(run.folder / "checkpoints/00003/state.json", b"")
    text = refuses(run, RecipeError, fork_as="other", at=3)
    assert "no whole checkpoint of version 3 (there: 1, 3)" in text
    assert "state.json is damaged" in text
    resume(run, fork_as="older")  # the newest that is whole
    assert Run(run.folder.parent / "older").origin == 1


def test_forks_that_cannot_be_are_refused(run):
    assert "a run named 'parent' exists" in refuses(run, RunExistsError, fork_as="parent")
    assert "cannot name a run" in refuses(run, RecipeError, fork_as="../x")
    text = refuses(run, RecipeError, "model.tiny.layers=2", fork_as="child")
    assert text == "model.tiny.layers: a fork has its parent's model"
    text = refuses(run, RecipeError, "iterations=3", fork_as="child")
    assert "the checkpoint is of iteration 3 already; ask for more" in text
    assert "correction.mode" in refuses(run, RecipeError, "correction.mode=off", fork_as="child")
    for version in (1, 3):
        replace_file(run.folder / f"checkpoints/{version:05d}/manifest.json", b"")
    text = refuses(run, RecipeError, fork_as="child")
    assert "has no whole checkpoint (there: 1, 3)" in text
    assert text.count("manifest.json is damaged") == 2


def test_fork_of_a_fork_and_its_lost_checkpoint(run):
    resume(run, "iterations=9", fork_as="child")
    child = Run(run.folder.parent / "child")
    resume(child, "seed=1", fork_as="grandchild")
    grandchild = Run(run.folder.parent / "grandchild")
    assert (grandchild.origin, grandchild.about["parent"]["run"]) == (3, "child")
    replace_file(grandchild.folder / "checkpoints/00003/state.json", b"")
    before = files_in(grandchild)
    with held(grandchild), pytest.raises(JournalError) as refused:
        settle(grandchild)
    text = str(refused.value)
    assert str(grandchild.folder / "checkpoints/00003") in text
    assert "state.json is damaged" in text
    assert "`fp8rl resume child --fork NEW_NAME --at 3` forks again" in text
    assert files_in(grandchild) == before
    assert "there is no train of iteration 3" in refuses(child, RewindError, from_step="train@3")


@pytest.mark.parametrize("at", ["write:manifest.json", "write:run.json", "write:lock.json"])
def test_full_disk_leaves_no_fork(run, tmp_path, monkeypatch, at):
    planted = [{"at": at, "do": "disk_full", "once": str(tmp_path.parent / f"{tmp_path.name}.fired")}]
    monkeypatch.setenv(faults.VARIABLE, json.dumps(planted))
    recipe = small_recipe(*KV, "iterations=9")
    assert "no room to write" in fork_refused(run, recipe)
    child, lock = fork.fork(run, "child", recipe, about(recipe))
    lock.release()
    assert verify_run(child).faults == []


def test_full_disk_while_the_checkpoint_is_copied(run, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    recipe = small_recipe(*KV, "iterations=9")
    with monkeypatch.context() as patch:
        patch.setattr("os.sendfile", full)  # what copying a file comes down to on Linux
        text = fork_refused(run, recipe)
    assert f"no room to write {run.folder.parent / 'child'}" in text


def fork_refused(run: Run, recipe) -> str:
    before = sorted(path.name for path in run.folder.parent.iterdir())
    with pytest.raises(DiskFullError) as refused:
        fork.fork(run, "child", recipe, about(recipe))
    assert sorted(path.name for path in run.folder.parent.iterdir()) == before
    return str(refused.value)
