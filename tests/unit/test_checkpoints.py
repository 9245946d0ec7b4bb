"""Checkpoints of the learner: exact, whole or refused by name, and safe from kills and full disks."""

import errno
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem

from fp8rl import checkpoints, faults, files
from fp8rl.checkpoints import CheckpointError, checkpoint_folder, newest_whole, to_drop, verify
from fp8rl.learner import checkpoint
from fp8rl.learner.batch import make_batch
from fp8rl.learner.checkpoint import CheckpointWriter, capture, load, restore, weights_digest
from fp8rl.learner.learner import Learner
from fp8rl.recipe.precision import Linear
from fp8rl.recipe.schema import TinyModel
from tests.models import recipe_with, write_model

ROOT = Path(__file__).parents[2]
TINY = TinyModel(hidden_size=64, intermediate_size=96, layers=2, heads=2, kv_heads=1, max_positions=64)
FILES = ("learner/.metadata", "learner/__0_0.distcp", "state.json", "manifest.json")
DATA = FILES[:3]


def some_tensors(seed=0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/a.weight": torch.randn(64, 33, generator=generator),
        "model/b": torch.randn(7, generator=generator).bfloat16(),
        "optimiser/a.weight/step": torch.tensor(float(seed)),
    }


def save(
    run: Path, version=1, *, writer=None, asynchronous=False, tensors=None, state=None, run_id="r1"
):
    writer = writer or CheckpointWriter()
    writer.start(
        checkpoint_folder(run, version),
        tensors=some_tensors(version) if tensors is None else tensors,
        state={"version": version} if state is None else state,
        run_id=run_id,
        version=version,
        weights_digest="w" * 64,
        recipe_digest="d" * 64,
        asynchronous=asynchronous,
    )
    return writer


def same(a, b) -> bool:
    """Whether names, dtypes, shapes and bits agree."""
    return a.keys() == b.keys() and weights_digest(a) == weights_digest(b)


def dot_names(run: Path) -> list[str]:
    return sorted(p.name for p in checkpoints.checkpoints_folder(run).iterdir() if p.name[0] == ".")


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    """A run with checkpoints 1 and 2; copied by who changes it."""
    run = tmp_path_factory.mktemp("saved") / "run"
    for version in (1, 2):
        save(run, version)
    return run


@pytest.fixture
def run(two_saved, tmp_path):
    return Path(shutil.copytree(two_saved, tmp_path / "run"))


# --- what is in a checkpoint


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(TINY, tmp_path_factory.mktemp("model"))


def learner_for(model_dir, linear) -> Learner:
    sections = {"precision": {"rollout": linear, "learner": linear}, "learner": {"lr": 1e-3}}
    learner = Learner(model_dir, recipe_with(model={"tiny": TINY.model_dump()}, **sections))
    learner.load(model_dir, 0)
    return learner


def train(learner, iteration):
    generator = torch.Generator().manual_seed(iteration)
    prompts = [torch.randint(4, 90, (3 + r,), generator=generator).tolist() for r in range(4)]
    answers = [torch.randint(4, 90, (5 - r,), generator=generator).tolist() for r in range(4)]
    batch = make_batch(prompts, answers, [[-1.5] * len(a) for a in answers])
    return learner.train(
        batch, torch.linspace(-1, 1, 4), iteration=iteration, version=iteration - 1
    ).metrics


@pytest.mark.parametrize("linear", list(Linear))
def test_a_restored_learner_goes_on_as_the_one_that_was_saved(model_dir, tmp_path, linear):
    one = learner_for(model_dir, linear)
    for iteration in (1, 2):
        train(one, iteration)
    saved = capture(one.model, one.optimiser)
    save(tmp_path, 2, tensors=saved)
    folder = verify(checkpoint_folder(tmp_path, 2), "r1").folder
    metrics = train(one, 3)
    after = capture(one.model, one.optimiser)
    assert not same(after, saved)

    two = learner_for(model_dir, linear)
    two.precision_table()  # FP8 weights of version 0 are cached
    restore(two.model, two.optimiser, load(folder)[0])
    two.version = 2
    assert same(capture(two.model, two.optimiser), saved)
    assert train(two, 3) == metrics
    assert same(capture(two.model, two.optimiser), after)

    restore(one.model, one.optimiser, load(folder)[0])  # back in place, over other state
    one.version = 2
    assert train(one, 3) == metrics
    assert same(capture(one.model, one.optimiser), after)


