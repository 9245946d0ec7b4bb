"""Verifiers that hang, crash, eat memory or write where they should not: each gives a counted status,
and the next completion is scored as if nothing had been."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8rl.recipe.schema import Task
from fp8rl.reward.functions import function_sources
from fp8rl.reward.score import score_all
from fp8rl.reward.verdict import Status, Verdict
from fp8rl.reward.verifiers import exact, length, numeric
from fp8rl.reward.workers import Worker, WorkerStartError, shared_worker

ROOT = Path(__file__).parents[2]
HOSTILE = """
import os, signal, subprocess, sys, threading, time

kept = []

class Own(BaseException):
    pass

class Unsayable(Exception):
    def __str__(self):
        raise RuntimeError

def score(question, completion, answer, entry):
    if completion == "fine":
        return 1.0
    if completion == "loop":
        while True:
            pass
    if completion == "loop past its signal":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    if completion == "power":
        return 9**9**9
    if completion == "start and loop":
        child = subprocess.Popen(["sleep", "1000"])
        open(entry["file"], "w").write(str(child.pid))
        while True:
            pass
    if completion == "exit":
        os._exit(1)
    if completion == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "memory":
        held = []
        while True:
            held.append(bytearray(2**26))
    if completion == "fork":
        os.fork()
        return 1.0
    if completion == "print":
        print("x" * 10**6)
        print("x" * 10**6, file=sys.stderr)
        os.write(1, b"x" * 10**6)
        return 1.0
    if completion == "read":
        return float(len(sys.stdin.read()) == 0)
    if completion == "garbage":
        for fd in range(3, 20):
            try:
                os.write(fd, b"\\xff" * 64)
            except OSError:
                pass
        return 1.0
    if completion == "close":
        os.closerange(0, 100)
        return 1.0
    if completion == "alarm":
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        return 1.0
    if completion == "thread":
        threading.Thread(target=time.sleep, args=(1000,)).start()
        return 1.0
    if completion == "exit later":
        threading.Timer(0.05, os._exit, (3,)).start()
        return 1.0
    if completion == "leak":
        kept.append(bytearray(48 * 2**20))
        return 1.0
    if completion == "long error":
        raise ValueError("\\0\\ud800" + "y" * 10**6)
    if completion == "sleep":
        time.sleep(1000)
    raised = {"Exception": Exception, "SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt,
              "GeneratorExit": GeneratorExit, "Own": Own, "RecursionError": RecursionError,
              "StopIteration": StopIteration, "Unsayable": Unsayable}
    if completion in raised:
        raise raised[completion]("why")
    values = {"nan": float("nan"), "inf": float("inf"), "none": None, "list": [1], "text": "much",
              "true": True, "half": 0.5, "int": 2}
    return values[completion]
