"""Training runs that take turns at one machine's devices."""

import os
import signal
import subprocess
import sys

import pytest

from fp8rl.turns import VARIABLE, Turn


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "devices.lock"))


def test_one_at_a_time(file):
    first, second = Turn("one"), Turn("two")
    assert first.is_mine()
    assert not second.is_mine()
    assert second.holder() == f"run one (process {os.getpid()})"
    first.give_up()
    assert second.is_mine()


def test_a_turn_ends_with_its_process(file):
    code = (
        "import time; from fp8rl.turns import Turn; turn = Turn('other'); "
        "print(turn.is_mine(), flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "True\n"
    mine = Turn("mine")
    assert not mine.is_mine()
    assert f"run other (process {other.pid})" == mine.holder()
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert mine.is_mine()


def test_without_a_file_nobody_waits(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    first, second = Turn("one"), Turn("two")
    assert first.is_mine()
    assert second.is_mine()
    first.give_up()
