"""Chunks of a rollout that an earlier attempt left, and what is said of a cache that ran full."""

import pytest

from fp8rl import progress
from fp8rl.journal import StepRecord
from fp8rl.rollout.pressure import Pressure
from tasks.rollout import _committed, _say_where_the_cache_ran_full
from tests.folders import Folder, small_recipe

CHUNK = "rollout.0000"


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path, "r", small_recipe())
    made.advance(until=(1, CHUNK))
    yield made
    made.lock.release()


@pytest.fixture
def notes():
    said = []
    with progress.listening(lambda event: said.append(event.text)):
        yield said


def test_a_whole_chunk_is_taken_with_its_pressure(folder, notes):
    wanted = folder.journal.record(1, CHUNK)
    found = _committed(folder.context, 1, CHUNK, wanted.inputs)
    assert found == wanted
    assert Pressure.from_dict(found.output["pressure"]).steps == 3
    assert notes == []


def test_a_chunk_of_other_inputs_or_without_its_pressure_is_generated_again(folder, notes):
    record = folder.journal.record(1, CHUNK)
    assert _committed(folder.context, 1, CHUNK, record.inputs | {"recipe": "another"}) is None
    assert "from other inputs; it is generated again" in notes[-1]
    older = StepRecord(CHUNK, 1, 0.5, inputs=record.inputs)
    folder.journal.commit(older, {f"{CHUNK}.parquet": b"table"})
    assert _committed(folder.context, 1, CHUNK, record.inputs) is None
    assert "by an older version; it is generated again" in notes[-1]


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_cache_that_ran_full_is_said_once_with_what_helps(folder, notes, kv):
    recipe = small_recipe(f"precision.kv_cache={kv}")
    context = folder.context.model_copy(update={"recipe": recipe})
    _say_where_the_cache_ran_full(context, 2, Pressure(2048, steps=1).metrics())
    assert notes == []
    _say_where_the_cache_ran_full(context, 2, Pressure(2048, preemptions=7, steps=1).metrics())
    (text,) = notes
    assert "iteration 2" in text
    assert "2,048 tokens ran full: 7 times" in text
    assert ("precision.kv_cache=fp8" in text) == (kv == "bf16")
