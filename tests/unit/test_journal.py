"""The journal, published weights and KV scales: whole or refused, also where the disk is full."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8rl import faults
from fp8rl.files import DiskFullError, copy_atomic, from_sealed, to_sealed, write_atomic
from fp8rl.journal import ITERATION, Journal, JournalError, StepRecord
from fp8rl.lock import LockedError, RunLock
from fp8rl.model.kv_scales import KvScales, KvScalesError, LayerScales
from fp8rl.model.manifest import PublishedWeightsError
from fp8rl.model.published import read_published
from fp8rl.rewind import set_aside
from fp8rl.runs import Run, State
from fp8rl.verification import verify_run
from tests.folders import (
    copy_of,
    files_in,
    held,
    make_run,
    replace_file,
    small_recipe,
    this_attempt,
)
from tests.models import publish as publish_tensors

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("made"), until=(1, ITERATION), saved=(1,))


@pytest.fixture
def run(made, tmp_path):
    """A run with one whole iteration, whose lock this process holds."""
    run = copy_of(made, tmp_path)
    with held(run):
        yield run


@pytest.fixture
def journal(run):
    return run.journal


# --- committing and reading


def test_step_is_committed_with_digests_and_read_back(journal):
    record = StepRecord("rollout", 3, 1.5, inputs={"versions": (2, 3)}, metrics={"m": 0.5})
    committed = journal.commit(record, {"rollouts.parquet": b"data"})
    assert committed.t_ms > 0
    assert committed.run_id == journal.run_id
    assert committed.inputs == {"versions": [2, 3]}  # as it is read back
    assert journal.record(3, "rollout") == journal.whole(3, "rollout") == committed
    assert (
        committed.digest_of("rollouts.parquet")
        == journal.record(3, "rollout").files["iterations/00003/rollouts.parquet"]
    )
    assert journal.read_file(3, "rollout", "rollouts.parquet") == b"data"
    assert journal.fault(3, "rollout") is None
    with pytest.raises(JournalError, match="has no file x"):
        committed.digest_of("x")


def test_time_of_a_commit_is_kept_where_there_is_one(journal):
    assert journal.commit(StepRecord(ITERATION, 2, 0.1, t_ms=7), {}).t_ms == 7


def test_files_that_were_written_before_belong_to_the_step(journal):
    path = journal.folder / "data/x.bin"
    path.write_bytes(b"x")
    record = journal.commit(StepRecord("a", 2, 0.1), {}, (path,))
    assert list(record.files) == ["data/x.bin"]
    path.write_bytes(b"y")
    assert journal.fault(2, "a") == f"{path} was changed after step a of iteration 2 wrote it"
    assert journal.fault(2, "a", record_only=True) is None


def test_uncommitted_changed_or_missing_data_is_refused(journal):
    with pytest.raises(JournalError, match="never ended"):
        journal.record(2, "train")
    journal.commit(StepRecord("rollout", 2, 0.1), {"a": b"data"})
    path = journal.step_folder(2) / "a"
    path.write_bytes(b"date")
    with pytest.raises(JournalError, match="is not what"):
        journal.read_file(2, "rollout", "a")
    with pytest.raises(JournalError, match=f"{path} was changed after step rollout of iteration 2"):
        journal.whole(2, "rollout")
    path.unlink()
    with pytest.raises(JournalError, match="missing or changed"):
        journal.read_file(2, "rollout", "a")
    with pytest.raises(JournalError, match=f"{path} is missing; step rollout of iteration 2 wrote it"):
        journal.whole(2, "rollout")


def test_every_single_bit_of_a_record_counts(journal):
    record = StepRecord("a", 2, 0.25, {}, {"weights": "ab", "n": [1, 2]}, {"m": -0.5}, {"x": None})
    journal.commit(record, {})
    path = journal.record_path(2, "a")
    content, wanted = path.read_bytes(), journal.record(2, "a")
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(JournalError):
            assert StepRecord.from_json(bytes(damaged), path) == wanted
            assert bytes(damaged).lower() == content.lower()  # 1e-05 or 1E-05


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b"null", b'{"digest": "x"}', b"\xff\xfe", b"\x00" * 64]
)
def test_what_is_not_a_record_is_damaged(journal, content):
    replace_file(journal.record_path(1, "train"), content)
    with pytest.raises(JournalError, match=r"train\.json is damaged: it is not a record"):
        journal.record(1, "train")


def test_records_with_other_fields_are_damaged(journal):
    values = from_sealed(journal.record_path(1, "train").read_bytes())
    replace_file(journal.record_path(1, "train"), to_sealed(values | {"colour": "blue"}))
    with pytest.raises(JournalError, match="is damaged"):
        journal.record(1, "train")


def test_record_that_cannot_be_read_is_named(journal):
    path = journal.record_path(1, "train")
    path.unlink()
    path.mkdir()
    with pytest.raises(JournalError, match=r"train\.json is not readable: Is a directory"):
        journal.record(1, "train")


def test_records_moved_from_elsewhere_are_refused(journal, tmp_path_factory):
    moved = journal.record_path(2, "reward")
    moved.parent.mkdir(parents=True)
    shutil.copy(journal.record_path(1, "reward"), moved)
    with pytest.raises(JournalError, match="holds step reward of iteration 1: it was moved here"):
        journal.record(2, "reward")
    other = make_run(tmp_path_factory.mktemp("other"), until=(0, ITERATION))
    replace_file(moved, other.journal.record_path(0, "requantize").read_bytes())
    with pytest.raises(JournalError, match=f"was left by another run .id {other.id}"):
        journal.record(2, "reward")


def test_chunks_are_forgotten_with_their_files_damaged_ones_too(journal):
    for number in (0, 1):
        chunk = f"rollout.{number:04d}"
        journal.commit(StepRecord(chunk, 2, 0.1), {f"{chunk}.parquet": b"x"})
    replace_file(journal.record_path(2, "rollout.0001"), b"{")
    for number in (0, 1):
        journal.forget(2, f"rollout.{number:04d}")
    assert not [step for n, step in journal.steps() if n == 2]
    # What the damaged one wrote is of no step now, and can be cleaned away.
    assert [p.name for p in journal.step_folder(2).glob("*.parquet")] == ["rollout.0001.parquet"]


def test_a_commit_in_place_of_another_replaces_it(journal):
    journal.commit(StepRecord("a", 2, 0.1, output={"x": 1}), {"a": b"1"})
    journal.commit(StepRecord("a", 2, 0.1, output={"x": 2}), {"a": b"2"})
    assert journal.whole(2, "a").output == {"x": 2}


def test_without_the_lock_nothing_is_committed(made, tmp_path):
    run = copy_of(made, tmp_path)
    before = files_in(run)
    with pytest.raises(LockedError):
        run.journal.commit(StepRecord("a", 2, 0.1), {"a": b"x"})
    assert files_in(run) == before


def test_iterations_are_the_records_of_whole_ones(journal):
    assert [record.iteration for record in journal.iterations()] == [0, 1]
    replace_file(journal.record_path(1, ITERATION), b"")
    with pytest.raises(JournalError):
        journal.iterations()


JSON = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = JSON | st.lists(JSON) | st.dictionaries(st.text(), JSON)


@given(st.dictionaries(st.text().filter(lambda key: key != "digest"), NESTED))
def test_sealed_values_come_back(values):
    assert from_sealed(to_sealed(values)) == values


# --- no room


def plant(monkeypatch, folder: Path, at: str) -> None:
    planted = [{"at": at, "do": "disk_full", "once": str(folder / "fired")}]
    monkeypatch.setenv(faults.VARIABLE, json.dumps(planted))


def commit(run: Run) -> None:
    run.journal.commit(StepRecord("rollout", 2, 0.1), {"rollouts.parquet": b"data"})


def take_lock(run: Run) -> None:
    (run.folder / "lock.json").unlink(missing_ok=True)
    RunLock(run.folder)


def publish(run: Run) -> None:
    publish_tensors(run.journal.weights_folder(2), 2, TENSORS)


def copy(run: Run) -> None:
    copy_atomic(run.folder / "data/val.parquet", run.folder / "data/copy.parquet")


def end_attempt(run: Run) -> None:
    run.end_attempt(1, State("failed"))


WRITES = {
    "write:rollouts.parquet": commit,
    "write:rollout.json": commit,
    "write:.run.json.copy": lambda run: run.change_recipe(small_recipe("iterations=9")),
    "write:run.json": lambda run: run.change_recipe(small_recipe("iterations=9")),
    "write:00002.json": lambda run: run.begin_attempt(this_attempt()),
    "write:00001.json": end_attempt,
    "write:lock.json": take_lock,
    "publish:2:tensors": publish,
    "write:manifest.json": publish,
    "write:copy.parquet": copy,
}


@pytest.mark.parametrize("at", WRITES)
def test_full_disk_says_so_and_leaves_what_was_there(run, tmp_path, monkeypatch, at):
    plant(monkeypatch, tmp_path, at)

    def changed():
        paths = (run.journal.weights_folder(2) / "manifest.json", run.folder / "data/copy.parquet")
        there = [path.exists() for path in paths]
        return list(run.journal.steps()), run.recipe, run.attempts(), there

    before = changed()
    with pytest.raises(DiskFullError) as full:
        WRITES[at](run)
    file = "weights.safetensors" if at.startswith("publish") else at.removeprefix("write:")
    assert f"no room to write {run.folder}" in str(full.value)
    assert f"/{file}. What was committed before is intact: free some space" in str(full.value)
    assert "`fp8rl clean` shows what can go" in str(full.value)
    assert changed() == before
    assert verify_run(run).faults == []
    assert not list(run.folder.rglob(".*.tmp"))
    WRITES[at](run)
    assert verify_run(run).faults == []
    assert changed() != before or at == "write:lock.json"


def test_full_disk_at_recipe_yaml_leaves_the_run_and_the_file_is_written_again(
    run, tmp_path, monkeypatch
):
    """run.json, which counts, was written before it."""
    plant(monkeypatch, tmp_path, "write:recipe.yaml")
    with pytest.raises(DiskFullError, match=r"recipe\.yaml"):
        run.change_recipe(small_recipe("iterations=9"))
    assert run.recipe.iterations == 9
    (fault,) = verify_run(run).faults
    assert str(run.recipe_file) in fault
    run.restore_recipe_file()
    assert verify_run(run).faults == []


@pytest.mark.parametrize("call", range(6))
def test_full_disk_at_any_sync_of_a_commit(run, monkeypatch, call):
    """A commit syncs a file, its folder, a record, its folder."""
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == call + 1:
            raise OSError(28, os.strerror(28))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        if call < 4:
            with pytest.raises(DiskFullError, match="no room to write"):
                commit(run)
        else:
            commit(run)
            assert len(calls) == 4
    assert verify_run(run).faults == []
    assert run.journal.is_committed(2, "rollout") == (call >= 3)  # the record is there, and whole
    commit(run)
    assert run.journal.fault(2, "rollout") is None


def test_full_disk_while_the_place_is_taken(tmp_path, monkeypatch):
    """A folder may have to grow for a new name."""
    path = tmp_path / "a"
    write_atomic(path, b"old")

    def full(source, target):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(DiskFullError, match=f"no room to write {path}"):
            write_atomic(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert path.read_bytes() == b"old"


def test_full_disk_while_steps_are_set_aside(run, monkeypatch):
    def full(path, target):
        raise OSError(28, os.strerror(28))

    path = run.journal.record_path(1, ITERATION)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(DiskFullError, match="set_aside"):
            set_aside(run.folder, [path])
    assert path.is_file()
    assert verify_run(run).faults == []


def test_other_errors_are_told_as_they_are(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError) as error:
        write_atomic(tmp_path / "file/x", b"")
    assert error.value.__cause__ is None
    with pytest.raises(FileNotFoundError):
        copy_atomic(tmp_path / "none", tmp_path / "copy")


LIMITED = """
import resource, sys
from pathlib import Path
from fp8rl.files import DiskFullError
from fp8rl.journal import StepRecord
from fp8rl.lock import RunLock
from fp8rl.runs import Run
run = Run(Path(sys.argv[1]))
lock = RunLock(run.folder)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
files = {"rollouts.parquet": bytes(5000)}
try:
    run.journal.commit(StepRecord("rollout", 2, 0.1), files)
