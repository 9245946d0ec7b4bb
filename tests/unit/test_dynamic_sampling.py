"""Dynamic sampling: what it keeps, when it draws again, and the loop over an engine that is made up."""

import asyncio
import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
from rich.console import Console

from flows.cli_runs import prepare_resume
from fp8rl import progress
from fp8rl.data.cursor import draws_allowed, first_batch
from fp8rl.data.tasks import prompts_of_batch
from fp8rl.journal import ITERATION, JournalError, StepRecord
from fp8rl.learner.batch import split_evenly
from fp8rl.position import settle
from fp8rl.recipe.schema import Recipe
from fp8rl.rollout.dynamic_sampling import (
    Draw,
    choose_groups,
    informative_groups,
    next_draw,
    select,
)
from fp8rl.rollout.pressure import Pressure
from fp8rl.runs import Run
from fp8rl.tables import from_parquet, to_parquet
from tasks import rollout
from tasks.prepare import forked_from
from tests.folders import DRAWS, Folder, held, make_run, replace_file, small_recipe

# --- decisions


def test_groups_with_a_difference_are_informative_in_order_of_appearance():
    rewards = [1.0, 0.0, 1.0, 0.5, 1.0, 0.5, 0.0, 0.0, 0.0, 0.1]
    groups = [3, 8, 3, 5, 8, 5, 1, 1, 2, 2]
    assert informative_groups(rewards, groups) == [8, 2]
    assert informative_groups(rewards[::-1], groups[::-1]) == [2, 8]
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="prompt 7 is NaN or Inf"):
            informative_groups([1.0, bad], [7, 7])


