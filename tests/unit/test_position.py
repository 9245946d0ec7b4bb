"""Where a run goes on after steps were lost, and going back to a step."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl import checkpoints, rewind
from fp8rl.journal import ITERATION, JournalError, StepRecord
from fp8rl.lock import LockedError
from fp8rl.position import Position, first_open_iteration, settle, steps_of, uncommitted_files
from fp8rl.report import STEPS
from fp8rl.rewind import RewindError, parse_step
from fp8rl.runs import Run
from fp8rl.verification import verify_run
from tests.folders import copy_of, files_in, flipped, held, make_run, replace_file

LAST = 3
ORDER = (*STEPS, "evaluate", ITERATION)


@pytest.fixture(autouse=True, scope="module")
def quick_disk():
    """Nothing here is about a machine that loses power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Three iterations with checkpoints of 1 and 3, the newest of which needs no replay."""
    runs = tmp_path_factory.mktemp("finished")
    return make_run(runs, until=(LAST, ITERATION), saved=(1, 3), overrides=("iterations=3",))


@pytest.fixture(scope="module")
def in_work(tmp_path_factory):
    """Iteration 3 as it is before its record, and checkpoints of 1 and 2."""
    runs = tmp_path_factory.mktemp("in_work")
    options = {"saved": (1, 2), "overrides": ("iterations=3",), "state": "running"}
    return make_run(runs, until=(LAST, "evaluate"), **options)


def valid_prefix(run: Run, position: Position) -> bool:
    """Whether the journal is one of an earlier time, with all its steps whole."""
    there = set(run.journal.steps())
    open_steps = [s for s in steps_of(LAST, 0) if (LAST, s) in there]
    return (
        open_steps == list(STEPS[: len(open_steps)])
        and all(run.journal.fault(*step) is None for step in there)
        and position.version == max(n for n, s in there if s == "train")
        and position.iteration == first_open_iteration(run.journal, 0)
        and max(checkpoints.listing(run.folder)) <= position.version
    )


def test_position_of_whole_runs(finished, in_work):
    for run, wanted in ((finished, Position(4, 3, 3)), (in_work, Position(3, 3, 2))):
        before = files_in(run)
        with held(run):
            assert settle(run) == (wanted, [])
        assert files_in(run) == before
    assert (Position(4, 3, 3).replay, Position(3, 3, 2).replay, Position(1, 1, None).replay) == (
        0,
        1,
        1,
    )


def test_settle_needs_the_lock(in_work):
    with pytest.raises(LockedError, match="does not hold the run's lock; nobody does"):
        settle(in_work)


OPEN_FILES = [
    *[f"steps/{step}.json" for step in (*STEPS, "evaluate")],
    *("rollouts.parquet", "rewards.parquet", "kv_scales.json", "evaluation.parquet"),
]
FIRST_STEP = {
    "rollouts.parquet": "rollout",
    "rewards.parquet": "reward",
    "kv_scales.json": "recalibrate_kv",
    "evaluation.parquet": "evaluate",
}


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(OPEN_FILES), st.booleans()))
def test_any_damage_to_the_iteration_in_work_leaves_a_valid_prefix(in_work, damage):
    with tempfile.TemporaryDirectory() as folder:
        run = copy_of(in_work, Path(folder))
        inflict(run, damage)
        with held(run):
            position, notes = settle(run)
            assert valid_prefix(run, position)
            # No step before the first damaged one is done again, and none after it is kept.
            steps = [FIRST_STEP.get(name) or Path(name).stem for name in damage]
            first = min(map(ORDER.index, steps), default=len(ORDER))
            kept = {s for n, s in run.journal.steps() if n == LAST}
            # A damaged evaluation is done again by itself.
            assert kept == set(ORDER[: min(first, ORDER.index("evaluate") + 1)])
            assert settle(run) == (position, [])
        assert verify_run(run).faults == []
        assert bool(notes) == shows(damage)


def inflict(run: Run, damage: dict[str, bool]) -> None:
    """Deletes (true) or changes (false) files of the last iteration."""
    for name, delete in damage.items():
        path = run.journal.step_folder(LAST) / name
        replace_file(path, None if delete else flipped(path.read_bytes()))


def shows(damage: dict[str, bool]) -> bool:
    """Whether there was more than last steps that look as if they had never ended."""
    deleted = {name for name, delete in damage.items() if delete and name.startswith("steps/")}
    records = OPEN_FILES[: len(STEPS) + 1]
    left = [name for name in records if name not in deleted]
    without_gaps = left == records[: len(left)]
    orphans = {n for n in damage if f"steps/{FIRST_STEP.get(n)}.json" in deleted}
    return not without_gaps or bool(set(damage) - deleted - orphans)


LAST_RECORDS = [f"steps/{step}.json" for step in (*STEPS, "evaluate", ITERATION)]


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(LAST_RECORDS), st.booleans(), min_size=1))
def test_any_damage_to_the_last_whole_iteration_is_put_right_or_refused(finished, damage):
    with tempfile.TemporaryDirectory() as folder:
        run = copy_of(finished, Path(folder))
        inflict(run, damage)
        before = files_in(run)
        # While the iteration counts as whole, what the next one starts from has to be whole.
        needed = {f"steps/{step}.json" for step in ("train", "requantize", "recalibrate_kv")}
        is_open = f"steps/{ITERATION}.json" in damage
        with held(run):
            if not is_open and needed & set(damage):
                with pytest.raises(JournalError, match=rf"`fp8rl resume r --from-step \w+@{LAST}`"):
                    settle(run)
                assert files_in(run) == before
                return
            position, _ = settle(run)
            assert position.iteration == (LAST if is_open else LAST + 1)
            if is_open:
                assert valid_prefix(run, position)
            assert settle(run) == (position, [])


def test_what_the_user_is_told_to_type_makes_the_run_whole(finished, tmp_path):
    run = copy_of(finished, tmp_path)
    replace_file(run.journal.record_path(2, "requantize"), b"{}")
    replace_file(run.journal.record_path(3, "requantize"), b"{}")
    with held(run):
        with pytest.raises(JournalError, match="the engine loads what it says") as refused:
            settle(run)
        command = str(refused.value).split("--from-step ")[1].split("`")[0]
        assert command == "requantize@3"
        rewind.rewind(run, *parse_step(command, 1))
        with pytest.raises(JournalError, match="--from-step requantize@2`"):
            settle(run)  # the engine would have begun with it
        rewind.rewind(run, 2, "requantize")
        assert settle(run) == (Position(2, 2, 1), [])
    (fault,) = verify_run(run).faults  # published again when the engine asks for it
    assert f"{run.folder / 'weights/v00001/weights.safetensors'} is missing" in fault


def test_a_whole_iteration_that_is_gone_from_the_middle_is_refused(finished, tmp_path):
    run = copy_of(finished, tmp_path)
    for path in list(run.journal.step_folder(2).rglob("*.json")):
        path.unlink()
    with held(run), pytest.raises(JournalError) as refused:
        settle(run)
    assert str(run.journal.record_path(2, "rollout")) in str(refused.value)
    assert "--from-step rollout@2`" in str(refused.value)


def test_an_evaluation_in_an_open_middle_iteration_is_done_again(finished, tmp_path):
    run = copy_of(finished, tmp_path)
    replace_file(run.journal.record_path(2, ITERATION), None)
    replace_file(run.journal.step_folder(2) / "evaluation.parquet", b"")
    with held(run):
        position, notes = settle(run)
    assert position == Position(2, 3, 3)
    assert "evaluation.parquet" in notes[0]
    assert "iteration.json is missing" in notes[1]
    assert not run.journal.is_committed(2, "evaluate")
    assert run.journal.is_committed(2, "recalibrate_kv")


def test_steps_before_an_open_iteration_are_needed_also_in_the_middle(finished, tmp_path):
    run = copy_of(finished, tmp_path)
    replace_file(run.journal.record_path(2, ITERATION), b"")  # its steps are looked at again
    replace_file(run.journal.record_path(1, "requantize"), b"")
    with held(run), pytest.raises(JournalError, match="--from-step requantize@1`"):
        settle(run)


@pytest.mark.parametrize("has_rollout", [False, True])
def test_damaged_chunks_are_set_aside_and_whole_ones_stay(in_work, tmp_path, has_rollout):
    """Also after the rollout that holds them, where nothing may stumble over them."""
    run = copy_of(in_work, tmp_path)
    with held(run):
        if not has_rollout:
            rewind.rewind(run, LAST, "rollout")
        for number in range(3):
            chunk = f"rollout.{number:04d}"
            files = {f"{chunk}.parquet": bytes([number])}
            run.journal.commit(StepRecord(chunk, LAST, 0.1), files)
        replace_file(run.journal.record_path(LAST, "rollout.0000"), b"{")
        replace_file(run.journal.step_folder(LAST) / "rollout.0001.parquet", b"?")
        _, notes = settle(run)
        assert len(notes) == 2
        again = "the rollout holds it" if has_rollout else "it is generated again"
        assert all(note.endswith(again) for note in notes)
        chunks = {step for n, step in run.journal.steps() if n == LAST and "." in step}
        assert chunks == {"rollout.0002"}
        assert settle(run)[1] == []


# --- going back


@pytest.mark.parametrize(
    ("text", "found"),
    [("train@4", (4, "train")), ("train", (7, "train")), ("evaluate@0", (0, "evaluate"))],
)
def test_steps_to_go_back_to_are_read(text, found):
    assert parse_step(text, 7) == found


@pytest.mark.parametrize(
    "text", ["", "trian@4", "train@", "train@-1", "train@x", "prepare_data", "train@4@5"]
)
def test_other_texts_are_refused_with_the_steps_there_are(text):
    with pytest.raises(RewindError, match=r"for example train@4; steps: rollout, reward, train"):
        parse_step(text, 7)


ALL_STEPS = [
    *[(0, step) for step in ("requantize", "recalibrate_kv", "evaluate", ITERATION)],
    *[(n, step) for n in (1, 2, 3) for step in ORDER],
]


@pytest.mark.parametrize(("iteration", "step"), ALL_STEPS)
def test_going_back_sets_aside_all_that_came_after_and_deletes_nothing(
    finished, tmp_path, iteration, step
):
    run = copy_of(finished, tmp_path)
    before, records = files_in(run), list(run.journal.steps())
    at = (iteration, ORDER.index(step))
    with held(run):
        count = rewind.rewind(run, iteration, step)
    gone = {(n, s) for n, s in records if s in ORDER and (n, ORDER.index(s)) >= at}
    assert count == len(gone)
    assert set(run.journal.steps()) == set(records) - gone
    after = files_in(run)
    aside = {tuple(Path(name).parts[1:2]) for name in after if name.startswith("set_aside/")}
    assert len(aside) == 1  # one folder, named by the time
    moved = {
        Path(name).relative_to(*Path(name).parents[-3:-2]).as_posix(): content
        for name, content in after.items()
        if name.startswith("set_aside/")
    }
    kept = {name: content for name, content in after.items() if not name.startswith("set_aside/")}
    assert moved | kept == before
    assert not moved.keys() & kept.keys()
    # Checkpoints and weights stay as far as the step that made them does.
    assert checkpoints.listing(run.folder) == [v for v in (1, 3) if (v, "train") not in gone]
    versions = [int(p.name[1:]) for p in sorted(run.folder.glob("weights/v*"))]
    assert versions == [v for v in range(4) if (v, "requantize") not in gone]
    # Data go with their records: nothing is left that no record names.
    assert uncommitted_files(run) == []
    with held(run):
        settle(run)


def test_going_back_to_what_the_run_does_not_have_is_refused(finished):
    before = files_in(finished)
    with held(finished):
        with pytest.raises(RewindError, match="its last committed step is iteration 3"):
            rewind.rewind(finished, 4, "rollout")
        with pytest.raises(RewindError, match="begins with requantize of iteration 0"):
            rewind.rewind(finished, 0, "train")
    with pytest.raises(LockedError):
        rewind.rewind(finished, 3, "train")
    assert files_in(finished) == before


def test_a_kill_in_the_middle_of_going_back_leaves_a_run_to_go_on_with(finished, tmp_path, monkeypatch):
    rename, left = Path.rename, 0

    def killed(path, target):
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return rename(path, target)

    def is_killed_after(moves: int) -> bool:
        nonlocal left
        left = moves
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", killed)
            try:
                rewind.rewind(run, 2, "train")
            except KeyboardInterrupt:
                return True
        return False

    moves = 0
    while True:
        (tmp_path / str(moves)).mkdir()
        run = copy_of(finished, tmp_path / str(moves))
        before = sorted(files_in(run).values())
        with held(run):
            if not is_killed_after(moves):
                break
            position, _ = settle(run)
            assert settle(run) == (position, [])
            assert max(checkpoints.listing(run.folder)) <= position.version
            assert sorted(files_in(run).values()) == before
            rewind.rewind(run, 2, "reward")  # what is asked for next finds an earlier time
            assert settle(run)[0] == Position(2, 1, 1)
        moves += 1
    assert moves > 10
