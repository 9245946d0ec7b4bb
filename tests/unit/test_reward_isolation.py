"""Which scorers run in a worker process when nobody says so: none that a completion could hang."""

import json

import pytest
import reasoning_gym.factory as gym
from typer.testing import CliRunner

from flows.cli import app
from fp8rl.data.tasks import compares_text, make_generator
from fp8rl.recipe.data import Source
from fp8rl.recipe.reward import ExactVerifier, TaskVerifier
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Task
from fp8rl.reward.isolation import places, settled
from fp8rl.reward.score import score_all
from fp8rl.reward.verdict import Status
from tests.arms import TINY

FILE = Source(path="a.jsonl")
OWN, WORKER = "in the step's own process", "in a worker process"


def isolate(**task):
    """What is decided for a task, by name or sources."""
    return settled(Task(**task)).rewards[0].isolate


def test_only_scorers_that_compare_text_stay_in_the_process():
    assert [compares_text(name) for name in ("reverse_digits", "gcd", "syllogism")] == [True] * 3
    # These parse, compute or `eval` what a completion says.
    for name in ("chain_sum", "coin_flip", "countdown", "n_queens", "puzzle24", "composite"):
        assert not compares_text(name)
    assert isolate() is False
    assert isolate(sources=(FILE,)) is False
    assert isolate(sources=(FILE, Source(name="gcd"))) is False
    assert isolate(name="chain_sum") is True
    assert isolate(sources=(FILE, Source(name="gcd"), Source(name="countdown"))) is True
    assert isolate(sources=(FILE,), val={"sources": (Source(name="countdown"),)}) is True
    with pytest.raises(RecipeError, match="no task 'countdwn'; did you mean countdown"):
        isolate(name="countdwn")


@pytest.mark.parametrize("said", [True, False])
def test_a_recipe_can_say_it(said):
    for name in ("reverse_digits", "countdown"):
        assert isolate(name=name, rewards=(TaskVerifier(isolate=said),)) is said


def test_what_was_decided_is_told():
    assert places(Task()) == {"task": f"{OWN} (it only compares text)"}
    rewards = (TaskVerifier(name="own"), ExactVerifier())
    told = places(Task(sources=(FILE, Source(name="countdown")), rewards=rewards))
    assert told == {"own": f"{WORKER} (the scorer of countdown may take any time)", "exact": OWN}
    task = Task(name="countdown", rewards=(TaskVerifier(isolate=False),))
    assert places(task) == {"task": f"{OWN} (isolate=false)"}
    recipe = [str(TINY / "bf16.yaml"), "task.name=countdown", "task.options={}"]
    for command in ("validate", "explain"):
        shown = CliRunner().invoke(app, [command, *recipe])
        assert shown.exit_code == 0, shown.output
        assert f"{WORKER} (the scorer of countdown may take any time)" in shown.output


def test_a_completion_cannot_hang_a_recipe_that_says_nothing():
    """In the process it would: even the logarithm of this number has millions of digits."""
    task = Task(name="countdown", reward_limits={"timeout_s": 3.0})
    entry = json.dumps(make_generator(task, seed=0, size=1)[0])
    texts = ["9**9**9**9", json.loads(entry)["answer"]]
    got = score_all(task, texts, [entry] * 2)
    assert [verdict.status for verdict in got] == [Status.TIMEOUT, Status.OK]


def test_a_worker_says_the_same_of_every_generator():
    """Rewards, statuses and details, whatever the scorers make of text that is none of theirs."""
    entries = {}
    make_generator(Source(name="gcd"), seed=0, size=1)  # registers all
    for name in sorted(gym.DATASETS.keys() - {"composite"}):  # which wants to be told of what
        item = make_generator(Source(name=name), seed=1, size=2)[1]
        entries[name] = {**item, "source": name}
    assert len(entries) > 90
    pairs = [
        (text, json.dumps(entry))
        for entry in entries.values()
        for text in (str(entry["answer"]), f" {entry['answer']}\n", "1/2", "[1, 2]", "A b\n\ud800", "")
    ]
    texts, items = map(list, zip(*pairs, strict=True))
    sources = tuple(Source(name=name) for name in entries)
    here = Task(sources=sources, rewards=(TaskVerifier(isolate=False),))
    want = score_all(here, texts, items)
    assert {v.status for v in want} == {Status.OK, Status.WRONG, Status.UNPARSABLE, Status.ERROR}
    assert score_all(Task(sources=sources), texts, items) == want