def test_chosen_groups_are_the_first_informative_ones_that_appear():
    rewards = [0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    groups = [9, 9, 4, 4, 2, 2, 7, 7]
    chosen = [g for g, kept in zip(groups, choose_groups(rewards, groups, 2), strict=True) if kept]
    assert chosen == [9, 9, 2, 2]  # by id they would be 2 and 7
    assert sum(choose_groups(rewards, groups, 9)) == 6
    assert not any(choose_groups([0.0] * 8, groups, 2))


def test_the_budget_ends_dynamic_sampling():
    assert next_draw(8, wanted=8, drawn=1, budget=3) is Draw.ENOUGH
    assert next_draw(7, wanted=8, drawn=2, budget=3) is Draw.AGAIN
    assert next_draw(7, wanted=8, drawn=3, budget=3) is Draw.GIVE_UP
    assert next_draw(9, wanted=8, drawn=3, budget=3) is Draw.ENOUGH


def test_a_selection_says_of_all_that_was_drawn_what_is_kept():
    found = select([[5, 5, 1, 1], [3, 3, 0, 0]], [[0.0, 1.0, 1.0, 1.0], [0.5, 0.0, 0.0, 1.0]], 2)
    assert found.kept == [True, True, False, False, True, True, False, False]
    assert found.table == {
        "draw": [0, 0, 1, 1],
        "prompt_id": [5, 1, 3, 0],
        "rewards": [[0.0, 1.0], [1.0, 1.0], [0.5, 0.0], [0.0, 1.0]],
        "informative": [True, False, True, True],
        "kept": [True, False, True, False],
    }
    assert found.metrics == {
        "rollout/draws": 2,
        "rollout/groups_drawn": 4,
        "rollout/groups_informative": 0.75,
        "rollout/groups_kept": 2,
        "rollout/reward_mean_drawn": 4.5 / 8,
    }


def test_without_any_informative_group_the_first_draw_is_kept_whole():
    found = select([[5, 5], [3, 3]], [[1.0, 1.0], [0.0, 0.0]], 1)
    assert found.kept == [True, True, False, False]
    assert found.table["kept"] == [True, False]
    assert found.metrics["rollout/groups_kept"] == found.metrics["rollout/groups_informative"] == 0


def test_a_prompt_that_is_drawn_twice_is_refused():
    with pytest.raises(ValueError, match="drawn twice"):
        select([[5, 5, 3, 3], [3, 3]], [[0.0] * 4, [0.0] * 2], 1)


@pytest.mark.parametrize(("count", "parts"), [(8, 1), (8, 2), (8, 8), (24, 3)])
def test_rows_that_divide_are_split_as_ever(count, parts):
    size = count // parts
    assert split_evenly(count, parts) == [slice(i * size, (i + 1) * size) for i in range(parts)]


@pytest.mark.parametrize(("count", "parts"), [(10, 4), (7, 3), (1, 1), (2, 5), (9, 8)])
def test_rows_that_do_not_divide_are_all_in_one_split(count, parts):
    found = split_evenly(count, parts)
    rows = [row for part in found for row in range(part.start, part.stop)]
    sizes = {part.stop - part.start for part in found}
    assert rows == list(range(count))
    assert len(found) == min(count, parts)
    assert max(sizes) - min(sizes) <= 1


# --- the cursor

SIZES = ("rollout.prompts=4", "rollout.samples=2", "rollout.chunk_size=4", "task.train_prompts=22")
DYNAMIC = (*SIZES, "rollout.max_draws=3")
PER_EPOCH = 5


def test_an_iteration_ends_with_the_epoch():
    recipe = small_recipe(*DYNAMIC)
    allowed = [draws_allowed(recipe, first, 22) for first in range(2 * PER_EPOCH)]
    assert allowed == [3, 3, 3, 2, 1] * 2
    assert draws_allowed(Recipe(), 127, 4096) == draws_allowed(Recipe(), 0, 4096) == 1


def test_without_dynamic_sampling_the_cursor_is_the_iteration_and_no_input(tmp_path):
    run = make_run(tmp_path, until=(2, ITERATION), overrides=SIZES)
    folder = SimpleNamespace(recipe=run.recipe, journal=run.journal, origin=0)
    assert [first_batch(folder, n) for n in (1, 2, 3)] == [0, 1, 2]
    record = run.journal.record(2, "rollout")
    assert record.inputs.keys() == {"recipe", "weight_version", "weights", "kv_scales", "prompts"}
    assert "next_batch" not in record.output


def test_what_says_where_the_prompts_go_on_is_needed(tmp_path):
    """A rollout of a whole iteration, whose training is in a checkpoint."""
    for name, overrides in (("plain", SIZES), ("dynamic", DYNAMIC)):
        run = make_run(tmp_path, name, until=(1, ITERATION), saved=(1,), overrides=overrides)
        replace_file(run.journal.record_path(1, "rollout"), b"")
        with held(run):
            if name == "plain":
                assert settle(run)[0].iteration == 2
                continue
            with pytest.raises(JournalError, match="--from-step rollout@1`"):
                settle(run)


def child_of(parent: Run, *overrides: str):
    """The context of a fork of `parent`, once its first step has said what it starts from."""
    prepare_resume(
        parent.folder.parent,
        parent.name,
        ["iterations=9", *overrides],
        from_step=None,
        fork_as="child",
        at=None,
        console=Console(quiet=True),
    )
    child = Run(parent.folder.parent / "child")
    context = SimpleNamespace(
        recipe=child.recipe, journal=child.journal, origin=child.origin, folder=child.folder
    )
    with held(child):
        record = StepRecord("warm_start", child.origin, 0.1, output=forked_from(context))
        child.journal.commit(record, {})
    return context


@pytest.mark.parametrize("draws", [1, 2])
def test_a_fork_goes_on_where_its_parent_ended(tmp_path, draws):
    overrides = (*DYNAMIC, "precision.kv_cache=bf16")
    parent = make_run(tmp_path, "parent", until=(2, ITERATION), saved=(2,), overrides=overrides)
    child = child_of(parent, f"rollout.max_draws={draws}")
    assert first_batch(child, 3) == 2 * DRAWS
    assert rollout.cursor_inputs(child, 3) == {"first_batch": 2 * DRAWS}
    if draws == 1:
        assert first_batch(child, 5) == 2 * DRAWS + 2
    else:
        with pytest.raises(JournalError, match=r"rollout\.json is missing"):
            first_batch(child, 4)


def test_a_fork_of_a_run_that_drew_once_has_the_prompts_it_always_had(tmp_path):
    overrides = (*SIZES, "precision.kv_cache=bf16")
    parent = make_run(tmp_path, "parent", until=(2, ITERATION), saved=(2,), overrides=overrides)
    child = child_of(parent)
    assert [first_batch(child, n) for n in (3, 4, 7)] == [2, 3, 6]
    assert rollout.cursor_inputs(child, 3) == {}
    # Nor does a checkpoint, or a fork's first record, of an older version say where to go on.
    record = child.journal.record(2, "warm_start")
    values = {k: v for k, v in record.output.items() if k != "next_batch"}
    with held(Run(child.folder)):
        child.journal.commit(StepRecord("warm_start", 2, 0.1, output=values), {})
    assert first_batch(child, 3) == 2
    state = child.folder / "checkpoints/00002/state.json"
    older = {k: v for k, v in json.loads(state.read_bytes()).items() if k != "next_batch"}
    replace_file(state, json.dumps(older).encode())
    assert forked_from(child)["next_batch"] == 2


# --- the loop

KV = ("elements", "k_saturated", "v_saturated", "k_underflow", "v_underflow")


class Died(RuntimeError):
    pass


class Engine:
    """Samples each prompt twice; the rewards of `useful` prompts differ. It dies at the calls `deaths`,
    counted from 0 over its life."""

    def __init__(self, recipe, useful=(), deaths=()):
        self.recipe, self.useful, self.deaths = recipe, set(useful), set(deaths)
        self.calls: list[tuple[int, int, int]] = []  # iteration, batch, chunk
        self.asked = 0
        self.rollout = SimpleNamespace(remote=self._rollout)

    def ids(self, batch):
        sizes = self.recipe.rollout
        return prompts_of_batch(self.recipe.task.train_prompts, sizes.prompts, batch, self.recipe.seed)

    def _rollout(self, iteration, version, batch, chunk):
        self.asked += 1
        if self.asked - 1 in self.deaths:
            raise Died
        assert version == iteration - 1
        self.calls.append((iteration, batch, chunk))
        rows = [(i, n) for i in self.ids(batch) for n in range(2)]
        start = chunk % 2 * 4
        rows = rows[start : start + 4]
        table = {
            "prompt_id": [i for i, _ in rows],
            "sample": [n for _, n in rows],
            "tokens": [[i] * (n + 1) for i, n in rows],
            "logprobs": [[-0.5] * (n + 1) for _, n in rows],
            "finish_reason": ["stop"] * len(rows),
            "text": [str(n if i in self.useful else 1) for i, n in rows],
            "entry": [""] * len(rows),
        }
        counted = {"pressure": Pressure(2048, steps=3).to_dict(), "kv": {name: [10] for name in KV}}
        return to_parquet(table), 0.5, counted


@pytest.fixture
def notes():
    said = []
    with progress.listening(lambda event: said.append(event.text)):
        yield said


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes (folder, engine) of a run that has its first weights, and an engine behind its rollouts."""
    folders = []

    def make(*overrides, name="r", **options):
        folder = Folder(tmp_path, name, small_recipe(*SIZES, *overrides))
        folder.advance(until=(0, ITERATION))
        folders.append(folder)
        engine = Engine(folder.recipe, **options)

        async def ensure_engine(context, version):
            return engine

        monkeypatch.setattr(rollout, "ensure_engine", ensure_engine)
        return folder, engine

    async def wait(value):
        return value

    async def score(task, texts, entries):
        return {
            "reward": [float(text) for text in texts],
            "status": ["ok" if text == "1" else "error" for text in texts],
        }

    monkeypatch.setattr(rollout, "wait", wait)
    monkeypatch.setattr(rollout, "score", score)
    yield make
    for folder in folders:
        folder.lock.release()


def sample(folder, iteration=1):
    """Does the rollout of an iteration as its step does, and gives (columns, drawn, record)."""
    context = folder.context
    inputs = rollout._inputs(context, iteration)
    files, fields = asyncio.run(rollout.sample(context, iteration))
    record = StepRecord("rollout", iteration, 1.0, inputs=inputs, **fields)
    record = folder.journal.commit(record, files)
    rollout.forget_chunks(context, iteration)
    drawn = files.get("drawn.parquet")
    return from_parquet(files["rollouts.parquet"]), drawn and from_parquet(drawn), record


def rest_of(folder, iteration):
    """What follows a rollout up to the next one."""
    for step in ("reward", "train", "requantize", "recalibrate_kv", "end_iteration"):
        getattr(folder, step)(iteration)


def test_one_draw_scores_nothing_and_records_what_it_always_did(made, monkeypatch):
    async def score(*_):
        raise AssertionError("scored in the rollout step")

    folder, engine = made()
    monkeypatch.setattr(rollout, "score", score)
    columns, drawn, record = sample(folder)
    assert engine.calls == [(1, 0, 0), (1, 0, 1)]
    assert columns["prompt_id"] == [i for i in engine.ids(0) for _ in range(2)]
    assert drawn is None
    assert [path.rpartition("/")[2] for path in record.files] == ["rollouts.parquet"]
    assert record.output.keys() == {"generated_tokens", "chunks", "kv"}
    assert record.inputs.keys() == {"weight_version", "weights", "kv_scales", "prompts"}
    sampling = {name for name in record.metrics if name.startswith("rollout/")}
    assert sampling == {"rollout/response_length_mean", "rollout/truncated", "rollout/entropy"}


def test_it_draws_until_there_are_enough_groups_and_keeps_the_first(made, notes):
    folder, engine = made("rollout.max_draws=3")
    a, b = engine.ids(0), engine.ids(1)
    engine.useful = {a[1], a[3], *b[1:]}
    columns, drawn, record = sample(folder)
    assert engine.calls == [(1, 0, 0), (1, 0, 1), (1, 1, 2), (1, 1, 3)]
    kept = [a[1], a[3], b[1], b[2]]
    assert columns["prompt_id"] == [i for i in kept for _ in range(2)]
    assert columns["tokens"] == [[i] * n for i in kept for n in (1, 2)]
    assert drawn["prompt_id"] == a + b
    assert [i for i, is_kept in zip(a + b, drawn["kept"], strict=True) if is_kept] == kept
    assert record.inputs["first_batch"] == 0
    assert record.output["next_batch"] == 2
    # What was generated counts, also what was thrown away.
    assert record.output["generated_tokens"] == 8 * 3
    assert record.output["chunks"] == 4
    assert record.output["kv"]["elements"] == [40]
    assert record.metrics["rollout/response_length_mean"] == 1.5
    assert record.metrics["perf/rollout_tokens_per_sec"] == 24 / 2.0
    assert record.metrics["rollout/draws"] == 2
    assert record.metrics["rollout/groups_drawn"] == 8
    assert record.metrics["rollout/groups_informative"] == 5 / 8
    assert record.metrics["rollout/groups_kept"] == 4
    assert record.metrics["rollout/reward_mean_drawn"] == 11 / 16
    assert record.metrics["rollout/error_drawn"] == 5 / 16
    assert not [note for note in notes if note]
    assert [step for n, step in folder.journal.steps() if "." in step] == []


def test_a_spent_budget_is_said_and_what_there_is_is_kept(made, notes):
    folder, engine = made("rollout.max_draws=2")
    engine.useful = {engine.ids(1)[2]}
    columns, _, record = sample(folder)
    assert columns["prompt_id"] == [engine.ids(1)[2]] * 2
    assert record.metrics["rollout/groups_kept"] == 1
    assert "iteration 1: 1 of 4 groups after 2 draws; of each other prompt" in notes[-1]
    assert "What helps: more draws (rollout.max_draws), more samples" in notes[-1]
    assert "kept whole" not in notes[-1]


def test_iterations_go_through_the_prompts_without_a_gap_and_end_with_the_epoch(made, notes):
    """Nothing is ever informative: each iteration draws all that it may."""
    folder, engine = made("rollout.max_draws=3", "iterations=9")
    for iteration in range(1, 5):
        columns, _, record = sample(folder, iteration)
        first = record.inputs["first_batch"]
        assert columns["prompt_id"] == [i for i in engine.ids(first) for _ in range(2)]
        assert record.metrics["rollout/groups_kept"] == 0
        assert "The first draw is kept whole" in [note for note in notes if "groups" in note][-1]
        rest_of(folder, iteration)
    batches = [(iteration, batch) for iteration, batch, chunk in engine.calls if chunk % 2]
    assert batches == [(1, 0), (1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6), (3, 7), (4, 8), (4, 9)]
    seen = Counter(i for _, batch in batches[:5] for i in engine.ids(batch))
    assert len(seen) == 20
    assert set(seen.values()) == {1}
    ended = [note for note in notes if "with which the epoch ended" in note]
    assert [note.split(":")[0] for note in ended] == ["iteration 2", "iteration 4"]
    assert all("max_draws" not in note for note in ended)


@pytest.mark.parametrize("deaths", [(0,), (1,), (2,), (3,), (5,), (2, 4)])
def test_an_engine_that_dies_costs_one_chunk_and_the_same_comes_out(made, deaths):
    straight, engine = made("rollout.max_draws=3", name="straight")
    engine.useful = {engine.ids(0)[2], *engine.ids(1)[:2], engine.ids(2)[3]}
    want = sample(straight)
    folder, mortal = made("rollout.max_draws=3", useful=engine.useful, deaths=deaths)
    for _ in deaths:
        with pytest.raises(Died):
            asyncio.run(rollout.sample(folder.context, 1))
    got = sample(folder)
    assert mortal.calls == engine.calls
    assert got[:2] == want[:2]
    assert got[2].metrics == want[2].metrics
    assert got[2].output == want[2].output
    assert want[2].output["next_batch"] == 3