except DiskFullError as error:
    print(error)
assert not run.journal.is_committed(2, "rollout")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
run.journal.commit(StepRecord("rollout", 2, 0.1), files)
lock.release()
"""


def test_file_size_limit_of_the_system_is_a_full_disk_too(made, tmp_path):
    run = copy_of(made, tmp_path)
    command = [sys.executable, "-c", LIMITED, str(run.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = run.journal.step_folder(2) / "rollouts.parquet"
    assert f"no room to write {path}. What was committed before is intact" in done.stdout
    assert run.journal.fault(2, "rollout") is None
    assert verify_run(run).faults == []


# --- published weights and KV scales


TENSORS = {
    "a": torch.arange(6.0).view(2, 3).bfloat16(),
    "b": torch.ones(3).to(torch.float8_e4m3fn),
    "b_scale_inv": torch.ones(1),
}


def test_published_weights_read_back(tmp_path):
    manifest = publish_tensors(tmp_path, 4, TENSORS)
    read, tensors = read_published(tmp_path, 4)
    assert read == manifest
    assert all(
        torch.equal(tensors[n].view(torch.uint8), t.view(torch.uint8)) for n, t in TENSORS.items()
    )


def test_digest_is_of_the_tensors(tmp_path):
    first = publish_tensors(tmp_path / "1", 1, TENSORS)
    assert publish_tensors(tmp_path / "2", 2, TENSORS).digest == first.digest
    changed = TENSORS | {"b": torch.zeros(3).to(torch.float8_e4m3fn)}
    assert publish_tensors(tmp_path / "3", 1, changed).digest != first.digest


@pytest.mark.parametrize("fault", ["flip", "truncate", "delete", "manifest", "version", "tensor"])
def test_faulty_published_weights_are_refused(tmp_path, fault):
    publish_tensors(tmp_path, 1, TENSORS)
    file, version = tmp_path / "weights.safetensors", 1
    content = bytearray(file.read_bytes())
    if fault == "flip":
        content[-1] ^= 1
        file.write_bytes(content)
    elif fault == "truncate":
        file.write_bytes(content[:-4])
    elif fault == "delete":
        file.unlink()
    elif fault == "manifest":
        (tmp_path / "manifest.json").unlink()
    elif fault == "version":
        version = 2
    else:
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        del manifest["tensors"][0]
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PublishedWeightsError):
        read_published(tmp_path, version)


def test_old_tensors_go_and_manifests_stay(tmp_path):
    journal = Journal(tmp_path)
    for version in range(4):
        publish_tensors(journal.weights_folder(version), version, TENSORS)
    journal.drop_weights_before(2)
    kept = sorted(p.parent.name for p in journal.folder.glob("weights/*/weights.safetensors"))
    assert kept == ["v00002", "v00003"]
    assert len(list(journal.folder.glob("weights/*/manifest.json"))) == 4


GOOD = LayerScales(0.1, 0.2, 0.3)
GOOD_SCALES = KvScales(1, (GOOD,), 5, "").to_json()


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (KvScales(1, (GOOD,), 5, ""), "1 layers, the model has 2"),
        (KvScales(0, (GOOD, GOOD), 5, ""), "weight version 0"),
        (
            KvScales(1, (GOOD, LayerScales(0.1, 1.0, 0.3)), 5, ""),
            "layer 1: k_scale is 1.0, the default",
        ),
        (KvScales(1, (GOOD, LayerScales(0.1, 0.0, 0.3)), 5, ""), "layer 1: k_scale is 0.0"),
        (KvScales(1, (LayerScales(float("nan"), 1, 1), GOOD), 5, ""), "layer 0: q_scale is nan"),
        (KvScales(1, (LayerScales(0.1, 0.1, float("inf")), GOOD), 5, ""), "layer 0: v_scale is inf"),
        (KvScales(1, (LayerScales(-0.1, 0.1, 0.1), GOOD), 5, ""), "layer 0: q_scale is -0.1"),
        (KvScales(1, (LayerScales(0.1, 1e-50, 0.1), GOOD), 5, ""), "layer 0: k_scale is 1e-50"),
        (KvScales(1, (LayerScales(0.1, 0.1, 1e39), GOOD), 5, ""), r"layer 0: v_scale is 1e\+39"),
    ],
)
def test_unusable_kv_scales_are_refused(scales, message):
    with pytest.raises(KvScalesError, match=message):
        scales.require_usable(layers=2, version=1)


def test_kv_scales_read_back_exactly():
    scales = KvScales(3, (GOOD, LayerScales(1 / 3, 1e-7, 0.7)), 99, "rollouts")
    assert KvScales.from_json(scales.to_json()) == scales


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"layers": 3}', GOOD_SCALES.replace('"q"', '"p"'), GOOD_SCALES[:-9]],
)
def test_what_is_not_kv_scales_is_refused(text):
    assert KvScales.from_json(GOOD_SCALES).layers == (GOOD,)
    with pytest.raises(KvScalesError, match="not KV scales"):
        KvScales.from_json(text)