"""


def made(folder: Path) -> Task:
    (folder / "hostile.py").write_text(HOSTILE)
    return Task(
        rewards=[{"kind": "function", "function": "hostile:score"}],
        reward_path=[str(folder)],
        reward_limits={"timeout_s": 60.0, "memory_mib": 128},
    )


def asked(completion: str, answer: str = "12", **entry) -> dict:
    entry = {"question": "q", "answer": answer, **entry}
    given = {"completion": completion, "text": completion, "question": "q", "answer": answer}
    return {**given, "entry": json.dumps(entry)}


def ask(worker: Worker, given: dict, reward: int = 0, limit_s: float = 60.0) -> Verdict:
    """The verdict, within a limit that only what hangs exceeds, however busy the machine is."""
    worker._timeout_s = limit_s
    return worker.score(reward, given)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    task = made(tmp_path_factory.mktemp("functions"))
    with Worker(task, function_sources(task)) as worker:
        yield worker


@pytest.fixture(scope="module")
def math_and_format():
    """Rewards 0 and 1 of a worker."""
    pattern = r"(<think>)?(a|a)+b"
    task = Task(
        rewards=[{"kind": "math_verify"}, {"kind": "format", "pattern": pattern}],
        reward_limits={"memory_mib": 512},
    )
    with Worker(task, {}) as worker:
        yield worker


@pytest.mark.parametrize(
    ("completion", "status", "detail"),
    [
        ("loop", Status.TIMEOUT, "no verdict after task.reward_limits.timeout_s=0.5"),
        ("loop past its signal", Status.TIMEOUT, ""),
        ("power", Status.TIMEOUT, ""),
        ("sleep", Status.TIMEOUT, ""),
        ("exit", Status.ERROR, "the worker process ended: exit code 1"),
        ("segv", Status.ERROR, "the worker process ended: killed by SIGSEGV"),
        ("memory", Status.ERROR, "MemoryError"),
        ("close", Status.ERROR, "the worker process ended"),
        ("garbage", Status.ERROR, "no verdict"),
        ("Exception", Status.ERROR, "Exception: why"),
        ("SystemExit", Status.ERROR, "SystemExit: why"),
        ("KeyboardInterrupt", Status.ERROR, "KeyboardInterrupt: why"),
        ("GeneratorExit", Status.ERROR, "GeneratorExit: why"),
        ("Own", Status.ERROR, "Own: why"),
        ("StopIteration", Status.ERROR, "StopIteration: why"),
        ("Unsayable", Status.ERROR, "Unsayable"),
        ("long error", Status.ERROR, "ValueError: \\0\\ud800yyy"),
        ("nan", Status.ERROR, "the reward is nan, which is not within 1e+06 of 0"),
        ("inf", Status.ERROR, "the reward is inf"),
        ("none", Status.ERROR, "TypeError"),
        ("list", Status.ERROR, "TypeError"),
        ("text", Status.ERROR, "ValueError"),
        ("no such key", Status.ERROR, "KeyError"),
        ("print", Status.OK, ""),
        ("read", Status.OK, ""),
        ("fork", Status.OK, ""),
        ("thread", Status.OK, ""),
        ("true", Status.OK, ""),
        ("int", Status.OK, ""),
        ("half", Status.WRONG, ""),
    ],
)
def test_whatever_a_function_does_has_a_status_and_the_next_is_scored(
    hostile, completion, status, detail
):
    limit_s = 0.5 if status is Status.TIMEOUT else 60.0
    verdict = ask(hostile, asked(completion), limit_s=limit_s)
    assert verdict.status is status
    assert detail in verdict.detail
    assert len(verdict.detail) < 500
    verdict.detail.encode()
    if status.is_failure:
        assert verdict.reward == 0.0
    assert ask(hostile, asked("fine")) == Verdict(1.0, Status.OK)


def test_an_alarm_left_behind_does_not_reach_the_next(hostile):
    assert ask(hostile, asked("alarm")).status is Status.OK
    assert ask(hostile, asked("sleep"), limit_s=0.6).status is Status.TIMEOUT
    assert ask(hostile, asked("fine")).status is Status.OK


def test_what_came_before_decides_no_verdict(hostile):
    for _ in range(4):  # of which two fit
        assert ask(hostile, asked("leak")) == Verdict(1.0, Status.OK)
    assert ask(hostile, asked("memory")).status is Status.ERROR
    assert ask(hostile, asked("exit later")).status is Status.OK
    hostile._process.wait(30)
    assert ask(hostile, asked("fine")) == Verdict(1.0, Status.OK)


def test_what_a_verifier_started_is_killed_with_it(hostile, tmp_path):
    file = tmp_path / "pid"
    given = asked("start and loop", file=str(file))
    limit_s = 0.5
    while not file.exists() or not file.read_text():  # on a busy machine it may not come to it
        assert ask(hostile, given, limit_s=limit_s).status is Status.TIMEOUT
        limit_s *= 2
    gone_or_dead(int(file.read_text()))


def gone_or_dead(pid: int, limit_s: float = 15.0) -> None:
    deadline = time.monotonic() + limit_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} lives"
        time.sleep(0.05)


@pytest.mark.parametrize("completion", ["fine", "loop"])
def test_a_worker_does_not_outlive_the_process_that_made_it(tmp_path, completion):
    task = made(tmp_path)
    code = """
