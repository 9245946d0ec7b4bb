"""Every file of a run folder, damaged in every way: named by `verify`, and put right or refused by
`settle`, never taken as it is. What is to happen follows from what a file is for.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8rl import checkpoints
from fp8rl.identity import IdentityError
from fp8rl.journal import ITERATION, JournalError
from fp8rl.position import PREPARATION, Position, settle, steps_of
from fp8rl.report import STEPS
from fp8rl.runs import Run
from fp8rl.verification import verify_run
from tests.folders import copy_of, files_in, flipped, held, make_run, replace_file

DAMAGES = ("truncated", "flipped", "deleted", "swapped")
# Iteration 4 is in work; checkpoints of 1 and 2, so 3 and 4 are replayed, and from 1 also 2.
OPEN, SAVED = 4, (1, 2)
# Where the run was killed: iteration 4 trained, or with the first chunk of its rollout.
BASES = {"trained": (OPEN, "train"), "sampling": (OPEN, "rollout.0000")}
WHOLE = {"trained": Position(4, 4, 2), "sampling": Position(4, 3, 2)}


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """Nothing here is about a machine that loses power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{base: (a run, another one that got as far)}."""
    runs = tmp_path_factory.mktemp("made")
    return {
        base: (
            make_run(runs / base, until=until, saved=SAVED, state="running"),
            make_run(runs / f"{base}-other", until=until, saved=SAVED, seed=1, state="running"),
        )
        for base, until in BASES.items()
    }


def paths(base: str) -> list[str]:
    """Every file of the run `base`, but the lock's: by the layout, not read from the disk."""
    found = ["run.json", ".run.json.copy", "recipe.yaml", "attempts/00001.json"]
    found += ["data/train.parquet", "data/val.parquet", "model/model.safetensors"]
    last = {"trained": ["rollout", "reward", "train"], "sampling": ["rollout.0000"]}[base]
    for n in range(OPEN + 1):
        steps = last if n == OPEN else [*(STEPS[3:] if n == 0 else STEPS), ITERATION]
        steps += ["evaluate"] * (n in (0, 2)) + list(PREPARATION) * (n == 0)
        for step in steps:
            found.append(f"iterations/{n:05d}/steps/{step}.json")
            if file := FILE_OF.get(step.partition(".")[0]):
                name = f"{step}.parquet" if "." in step else file
                found.append(f"iterations/{n:05d}/{name}")
    newest = 3  # weights of iteration 4 are not published yet
    found += [f"weights/v{n:05d}/manifest.json" for n in range(newest + 1)]
    found += [f"weights/v{n:05d}/weights.safetensors" for n in (newest - 1, newest)]
    for n in SAVED:
        found += [f"checkpoints/{n:05d}/{name}" for name in ("manifest.json", "state.json")]
        found += [f"checkpoints/{n:05d}/learner/{name}" for name in (".metadata", "__0_0.distcp")]
    return found


FILE_OF = {
    "rollout": "rollouts.parquet",
    "reward": "rewards.parquet",
    "recalibrate_kv": "kv_scales.json",
    "evaluate": "evaluation.parquet",
}


def test_the_matrix_has_every_file_of_the_folder(made):
    for base, (run, _) in made.items():
        assert sorted(paths(base)) == sorted(files_in(run))


@dataclass
class Expected:
    """verify: whether it names the file. position: after settling; None where settle refuses, with
    `refusal` in the text. note: whether settle names the file. clean: verify finds nothing then.
    """

    verify: bool = True
    position: Position | None = None
    note: bool = True
    clean: bool = False
    refusal: str = ""
    error: type[Exception] = JournalError