@pytest.mark.parametrize("linear", list(Linear))
def test_a_learner_before_its_first_step_is_a_state_too(model_dir, tmp_path, linear):
    learner = learner_for(model_dir, linear)
    start = capture(learner.model, learner.optimiser)
    assert {name.split("/")[0] for name in start} == {"model"}
    first = [train(learner, i) for i in (1, 2)]
    save(tmp_path, 0, tensors=start)
    restore(learner.model, learner.optimiser, load(checkpoint_folder(tmp_path, 0))[0])
    learner.version = 0
    assert not learner.optimiser.state
    assert [train(learner, i) for i in (1, 2)] == first


def test_training_on_does_not_change_what_is_being_written(model_dir, tmp_path, monkeypatch):
    trained = threading.Event()
    write = checkpoint._write_tensors

    def after_training(folder, tensors):
        assert trained.wait(60)
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == 19
        write(folder, tensors)

    monkeypatch.setattr(checkpoint, "_write_tensors", after_training)
    learner = learner_for(model_dir, Linear.FP8)
    train(learner, 1)
    captured = capture(learner.model, learner.optimiser)
    wanted, state = {name: t.clone() for name, t in captured.items()}, {"rewards": [1]}
    writer = save(tmp_path, 1, asynchronous=True, tensors=captured, state=state)
    train(learner, 2)
    state["rewards"].append(2)
    assert writer.is_writing
    assert checkpoints.listing(tmp_path) == []
    trained.set()
    written = writer.finish()
    assert not writer.is_writing
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19
    assert written == verify(checkpoint_folder(tmp_path, 1), "r1")
    assert not same(capture(learner.model, learner.optimiser), wanted)
    tensors, loaded_state = load(written.folder)
    assert same(tensors, wanted)
    assert loaded_state == {"rewards": [1]}


