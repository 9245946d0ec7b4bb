"""One writer per run, whoever dies, waits or comes back."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from fp8rl import lock
from fp8rl.journal import StepRecord
from fp8rl.lock import LockedError, Owner, RunLock, kept_free, read_owner, require_held
from tests.folders import held, make_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "r"
    path.mkdir()
    return path


def write_owner(folder: Path, **changes) -> Owner:
    owner = replace(Owner.this_process(), **changes)
    (folder / "lock.json").write_text(json.dumps(asdict(owner)))
    return owner


def dead_pid() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def test_held_renewed_and_given_up(folder):
    taken = RunLock(folder, expires_s=0.2)
    first = read_owner(folder)
    assert (first.host, first.pid) == (socket.gethostname(), os.getpid())
    require_held(folder)
    deadline = time.time() + 10
    while read_owner(folder).beat <= first.beat:
        assert time.time() < deadline
        time.sleep(0.02)
    taken.release()
    assert read_owner(folder) is None
    with pytest.raises(LockedError, match=r"nobody does\. Nothing was written"):
        require_held(folder)
    time.sleep(0.15)
    assert read_owner(folder) is None  # no beat comes after it was given up


def test_a_living_owner_is_named(folder):
    taken = RunLock(folder)
    with pytest.raises(LockedError) as refused:
        RunLock(folder)
    assert f"run 'r' is being written by process {os.getpid()} on {socket.gethostname()}" in str(
        refused.value
    )
    assert "Stop that first" in str(refused.value)
    taken.release()
    RunLock(folder).release()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"host": "h"}', "\udcff"], ids=["empty", "cut", *"abcd"]
)
def test_a_lock_that_nobody_wrote_whole_is_free(folder, content):
    (folder / "lock.json").write_bytes(content.encode(errors="surrogateescape"))
    assert read_owner(folder) is None
    RunLock(folder).release()


def test_lock_of_a_dead_process_is_free_whatever_its_age(folder):
    write_owner(folder, pid=dead_pid(), beat=time.time() + 1e6)
    RunLock(folder).release()


def test_lock_of_a_process_whose_number_is_used_again_is_free(folder):
    now = lock.process_start(os.getpid())
    write_owner(folder, pid_started=now - 5)
    assert not read_owner(folder).is_alive()
    with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        require_held(folder)  # it is not this process that holds it
    RunLock(folder).release()


def test_lock_of_this_host_does_not_expire_while_its_process_lives(folder):
    write_owner(folder, beat=0.0)
    with pytest.raises(LockedError, match="is being written"):
        RunLock(folder)


def test_lock_of_another_host_ends_when_its_beat_does(folder, monkeypatch):
    owner = write_owner(folder)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(LockedError, match=f"by process {os.getpid()} on {owner.host}"):
        RunLock(folder)
    write_owner(folder, host=owner.host, beat=time.time() - lock.EXPIRES_S + 5)
    with pytest.raises(LockedError):
        RunLock(folder)
    write_owner(folder, host=owner.host, beat=time.time() - lock.EXPIRES_S - 1)
    taken = RunLock(folder)
    assert read_owner(folder).host == "elsewhere"
    taken.release()


def test_setting_the_clock_neither_frees_a_lock_nor_loses_it(folder, monkeypatch):
    """Linux tells when a process started by the clock: the start of the machine is told to move."""
    taken = RunLock(folder)
    create_time, boot_time = psutil.Process.create_time, psutil.boot_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time() + 3600)
    require_held(folder)
    with pytest.raises(LockedError):
        RunLock(folder)
    taken.release()


def test_owner_that_lost_its_lock_cannot_commit_and_leaves_it_to_the_other(tmp_path):
    run = make_run(tmp_path, until=(0, "prepare_data"))
    with held(run):
        run.journal.commit(StepRecord("a", 1, 0.1), {"a": b"mine"})
        other = write_owner(run.folder, pid=os.getppid())
        with pytest.raises(LockedError, match=f"process {os.getppid()} on .* does"):
            run.journal.commit(StepRecord("b", 1, 0.1), {"b": b"late"})
        with pytest.raises(LockedError):
            run.journal.forget(1, "a")
        assert not (run.journal.step_folder(1) / "b").exists()
        assert (run.journal.step_folder(1) / "a").read_bytes() == b"mine"
    assert read_owner(run.folder) == other  # giving up is not taking from another


def test_the_beat_of_a_lost_lock_stops(folder):
    taken = RunLock(folder, expires_s=0.1)
    other = write_owner(folder, pid=os.getppid())
    time.sleep(0.2)
    assert read_owner(folder) == other
    taken.release()


def test_the_beat_outlives_a_full_disk(folder, monkeypatch):
    taken = RunLock(folder, expires_s=0.1)
    first = read_owner(folder).beat
    with monkeypatch.context() as patch:

        def full(path, content):
            raise OSError(28, "No space left on device")

        patch.setattr(lock, "write_atomic", full)
        time.sleep(0.1)
    deadline = time.time() + 10
    while read_owner(folder).beat <= first + 0.1:
        assert time.time() < deadline
        time.sleep(0.02)
    taken.release()


def test_kept_free_writes_nothing_and_lets_nobody_in(folder):
    with kept_free(folder):
        assert not (folder / "lock.json").exists()
        waiting = start_taking(folder, hold_s=0)
        time.sleep(1)
        assert waiting.poll() is None
    assert waiting.communicate(timeout=60)[0].split()[-1] == "got"
    taken = RunLock(folder)
    with pytest.raises(LockedError), kept_free(folder):
        pass
    taken.release()


TAKE = """
import sys, time
from pathlib import Path
from fp8rl.lock import LockedError, RunLock
folder, go, hold = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
print("ready", flush=True)
while not go.exists():
    time.sleep(0.001)
try:
    RunLock(folder)
    print("got", flush=True)
    time.sleep(hold)
except LockedError as error:
    print(error, flush=True)
"""


def start_taking(folder: Path, hold_s: float, go: Path | None = None) -> subprocess.Popen:
    """A process that takes the lock once `go` is there, and dies holding it."""
    command = [sys.executable, "-c", TAKE, str(folder), str(go or folder), str(hold_s)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_of_processes_that_find_a_stale_lock_exactly_one_gets_it(folder, tmp_path):
    write_owner(folder, pid=dead_pid())
    go = tmp_path / "go"
    racers = [start_taking(folder, 20, go) for _ in range(4)]
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        go.touch()
        said = [racer.stdout.readline() for racer in racers]
        assert said.count("got\n") == 1
        winner = racers[said.index("got\n")]
        assert read_owner(folder).pid == winner.pid
        for text in said:
            assert text == "got\n" or f"is being written by process {winner.pid}" in text
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    RunLock(folder).release()  # the winner is dead