def expected(base: str, path: str, damage: str) -> Expected:
    """What is to happen, from what the file is for."""
    whole = WHOLE[base]
    top, *rest = path.split("/")
    if path in ("run.json", ".run.json.copy"):
        # Two copies: either alone does. Two different runs: nobody knows which one this folder is.
        if damage == "swapped":
            return Expected(error=IdentityError, refusal="rm")
        return Expected(position=whole, clean=True)
    if path == "recipe.yaml":  # for people to read; run.json holds the same
        return Expected(position=whole, clean=True)
    if top == "attempts":
        # Only for people: no step depends on it. It has no run's id, and nothing counts attempts, so
        # one that is gone or of another run cannot be told; one that was changed can.
        return Expected(verify=damage in ("truncated", "flipped"), position=whole, note=False)
    if top in ("data", "model"):  # functions of the recipe: their step is done again
        return Expected(position=whole)
    if top == "weights":
        # Made from the learner: the engine compares them with the record, and they are published
        # again. Tensors of older versions are deleted anyway, so only the newest have to be there.
        old = path.endswith("tensors") and int(rest[0][1:]) < 3
        return Expected(verify=not (old and damage == "deleted"), position=whole, note=False)
    if top == "checkpoints":
        if int(rest[0]) == max(SAVED):  # the older one takes its place
            older = Position(whole.iteration, whole.version, min(SAVED))
            return Expected(position=older, clean=True)
        return Expected(position=whole, note=False)  # not needed, since there is a newer one
    n, step = int(rest[0]), step_of(path)
    is_record = path.endswith(".json") and rest[1] == "steps"
    if step in PREPARATION:
        return Expected(position=whole)
    if step == ITERATION:  # made again from its steps, none of which is done again
        return Expected(position=Position(n, whole.version, whole.checkpoint))
    if n == OPEN:
        is_last = (n, step) == BASES[base]
        if is_record and damage == "deleted" and is_last:
            # As if the step had never ended: that was a whole state of the run, and it is again.
            version = 3 if step == "train" else whole.version
            return Expected(verify=False, position=Position(4, version, 2), note=False)
        if "." in step:  # a chunk is generated again
            return Expected(position=whole, clean=True)
        return Expected(position=Position(4, 3, 2), clean=True)  # from there on it is done again
    if step in ("rollout", "reward", "train") and max(SAVED) < n <= whole.version:
        return Expected(refusal=f"--from-step {step}@{n}")  # training is replayed over it
    # What the engine samples iteration 4 with. Once it has, the record is enough.
    is_for_engine = n == OPEN - 1 and step in ("requantize", "recalibrate_kv")
    if is_for_engine and (is_record or base == "sampling"):
        return Expected(refusal=f"--from-step {step}@{n}")
    return Expected(position=whole, note=False)  # of an old iteration: nothing needs it any more


def step_of(path: str) -> str:
    name = Path(path).name
    if "/steps/" in path:
        return name.removesuffix(".json")
    by_file = {file: step for step, file in FILE_OF.items()}
    return by_file.get(name) or name.removesuffix(".parquet")