import json, sys
from fp8rl.recipe.schema import Task
from fp8rl.reward.functions import function_sources
from fp8rl.reward.workers import Worker
task = Task.model_validate_json(sys.argv[1])
worker = Worker(task, function_sources(task))
worker.start()
print(worker._process.pid, flush=True)
# The worker's own alarm follows from timeout_s; this process would wait for longer.
worker._exchange({**json.loads(sys.argv[2]), "id": 1, "reward": 0, "timeout_s": 0.1}, 1000.0)
print("answered", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, task.model_dump_json()]
    parent = subprocess.Popen(
        [*command, json.dumps(asked(completion))],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pid = int(parent.stdout.readline())
        if completion == "fine":
            assert parent.stdout.readline() == "answered\n"
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    gone_or_dead(pid)


def test_threads_share_a_worker(hostile):
    got = []
    hostile._timeout_s = 60.0
    given = [asked(text) for text in ("fine", "half", "exit")] * 5
    threads = [
        threading.Thread(target=lambda g=g: got.append((g["completion"], hostile.score(0, g).status)))
        for g in given
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = {"fine": Status.OK, "half": Status.WRONG, "exit": Status.ERROR}
    assert len(got) == 15
    assert all(status is want[completion] for completion, status in got)


def test_a_worker_is_kept_until_a_function_changes(tmp_path):
    task = made(tmp_path)
    entry = asked("fine")["entry"]
    assert score_all(task, ["fine", "exit", "fine"], [entry] * 3)[2].reward == 1.0
    sources = function_sources(task)
    worker = shared_worker(task, sources)
    assert shared_worker(task, sources) is worker
    pid = worker._process.pid
    assert score_all(task, ["half"], [entry])[0].reward == 0.5
    assert worker._process.pid == pid
    file = tmp_path / "hostile.py"
    stat = file.stat()
    file.write_text(HOSTILE.replace('"half": 0.5', '"half": 0.2'))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a stale .pyc is taken for a fresh one
    assert score_all(task, ["half"], [entry])[0].reward == 0.2
    assert worker._process is None
    assert not list(tmp_path.rglob("*.pyc"))
    shared_worker(task, function_sources(task)).close()


def test_a_worker_that_does_not_come_up_says_why(tmp_path, monkeypatch):
    task = made(tmp_path)
    worker = Worker(task, function_sources(task))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(WorkerStartError, match=r"the worker process of task\.rewards: exit code 1"):
        worker.score(0, asked("fine"))


# --- hostile completions

NESTED = "$" + "\\frac{1}{" * 30 + "2" + "}" * 30 + "$"
COMPLETIONS = {
    "nested fractions": NESTED,
    "nested roots": "\\boxed{" + "\\sqrt{" * 400 + "2" + "}" * 400 + "}",
    "open braces": "\\boxed" + "{" * 100_000,
    "parentheses": "$" + "(" * 5_000 + "1" + ")" * 5_000 + "$",
    "tower": "$9^{9^{9^{9^{9}}}}$",
    "tower in text": "9**9**9**9",
    "factorials": "$" + "10" + "!" * 50 + "$",
    "sum for ever": "$\\sum_{n=1}^{10^{100}} \\frac{1}{n^2}$",
    "many numbers": "1 " * 100_000,
    "a long number": "7" * 1_000_000,
    "dollars": "$" * 100_000,
    "a megabyte": "x+" * 500_000,
    "NULs": "\0" * 1000 + "12",
    "surrogates": "\ud800\udfff 12 \udc80",
    "bytes that were no UTF-8": b"\xff\xfe 12 \xc3\x28".decode(errors="surrogateescape"),
    "code": "__import__('os').system('exit 3')",
    "code in LaTeX": "$\\text{__import__('os')._exit(3)}$",
    "division by zero": "$\\frac{1}{0}$",
    "right to left": "\u202e$12$",
    "nothing": "",
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_hostile_completions_have_a_status(math_and_format, name):
    text = COMPLETIONS[name]
    started = time.monotonic()
    for reward in (0, 1):
        verdict = ask(math_and_format, asked(text), reward, 1.0)
        assert verdict.status in Status
        assert len(verdict.detail) < 500
    assert (
        time.monotonic() - started < 120
    )  # two at their limits and two new processes, on a busy machine
    for verdict in (exact(text, "12"), numeric(text, "12"), length(text, max_chars=10)):
        assert verdict.status in Status
    assert numeric("12", text).status in Status


def test_what_hangs_is_a_timeout_and_the_next_is_right(math_and_format):
    for reward, hangs, right in ((0, NESTED, "$12$"), (1, "a" * 60, "aab")):
        assert ask(math_and_format, asked(hangs), reward, 0.5).status is Status.TIMEOUT
        assert ask(math_and_format, asked(right), reward).status is Status.OK


def test_a_hostile_reference_answer_has_a_status_too(math_and_format):
    given = asked("12", answer=NESTED)
    assert ask(math_and_format, given, limit_s=0.5).status is Status.TIMEOUT
    assert ask(math_and_format, asked("12", answer="")).status is Status.ERROR


PIECES = st.sampled_from(
    [
        *(
            "\\frac",
            "\\sqrt",
            "\\boxed",
            "\\left",
            "\\{",
            "\\(",
            "\\)",
            "\\",
            "{",
            "}",
            "$",
            "^",
            "_",
            "1",
        ),
        *("-", ",", "%", "/", "x", "**", "(", ")", "=", "<", "!", "e", ".", " ", "\0", "\ud800", "\n"),
    ]
)
TEXTS = st.one_of(
    st.text(st.characters(), max_size=200),  # surrogates and NULs among them
    st.lists(PIECES, max_size=40).map("".join),
)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, answer=TEXTS)
def test_fuzz_pure_verifiers(text, answer):
    for verdict in (
        exact(text, answer),
        numeric(text, answer, relative=0.1),
        numeric(text, "1/3", absolute=0.01),
        length(text, max_chars=20, buffer_chars=10),
    ):
        assert verdict.status in Status
        assert -1.0 <= verdict.reward <= 1.0
        verdict.detail.encode()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS, answer=st.one_of(st.just("12"), TEXTS))
def test_fuzz_verifiers_in_a_worker(math_and_format, hostile, text, answer):
    for worker, reward in ((math_and_format, 0), (math_and_format, 1), (hostile, 0)):
        verdict = ask(worker, asked(text, answer), reward, 1.0)
        assert verdict.status in Status
        assert verdict.reward in (0.0, 1.0)
        verdict.detail.encode()
