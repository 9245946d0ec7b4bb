"""The worker process in which a verifier may hang, crash or eat memory: reads a completion, answers
with a verdict. Started by workers.py, whose protocol this is the other end of.

Input and output are JSON in frames, a length and then as many bytes: JSON escapes whatever text holds,
and reading it runs no code, which unpickling what a verifier wrote would.
"""

import base64
import json
import os
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from fp8rl.recipe.reward import FormatVerifier, FunctionVerifier, MathVerifier
from fp8rl.recipe.schema import Task
from fp8rl.reward.functions import FunctionSource, load_function
from fp8rl.reward.verdict import Verdict, tidy
from fp8rl.reward.verifiers import as_reward, matches_format, math_verify

HEADER = struct.Struct("<Q")
# Seconds beyond its time limit after which a worker whose parent died ends by itself.
_ALONE_S = 5.0

# The verifier of one reward: a request's fields -> Verdict.
_Scorer = Callable[[dict[str, Any]], Verdict]


def frame(values: dict[str, Any]) -> bytes:
    """`values` as both ends send them."""
    content = json.dumps(values).encode("ascii")
    return HEADER.pack(len(content)) + content


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next frame; None where the parent has closed its end or is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    content = stream.read(HEADER.unpack(header)[0])
    return json.loads(content) if content else None


def _scorers(start: dict[str, Any]) -> dict[int, _Scorer]:
    """By place in task.rewards. Raises what a library or the user's module raises on import."""
    task = Task.model_validate(start["task"])
    sources = {name: _source(given) for name, given in start["functions"].items()}
    scorers: dict[int, _Scorer] = {}
    for index, verifier in enumerate(task.rewards):
        if not verifier.isolation:
            continue
        if isinstance(verifier, MathVerifier):
            scorers[index] = _math_scorer()
        elif isinstance(verifier, FormatVerifier):
            scorers[index] = _format_scorer(verifier)
        elif isinstance(verifier, FunctionVerifier):
            scorers[index] = _function_scorer(sources[verifier.function])
        else:
            scorers[index] = _task_scorer(task)
    return scorers


def _source(given: dict[str, str]) -> FunctionSource:
    return FunctionSource(
        key=given["key"],
        module=given["module"],
        function=given["function"],
        file=Path(given["file"]),
        folder=Path(given["folder"]),
        content=base64.b64decode(given["content"]),
    )


def _math_scorer() -> _Scorer:
    import logging

    try:
        import math_verify as library  # here, so that no completion's time pays for it
    except ImportError as error:
        raise ValueError(
            f"task.rewards: kind math_verify needs the package math-verify ({error}). Install it: pip "
            "install math-verify"
        ) from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    library.verify(library.parse("$1$"), library.parse("1"))  # what it loads at its first use
    return lambda given: math_verify(given["text"], given["answer"])


def _format_scorer(verifier: FormatVerifier) -> _Scorer:
    return lambda given: matches_format(given["completion"], verifier.pattern)


def _function_scorer(source: FunctionSource) -> _Scorer:
    try:
        function = load_function(source)
    except ValueError as error:
        raise ValueError(f"{source.key}: {error}") from None

    def score(given: dict[str, Any]) -> Verdict:
        return as_reward(
            function(
                question=given["question"],
                completion=given["completion"],
                answer=given["answer"],
                entry=json.loads(given["entry"]),
            )
        )

    return score


def _task_scorer(task: Task) -> _Scorer:
    from fp8rl.reward.own import OwnScorers

    own = OwnScorers(task)
    return lambda given: as_reward(own.score_answer(given["text"], json.loads(given["entry"])))


def _limit(memory_mib: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _arm_alarm(seconds: float) -> None:
    """SIGALRM ends the process after `seconds`, whatever code it runs; 0: it does not."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    """Answers requests from standard input, one at a time, until it is closed."""
    # What a verifier prints or reads goes nowhere: the pipes are for frames only.
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)

    def answer(values: dict[str, Any]) -> None:
        answers.write(frame(values))
        answers.flush()

    start = _read(requests)
    if start is None:
        return
    _arm_alarm(start["timeout_s"] + _ALONE_S)
    try:
        scorers = _scorers(start)
        _limit(start["memory_mib"])
    except BaseException as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        answer({"failed": tidy(text)})
        return
    _arm_alarm(0)
    os.dup2(nowhere, 2)
    answer({"ready": True})
    own = os.getpid()
    while (request := _read(requests)) is not None:
        _arm_alarm(request["timeout_s"] + _ALONE_S)
        out_of_memory = False
        try:
            verdict = scorers[request["reward"]](request)
        except BaseException as error:  # SystemExit and a library's own time-outs too
            verdict = Verdict.of_failure(error)
            out_of_memory = isinstance(error, MemoryError)  # a new process has all of it again
        if os.getpid() != own:
            os._exit(0)  # a verifier forked, and this is the child
        _arm_alarm(0)
        answer(
            {
                "id": request["id"],
                "reward": verdict.reward,
                "status": verdict.status,
                "detail": verdict.detail,
                "out_of_memory": out_of_memory,
            }
        )
        if out_of_memory:
            break
    os._exit(0)  # threads that a verifier left do not keep it


if __name__ == "__main__":
    main()