class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, 3))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("kept", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("derived", torch.zeros(4), persistent=False)


def odd(steps=1):
    model = Odd()
    optimiser = torch.optim.AdamW([model.w], lr=0.1)
    for _ in range(steps):
        model.w.grad = torch.ones_like(model.w)
        optimiser.step()
    return model, optimiser


def test_trained_parameters_persistent_buffers_and_moments_are_held():
    moments = {f"optimiser/w/{m}" for m in ("exp_avg", "exp_avg_sq", "step")}
    assert capture(*odd()).keys() == {"model/w", "model/kept"} | moments
    model, optimiser = odd()
    optimiser.state[model.w].pop("exp_avg_sq")
    with pytest.raises(CheckpointError, match="optimiser/w: has exp_avg, step, needs"):
        capture(model, optimiser)


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("model/w", None, "model/w: missing"),
        ("optimiser/w/step", None, "optimiser/w/step: missing"),
        ("model/other", torch.ones(1), "model/other: not a tensor of this learner"),
        ("optimiser/w/max", torch.ones(1), "optimiser/w/max: not a tensor of this learner"),
        ("model/w", torch.ones(3, 2), r"model/w: is \(3, 2\) torch.float32, needs \(2, 3\)"),
        ("optimiser/w/exp_avg", torch.ones(2, 3).half(), "exp_avg: is .* torch.float16, needs"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(name, tensor, text):
    tensors = capture(*odd(3)) | ({} if tensor is None else {name: tensor})
    if tensor is None:
        tensors.pop(name)
    for steps in (0, 1):
        model, optimiser = odd(steps)
        before = capture(model, optimiser)
        with pytest.raises(CheckpointError, match=text):
            restore(model, optimiser, tensors)
        assert same(capture(model, optimiser), before)


def draw():
    return (
        [random.random(), random.gauss(0, 1)],
        [np.random.rand(), np.random.normal()],
        torch.rand(3).tolist(),
    )


def test_random_generators_go_on_where_they_were():
    draw()  # leaves Python and NumPy with half of a pair of normal numbers
    states = json.loads(json.dumps(checkpoint.capture_rng()))
    first, second = draw(), draw()
    assert first != second
    checkpoint.restore_rng(states)
    assert draw() == first
    assert draw() == second


def test_weights_digest_sees_names_shapes_dtypes_and_bits():
    tensors = {"a": torch.arange(6.0), "b": torch.ones(3)}
    digest = weights_digest(tensors)
    assert weights_digest(dict(reversed(tensors.items()))) == digest
    flipped = tensors["a"].clone()
    flipped.view(torch.int32)[5] ^= 1
    others = [
        {"a": tensors["a"], "c": tensors["b"]},
        {"a": tensors["b"], "b": tensors["a"]},
        tensors | {"a": tensors["a"].view(2, 3)},
        tensors | {"a": tensors["a"].view(torch.int32)},
        tensors | {"a": flipped},
        tensors | {"c": torch.ones(0)},
    ]
    assert len({digest, *map(weights_digest, others)}) == 7
    assert weights_digest({"a": torch.ones(3, 2).T}) == weights_digest({"a": torch.ones(2, 3)})


# --- damage


def test_manifest_says_what_was_saved(run):
    got = checkpoints.read_manifest(checkpoint_folder(run, 2))
    assert got == verify(checkpoint_folder(run, 2), "r1") == verify(checkpoint_folder(run, 2), None)
    assert (got.version, got.run_id) == (2, "r1")
    assert (got.weights_digest, got.recipe_digest) == ("w" * 64, "d" * 64)
    assert got.bytes == sum((got.folder / name).stat().st_size for name in DATA)
    paths = [path for path in got.folder.rglob("*") if path.is_file()]
    assert {path.relative_to(got.folder).as_posix() for path in paths} == set(FILES)
    assert newest_whole(run, at_most=9, run_id="r1") == (got, [])
    assert newest_whole(run, at_most=1, run_id="r1")[0].version == 1
    assert newest_whole(run, at_most=0, run_id="r1") == (None, [])
    assert newest_whole(run / "none", at_most=9, run_id="r1") == (None, [])


def shorten(path):
    os.truncate(path, path.stat().st_size - 1)


def empty(path):
    os.truncate(path, 0)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def extend(path):
    path.write_bytes(path.read_bytes() + b"\0")


def assert_passed_over(run, version, *texts):
    """Checkpoint `version`, the newest, is refused by an error with `texts`, and 1 is taken."""
    folder = checkpoint_folder(run, version)
    with pytest.raises(CheckpointError) as error:
        verify(folder, "r1")
    for text in (str(folder), "older checkpoint", *texts):
        assert text in str(error.value)
    whole, passed_over = newest_whole(run, at_most=9, run_id="r1")
    assert whole.version == 1
    assert passed_over == [str(error.value)]
    assert "\n" not in passed_over[0]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [shorten, empty, flip, extend, Path.unlink])
def test_damaged_file_is_named_and_the_older_checkpoint_taken(run, name, damage):
    damage(checkpoint_folder(run, 2) / name)
    fault = "is missing" if damage is Path.unlink else "is damaged"
    sized = name in DATA and damage in (shorten, empty, extend)
    assert_passed_over(run, 2, name, fault, "bytes, the manifest says" if sized else "")


def test_every_single_bit_flip_of_a_manifest_is_noticed(run):
    folder = checkpoint_folder(run, 2)
    content = (folder / "manifest.json").read_bytes()
    for bit in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / "manifest.json").write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
            checkpoints.read_manifest(folder)


@pytest.mark.parametrize("name", ["learner/__1_0.distcp", "note.txt", "learner/manifest.json"])
def test_extra_file_is_named(run, name):
    (checkpoint_folder(run, 2) / name).write_bytes(b"x")
    assert_passed_over(run, 2, name, "not in the manifest")


def test_manifest_of_another_run_is_refused_by_its_name(run, tmp_path):
    save(tmp_path / "other", 2, run_id="r2")
    other = checkpoint_folder(tmp_path / "other", 2)
    shutil.copy(other / "manifest.json", checkpoint_folder(run, 2) / "manifest.json")
    assert_passed_over(run, 2, "manifest.json", "of run r2, not of run r1")
    # A whole checkpoint from there is refused too.
    shutil.rmtree(checkpoint_folder(run, 2))
    shutil.copytree(other, checkpoint_folder(run, 2))
    assert verify(checkpoint_folder(run, 2), None).run_id == "r2"
    assert_passed_over(run, 2, "of run r2, not of run r1")