def damage_file(run: Run, other: Run, path: str, damage: str) -> None:
    file = run.folder / path
    content = file.read_bytes()
    new = {
        "truncated": content[: len(content) // 2],
        "flipped": flipped(content),
        "deleted": None,
        "swapped": (other.folder / path).read_bytes(),
    }[damage]
    assert new != content
    replace_file(file, new)


def names(texts: list[str], run: Run, path: str) -> bool:
    """Whether one of `texts` names the file: by its path, or by its checkpoint's or weights' folder and
    its name in there.
    """
    file = run.folder / path
    if path.startswith(("checkpoints/", "weights/")):
        folder = run.folder.joinpath(*Path(path).parts[:2])
        return any(str(folder) in t and file.relative_to(folder).as_posix() in t for t in texts)
    return any(str(file) in text for text in texts)


CASES = [
    *[("trained", path, damage) for path in paths("trained") for damage in DAMAGES],
    *[
        ("sampling", path, damage)
        for path in paths("sampling")
        if re.match("iterations/0000[34]", path)
        for damage in DAMAGES
    ],
]


@pytest.mark.parametrize(
    ("base", "path", "damage"), [pytest.param(*case, id="-".join(case)) for case in CASES]
)
def test_no_damage_is_taken_as_it_is(made, tmp_path, base, path, damage):
    run, other = copy_of(made[base][0], tmp_path), made[base][1]
    want = expected(base, path, damage)
    damage_file(run, other, path, damage)
    found = verify_run(run).faults
    assert names(found, run, path) == want.verify, found
    assert want.verify or not found
    before = files_in(run)
    with held(run):
        if want.position is None:
            with pytest.raises(want.error) as refused:
                settle(run)
            assert names([str(refused.value)], run, path)
            assert want.refusal in str(refused.value)
            assert files_in(run) == before
            return
        position, notes = settle(run)
        assert position == want.position
        assert names(notes, run, path) == want.note, notes
        assert want.note or not notes
        assert_supported(run, position)
        after = files_in(run)
        again, later = settle(run)
        assert (again, files_in(run)) == (position, after)
        # What waits for its step to be done again is told until it is; nothing else is.
        assert all("is made again" in note for note in later)
    if want.clean:
        assert verify_run(run).faults == []


def assert_supported(run: Run, position: Position) -> None:
    """The journal holds all that going on from `position` needs, whole, and nothing beyond it."""
    journal, there = run.journal, set(run.journal.steps())
    done = [n for n in range(OPEN + 1) if (n, ITERATION) in there]
    assert position.iteration not in done
    assert set(range(position.iteration)) <= set(done)
    for n in {n for n, _ in there} - set(done):
        steps = [s for s in steps_of(n, 0) if (n, s) in there]
        assert steps == list(steps_of(n, 0))[: len(steps)]
        for step in steps:
            journal.whole(n, step)
    assert position.version == max(n for n, step in there if step == "train")
    for n in range((position.checkpoint or 0) + 1, position.version + 1):
        for step in ("rollout", "reward", "train"):
            journal.whole(n, step)
    if position.checkpoint is not None:
        folder = checkpoints.checkpoint_folder(run.folder, position.checkpoint)
        found = checkpoints.verify(folder, run.id)
        if not journal.fault(position.checkpoint, "train"):  # its own step is not needed any more
            recorded = journal.record(position.checkpoint, "train").output["weights"]
            assert found.weights_digest == recorded
    assert max(checkpoints.listing(run.folder), default=0) <= position.version


def test_both_copies_of_the_identity_gone(made, tmp_path):
    run = copy_of(made["trained"][0], tmp_path)
    for name in ("run.json", ".run.json.copy"):
        replace_file(run.folder / name, b"{}")
    with held(run), pytest.raises(IdentityError, match=r"run\.json and its copy .* \(`cp BACKUP"):
        settle(run)
    faults = verify_run(run).faults
    assert len(faults) == 1
    assert str(run.folder / "run.json") in faults[0]


def test_all_checkpoints_damaged_means_replay_from_the_first_weights(made, tmp_path):
    run = copy_of(made["trained"][0], tmp_path)
    for version in SAVED:
        replace_file(run.folder / f"checkpoints/{version:05d}/state.json", b"{}")
    with held(run):
        position, notes = settle(run)
    assert (position.checkpoint, position.replay, len(notes)) == (None, 4, 2)
    assert verify_run(run).faults == []


def test_a_checkpoint_of_other_weights_than_recorded_is_not_taken(made, tmp_path):
    run = copy_of(made["trained"][0], tmp_path)
    folder = run.folder / "checkpoints/00002"
    manifest = folder / "manifest.json"
    found = checkpoints.read_manifest(folder)
    manifest.unlink()
    checkpoints.write_manifest(
        folder,
        run_id=found.run_id,
        version=2,
        weights_digest="0" * 64,
        recipe_digest=found.recipe_digest,
    )
    assert any("other weights than train recorded" in fault for fault in verify_run(run).faults)
    with held(run):
        position, notes = settle(run)
    assert position.checkpoint == 1
    assert "other weights than train recorded" in notes[0]


def test_a_refusal_changes_nothing_also_where_more_is_damaged(made, tmp_path):
    run = copy_of(made["trained"][0], tmp_path)
    for path in ("iterations/00001/steps/iteration.json", "data/val.parquet", "recipe.yaml"):
        replace_file(run.folder / path, b"?")
    replace_file(run.folder / "checkpoints/00002/state.json", b"?")
    replace_file(run.folder / "iterations/00002/rollouts.parquet", b"?")
    before = files_in(run)
    with held(run), pytest.raises(JournalError, match=r"--from-step rollout@2`"):
        settle(run)
    assert files_in(run) == before
