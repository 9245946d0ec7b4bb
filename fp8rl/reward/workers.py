"""Verifiers in a process of their own, which is killed where it takes too long, and may die.

A signal in the same process is no time limit: C code such as a regular expression's or a big integer's
does not heed it. Measured on one core: 0.2 ms for a completion of 1 kB besides what the verifier itself
takes, 1 ms with math-verify, and a second for a new process.
"""

import base64
import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8rl.files import values_digest
from fp8rl.recipe.schema import Task
from fp8rl.reward.functions import FunctionSource
from fp8rl.reward.verdict import Status, Verdict, tidy
from fp8rl.reward.worker_main import HEADER, frame

# For the imports of a library or of the user's module, on a busy machine.
_START_S = 120.0
# No answer of a worker is longer, but one that is not meant for us may be.
_LONGEST_ANSWER = 2**16


class WorkerStartError(RuntimeError):
    """A worker process did not come up: what it said, and what to do."""


class _EndedError(Exception):
    """The worker is gone, or what it sends is no answer."""


class Worker:
    """One worker process for the rewards of a task that need one, started when it is first asked.

    It scores one completion at a time. Who wants several cores makes several workers (the reward step:
    one in each of its Ray tasks). Safe to call from several threads. `close` it, or use `with`: it also
    ends by itself when this process does.
    """

    def __init__(self, task: Task, functions: Mapping[str, FunctionSource]) -> None:
        """task: of `settled`. functions: of `function_sources`."""
        self._start_message = {
            "task": task.model_dump(mode="json"),
            "functions": {name: _as_json(source) for name, source in functions.items()},
            "memory_mib": task.reward_limits.memory_mib,
            "timeout_s": _START_S,
        }
        self._timeout_s = task.reward_limits.timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._asked = 0  # requests so far, which tells whose an answer is
        self._scored = 0  # by the process that runs

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def score(self, reward: int, given: Mapping[str, Any]) -> Verdict:
        """What the verifier in place `reward` of task.rewards says of `given`.

        given: completion, text (what task.extract takes of it), question, answer (strings of any
        content), entry (JSON). Status timeout after task.reward_limits.timeout_s, with the process
        killed; error where it died, whatever of; the next call starts another. Raises WorkerStartError
        where that cannot be had.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()  # of what an earlier verifier left behind
            used = self._process is not None and self._scored > 0
            verdict, out_of_memory = self._ask(reward, given)
            if out_of_memory and used:  # a verdict does not depend on what was scored before it
                verdict, _ = self._ask(reward, given)
            return verdict

    def _ask(self, reward: int, given: Mapping[str, Any]) -> tuple[Verdict, bool]:
        """The verdict, and whether it is that memory ran out."""
        if self._process is None:
            self._start()
        self._asked += 1
        self._scored += 1
        request = {**given, "id": self._asked, "reward": reward, "timeout_s": self._timeout_s}
        try:
            answer = self._exchange(request, self._timeout_s)
            verdict = _verdict(answer, self._asked)
        except TimeoutError:
            self._stop()
            detail = f"no verdict after task.reward_limits.timeout_s={self._timeout_s:g}"
            return Verdict.without_score(Status.TIMEOUT, detail), False
        except _EndedError as error:
            how = self._stop()
            return Verdict.without_score(Status.ERROR, str(error).replace("HOW", how)), False
        except BaseException:  # an interrupt: the answer would come to the next request
            self._stop()
            raise
        out_of_memory = bool(answer.get("out_of_memory"))
        if out_of_memory:
            self._stop()
        return verdict, out_of_memory

    def start(self) -> None:
        """Starts the process now. Raises WorkerStartError."""
        with self._lock:
            if self._process is None:
                self._start()

    def close(self) -> None:
        """Ends the process; a later call starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        folders = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(folders),
            "PYTHONHASHSEED": "0",  # the order of a set can decide what sympy comes to
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        with tempfile.TemporaryFile() as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fp8rl.reward.worker_main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=environment,
                start_new_session=True,  # so that what a verifier starts is killed with it
            )
            try:
                answer = self._exchange(self._start_message, _START_S)
            except (TimeoutError, _EndedError) as error:
                how = self._stop()
                said.seek(0)
                last = said.read()[-2000:].decode(errors="replace")
                why = f"not ready after {_START_S:g} s" if isinstance(error, TimeoutError) else how
                raise WorkerStartError(f"the worker process of task.rewards: {why}. {last}") from None
            except BaseException:
                self._stop()
                raise
        if "failed" in answer:
            self._stop()
            raise WorkerStartError(str(answer["failed"]))
        self._scored = 0

    def _stop(self) -> str:
        """Kills the process and what it started; how it had ended, in words."""
        process, self._process = self._process, None
        if process is None:
            return ""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that is dying says how
            process.wait(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def _exchange(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Sends `request` and returns the answer. Raises TimeoutError, or _EndedError."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        sink, source = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(sink, False)
        os.set_blocking(source, False)
        deadline = time.monotonic() + limit_s
        unsent, got, size = memoryview(frame(request)), bytearray(), math.inf
        with selectors.DefaultSelector() as ready:
            ready.register(source, selectors.EVENT_READ)
            ready.register(sink, selectors.EVENT_WRITE)
            while len(got) < size:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                for key, _ in ready.select(left):
                    try:
                        if key.fd == sink:
                            unsent = unsent[os.write(sink, unsent) :]
                            if not unsent:
                                ready.unregister(sink)
                            continue
                        read = os.read(source, _LONGEST_ANSWER)
                    except BlockingIOError:
                        continue
                    except OSError:
                        raise _EndedError("the worker process ended: HOW") from None
                    if not read:
                        raise _EndedError("the worker process ended: HOW")
                    got += read
                    if size == math.inf and len(got) >= HEADER.size:
                        size = HEADER.size + HEADER.unpack(got[: HEADER.size])[0]
                        if size > _LONGEST_ANSWER:
                            raise _EndedError("what the worker process wrote is no verdict")
        try:
            answer = json.loads(got[HEADER.size : int(size)])
        except ValueError:
            answer = None
        if unsent or len(got) > size or not isinstance(answer, dict):
            raise _EndedError("what the worker process wrote is no verdict")
        return answer


_shared: dict[str, Worker] = {}
_shared_lock = threading.Lock()


def shared_worker(task: Task, functions: Mapping[str, FunctionSource]) -> Worker:
    """The worker of this process for `task`, kept from call to call. Another task or another version of
    a function makes a new one and ends the old one."""
    digests = {name: source.digest for name, source in functions.items()}
    key = values_digest({"task": task.model_dump(mode="json"), "functions": digests})
    with _shared_lock:
        if key not in _shared:
            for worker in _shared.values():
                worker.close()
            _shared.clear()
            _shared[key] = Worker(task, functions)
        return _shared[key]


def _verdict(answer: dict[str, Any], asked: int) -> Verdict:
    try:
        if answer["id"] != asked:
            raise ValueError
        reward = float(answer["reward"])
        if not math.isfinite(reward):
            raise ValueError
        return Verdict(reward, Status(answer["status"]), tidy(str(answer["detail"])))
    except (KeyError, TypeError, ValueError):
        raise _EndedError("what the worker process wrote is no verdict") from None


def _as_json(source: FunctionSource) -> dict[str, str]:
    return {
        "key": source.key,
        "module": source.module,
        "function": source.function,
        "file": str(source.file),
        "folder": str(source.folder),
        "content": base64.b64encode(source.content).decode("ascii"),
    }