def test_renamed_folder_is_refused(run):
    checkpoint_folder(run, 2).rename(checkpoint_folder(run, 3))
    assert_passed_over(run, 3, "manifest.json", "is of weight version 2")


def test_manifest_of_a_later_format_is_refused(run):
    path = checkpoint_folder(run, 2) / "manifest.json"
    values = json.loads(path.read_bytes()) | {"format": 2}
    del values["digest"]
    path.write_bytes(files.to_sealed(values))
    assert_passed_over(run, 2, "manifest.json", "has format 2")


def test_file_that_cannot_be_read_is_named(run, monkeypatch):
    def file_sha256(path):
        if path == checkpoint_folder(run, 2) / DATA[1]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    real = files.file_sha256
    monkeypatch.setattr(files, "file_sha256", file_sha256)
    assert_passed_over(run, 2, DATA[1], "cannot be read (Input/output error)")


def test_all_damaged_ones_are_told(run):
    for version in (1, 2):
        flip(checkpoint_folder(run, version) / "state.json")
    whole, passed_over = newest_whole(run, at_most=9, run_id="r1")
    assert whole is None
    assert [str(checkpoint_folder(run, v)) in line for v, line in zip((2, 1), passed_over, strict=True)]


def test_load_of_what_is_not_there_is_refused(run):
    for name in DATA:
        folder = Path(shutil.copytree(checkpoint_folder(run, 1), run / name.replace("/", "-")))
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=f"{folder} cannot be read"):
            load(folder)


# --- errors and kills while writing


def plant(monkeypatch, tmp_path, at, do):
    """Plants a fault; a second call plants another one."""
    marker = tmp_path / f"fired-{len(list(tmp_path.glob('fired-*')))}"
    monkeypatch.setenv(faults.VARIABLE, json.dumps([{"at": at, "do": do, "once": str(marker)}]))
    return marker


def assert_nothing_of_3(run):
    assert checkpoints.listing(run) == [1, 2]
    assert dot_names(run) == []
    assert newest_whole(run, at_most=9, run_id="r1")[0].version == 2


def fill_disk(monkeypatch, file: str, room: int):
    """torch.distributed.checkpoint's `file` has `room` bytes; a write beyond raises ENOSPC."""

    class Stream:
        def __init__(self, stream):
            self.stream, self.left = stream, room

        def write(self, data):
            self.left -= memoryview(data).nbytes
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.stream.write(data)

        def __getattr__(self, name):
            return getattr(self.stream, name)

    @contextmanager
    def create_stream(self, path, mode):
        with open(path, mode) as stream:
            yield Stream(stream) if path.name == file else stream

    monkeypatch.setattr(filesystem.FileSystem, "create_stream", create_stream)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("file", "room"), [("__0_0.distcp", 0), ("__0_0.distcp", 1500), (".metadata.tmp", 0)]
)
def test_full_disk_while_tensors_are_written(run, monkeypatch, file, room, asynchronous):
    writer = CheckpointWriter()
    with monkeypatch.context() as patch:
        fill_disk(patch, file, room)
        with pytest.raises(files.DiskFullError, match=r"no room to write .*/checkpoints/00003\."):
            save(run, 3, writer=writer, asynchronous=asynchronous).finish()
    assert_nothing_of_3(run)
    assert writer.finish() is None
    assert save(run, 3, writer=writer).finish().version == 3  # there is room again


def test_file_size_limit_of_the_system_is_a_full_disk_too(run):
    """A real error of the operating system, through torch.save."""
    done = run_saving(
        run,
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))",
    )
    assert "DiskFullError: [Errno 27] no room to write" in done.stderr
    assert_nothing_of_3(run)


@pytest.mark.parametrize("at", ["checkpoint:3:middle", "write:state.json", "write:manifest.json"])
@pytest.mark.parametrize("do", ["disk_full", "raise", "memory"])
def test_error_while_writing_leaves_nothing_half(run, tmp_path, monkeypatch, at, do):
    marker = plant(monkeypatch, tmp_path, at, do)
    kind = {"disk_full": files.DiskFullError, "raise": faults.FaultError, "memory": MemoryError}[do]
    text = "no room to write .*/checkpoints/00003" if do == "disk_full" else at
    with pytest.raises(kind, match=text):
        save(run, 3, asynchronous=True).finish()
    assert marker.exists()
    assert_nothing_of_3(run)


