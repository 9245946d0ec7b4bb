"""An engine that was made again is one that scores the probe as recorded. The real engine, killed and
made again, is in tests/pipeline/test_kill.py; here engines are made up, to be odd.
"""

import asyncio
from types import SimpleNamespace

import pytest

from fp8rl.journal import StepRecord
from fp8rl.recipe.schema import Recipe
from fp8rl.sync.probe import scores_digest
from tasks import ensure

RIGHT, ODD = [[-1.0, -2.0]], [[-1.0, -2.0000002]]


class Method:
    def __init__(self, value):
        self.value = value

    def remote(self, *_):
        return self.value


class Journal:
    run_id = "r"

    def __init__(self, probe):
        self.probe = probe

    def record(self, version, step):
        return StepRecord(step, version, 0.1, output={"digest": "d", **self.probe})


class Made:
    """Engines that score as told, one after the other."""

    def __init__(self, monkeypatch, scores, status=None):
        self.scores, self.count, self.notes = scores, 0, []
        self.status = {"version": None, "kv_version": None, "fp8_kv": False} | (status or {})
        for name in ("status_of", "load_published", "wait"):
            monkeypatch.setattr(ensure, name, getattr(self, name))
        monkeypatch.setattr(ensure, "release_actor", lambda context, kind: None)
        monkeypatch.setattr(ensure.progress, "emit", lambda event: self.notes.append(event.text))

    async def status_of(self, context, kind):
        actor = SimpleNamespace(number=self.count, score_probe=Method(self.scores[self.count]))
        self.count += 1
        return actor, dict(self.status)

    async def load_published(self, *_):
        pass

    async def wait(self, value):
        return value


def engine(monkeypatch, scores, *, probe=True, status=None, scales=True):
    made = Made(monkeypatch, scores, status)
    recorded = {"probe": {"digest": scores_digest(RIGHT), "tokens": 2}} if probe else {}
    context = SimpleNamespace(journal=Journal(recorded), recipe=Recipe(), origin=0)
    actor = asyncio.run(ensure.ensure_engine(context, 3, scales=scales))
    assert actor.number == made.count - 1
    return made


def test_an_engine_that_scores_as_recorded_is_taken(monkeypatch):
    made = engine(monkeypatch, [RIGHT])
    assert (made.count, made.notes) == (1, [])


@pytest.mark.parametrize("odd", [1, 2])
def test_an_odd_engine_is_made_again(monkeypatch, odd):
    made = engine(monkeypatch, [ODD] * odd + [RIGHT])
    assert made.count == odd + 1
    assert len(made.notes) == odd
    assert all("made again" in note for note in made.notes)


def test_after_some_tries_it_is_said_and_goes_on(monkeypatch):
    made = engine(monkeypatch, [ODD] * 9)
    assert made.count == ensure.REMADE + 1
    assert "samples may differ in their last bits" in made.notes[-1]


def test_nothing_is_asked_of_one_that_was_given_nothing_or_is_not_whole(monkeypatch):
    assert engine(monkeypatch, [ODD], status={"version": 3, "kv_version": 3}).count == 1
    assert engine(monkeypatch, [ODD], scales=False).count == 1
    assert engine(monkeypatch, [ODD], probe=False).count == 1


def test_scores_of_other_tokens_than_recorded_are_not_compared(monkeypatch):
    """sync.probe_prompts may be changed when a run is resumed."""
    assert engine(monkeypatch, [[[-1.0, -2.0], [-3.0]]]).count == 1