def test_other_errors_are_told_as_they_are(run, monkeypatch):
    def put_in_place(building, folder):
        raise PermissionError(errno.EACCES, "planted")

    monkeypatch.setattr(files, "put_in_place", put_in_place)
    with pytest.raises(PermissionError, match="planted") as error:
        save(run, 3)
    assert error.value.__cause__ is None
    assert_nothing_of_3(run)


def test_a_second_start_waits_for_the_first_and_tells_its_error(run, tmp_path, monkeypatch):
    writer = save(run, 3, asynchronous=True)
    save(run, 4, writer=writer, asynchronous=True)
    assert 3 in checkpoints.listing(run)
    assert writer.finish().version == 4
    assert writer.finish() is None
    plant(monkeypatch, tmp_path, "checkpoint:5:middle", "raise")
    save(run, 5, writer=writer, asynchronous=True)
    with pytest.raises(faults.FaultError):
        save(run, 6, writer=writer)
    assert checkpoints.listing(run) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="not the folder of weight version 7"):
        writer.start(
            checkpoint_folder(run, 8),
            tensors={},
            state={},
            run_id="r1",
            version=7,
            weights_digest="",
            recipe_digest="",
            asynchronous=False,
        )


def run_saving(run: Path, before="", **environment):
    """Saves checkpoint 3 on a thread in a process of its own, and loads it."""
    code = (
        f"{before}\nimport warnings\nfrom pathlib import Path\nimport torch\n"
        "from fp8rl.learner.checkpoint import CheckpointWriter, load\n"
        f"writer, folder = CheckpointWriter(), Path({str(run)!r}) / 'checkpoints/00003'\n"
        "with warnings.catch_warnings():\n"  # what saving silences does not count for loading
        "  writer.start(folder, tensors={'model/a': torch.ones(99, 99)}, state={'x': 1}, run_id='r1',\n"
        "    version=3, weights_digest='w', recipe_digest='d', asynchronous=True)\n"
        "  writer.finish()\n"
        "tensors, state = load(folder)\n"
        "assert torch.equal(tensors['model/a'], torch.ones(99, 99)) and state == {'x': 1}\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        timeout=120,
    )


def test_saving_and_loading_in_a_plain_process_says_nothing(run):
    done = run_saving(run)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert newest_whole(run, at_most=9, run_id="r1")[0].version == 3


@pytest.mark.parametrize("place", ["middle", "before-rename", "written"])
def test_kill_leaves_whole_checkpoints_only(run, tmp_path, place):
    at = f"checkpoint:3:{place}"
    planted = json.dumps([{"at": at, "do": "kill", "once": str(tmp_path / "fired")}])
    done = run_saving(run, **{faults.VARIABLE: planted})
    assert done.returncode == -9, done.stderr
    assert (tmp_path / "fired").exists()
    whole, passed_over = newest_whole(run, at_most=9, run_id="r1")
    assert (whole.version, passed_over) == (3 if place == "written" else 2, [])
    assert len(dot_names(run)) == (place != "written")
    save(run, 4)
    assert dot_names(run) == []


# --- leftovers and retention


def test_leftovers_of_dead_processes_are_removed_and_no_others(run):
    folder = checkpoints.checkpoints_folder(run)
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = [
        f".00003.{ended.pid}.tmp",
        f".00004.{ended.pid}.old",
        ".00002.old",
        f".00006.{os.getpid()}.tmp",
    ]
    stay = [f".00005.{os.getpid()}.tmp", f".00005.{os.getpid()}.old", ".mine.tmp"]
    for name in gone + stay:
        (folder / name / "learner").mkdir(parents=True)
    os.utime(folder / gone[-1], (0, 0))  # older than this process: another one had its number
    assert checkpoints.listing(run) == [1, 2]
    checkpoints.remove_leftovers(run)
    assert dot_names(run) == sorted(stay)
    assert checkpoints.listing(run) == [1, 2]
    checkpoints.remove_leftovers(run / "none")


def test_listing_takes_checkpoint_names_only(run):
    folder = checkpoints.checkpoints_folder(run)
    for name in ("00010", "123456", "3", "000011", "00004x"):
        (folder / name).mkdir()
    (folder / "00005").write_text("a file")
    assert checkpoints.listing(run) == [1, 2, 10, 123456]


def test_kill_while_dropping_leaves_no_half_checkpoint(run, monkeypatch):
    def killed(path, ignore_errors=False):
        if not ignore_errors:
            (path / "manifest.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.drop(run, 1)
    assert checkpoints.listing(run) == [2]
    assert dot_names(run) == [f".00001.{os.getpid()}.old"]
    save(run, 1)
    checkpoints.drop(run, 1)
    checkpoints.drop(run, 1)
    assert (checkpoints.listing(run), dot_names(run)) == ([2], [])


RULES = {"keep_last": 0, "keep_best": 0, "metric": {}, "mode": "max", "keep": set()}
METRIC = {1: 0.9, 2: 0.5, 3: 0.9, 5: math.nan, 9: 2.0}  # 4 has none; 9 has no checkpoint


@pytest.mark.parametrize(
    ("rules", "dropped"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"keep_last": 2}, [1, 2, 3]),
        ({"keep_last": 9}, []),
        ({"keep_best": 1, "metric": METRIC}, [1, 2, 4, 5]),  # of equals the newer
        ({"keep_best": 2, "metric": METRIC}, [2, 4, 5]),
        ({"keep_best": 9, "metric": METRIC}, [4, 5]),
        ({"keep_best": 1, "metric": METRIC, "mode": "min"}, [1, 3, 4, 5]),
        ({"keep_last": 1, "keep_best": 1, "metric": METRIC}, [1, 2, 4]),
        ({"keep_last": 1, "keep": {2, 7}}, [1, 3, 4]),
    ],
)
def test_retention_by_hand(rules, dropped):
    assert to_drop([3, 1, 2, 5, 4], **RULES | rules) == dropped


rules = st.fixed_dictionaries(
    {
        "keep_last": st.integers(0, 4),
        "keep_best": st.integers(0, 4),
        "metric": st.dictionaries(st.integers(0, 15), st.sampled_from([0.0, 0.5, 1.0, math.nan])),
        "mode": st.sampled_from(["max", "min"]),
        "keep": st.sets(st.integers(0, 15), max_size=3),
    }
)
saved = st.sets(st.integers(0, 15)).map(sorted)


@given(saved, rules)
def test_retention_keeps_the_newest_the_best_and_the_asked_for(versions, rules):
    dropped = to_drop(versions, **rules)
    left = [v for v in versions if v not in dropped]
    assert set(dropped) <= set(versions)
    last = versions[max(0, len(versions) - rules["keep_last"]) :]
    assert set(last) <= set(left)
    assert rules["keep"] & set(versions) <= set(left)
    sign = 1 if rules["mode"] == "max" else -1
    value = {v: sign * x for v, x in rules["metric"].items() if v in versions and x == x}
    best = {v for v in left if v in value}
    assert len(best) >= min(rules["keep_best"], len(value))
    if rules["keep_best"]:  # nothing dropped beats what was kept for its metric alone
        for v in best - set(last) - rules["keep"]:
            assert all((value[d], d) < (value[v], v) for d in dropped if d in value)
    assert len(left) <= rules["keep_last"] + rules["keep_best"] + len(rules["keep"])


@given(saved, rules, st.data())
def test_retention_after_a_restart_ends_the_same(versions, rules, data):
    """Killed while it dropped, or applied at every save instead of once: the same are left."""
    dropped = to_drop(versions, **rules)
    done = data.draw(st.sets(st.sampled_from(dropped))) if dropped else set()
    rest = [v for v in versions if v not in done]
    assert to_drop(rest, **rules) == [v for v in dropped if v not in done]
    held: list[int] = []
    for version in versions:
        held.append(version)
        held = [v for v in held if v not in to_drop(held, **rules)]
    assert held == [v for v in versions if v not in dropped]


def test_layout_is_known_without_torch():
    code = "import sys, fp8rl.checkpoints; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
