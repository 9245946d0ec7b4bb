"""Dynamic sampling with the real stack: a run that is killed between two draws ends as one that never
was, and no prompt is skipped or drawn twice, also by a fork.
"""

import asyncio

import pytest

from fp8rl.data.tasks import prompts_of_batch
from fp8rl.recipe.load import load_recipe, with_overrides
from fp8rl.runs import Run
from fp8rl.tables import from_parquet
from tests.arms import SHORT, TINY
from tests.kill.harness import KILLED, Commands, faults_of

pytestmark = pytest.mark.pipeline

# Two chunks to a draw, of a model that is seldom right: one draw is not enough.
OVERRIDES = [
    *SHORT,
    *("rollout.max_draws=3", "rollout.prompts=8", "rollout.chunk_size=32"),
    *("learner.updates=2", "iterations=2", "checkpoint.every=2", "retry.delay_s=0.1"),
]
PER_DRAW = 2


def overrides(runs_dir, name):
    return [*OVERRIDES, f"runs_dir={runs_dir}", f"name={name}"]


def train(recipe, resume=None):
    from flows.training import train

    return asyncio.run(train(recipe=recipe, resume=resume))


def table(run, iteration, step, name):
    return from_parquet(run.journal.read_file(iteration, step, f"{name}.parquet"))


def batches(run, first, end):
    """Ids of the prompts of the batches from `first` up to `end`, in order."""
    recipe = run.recipe
    sizes = (recipe.task.train_prompts, recipe.rollout.prompts)
    return [i for batch in range(first, end) for i in prompts_of_batch(*sizes, batch, recipe.seed)]


@pytest.fixture(scope="module")
def straight(runs_dir, run_arm):
    recipe = load_recipe(TINY / "bf16.yaml", overrides(runs_dir, "dynamic")).recipe
    train(recipe)
    return Run(runs_dir / "dynamic")


def test_what_is_trained_on_are_the_first_informative_groups_of_all_that_was_drawn(straight):
    recipe, cursor = straight.recipe, 0
    for n in (1, 2):
        record = straight.journal.record(n, "rollout")
        drawn = table(straight, n, "rollout", "drawn")
        rollouts = table(straight, n, "rollout", "rollouts")
        rewards = table(straight, n, "reward", "rewards")
        draws = record.output["next_batch"] - cursor
        assert record.inputs["first_batch"] == cursor
        assert drawn["prompt_id"] == batches(straight, cursor, cursor + draws)
        cursor += draws
        informative = [
            i for i, r in zip(drawn["prompt_id"], drawn["rewards"], strict=True) if len(set(r)) > 1
        ]
        assert 0 < len(informative) < len(drawn["prompt_id"])
        kept = informative[: recipe.rollout.prompts]
        assert rollouts["prompt_id"] == [i for i in kept for _ in range(recipe.rollout.samples)]
        by_prompt = dict(zip(drawn["prompt_id"], drawn["rewards"], strict=True))
        assert rewards["reward"] == [reward for i in kept for reward in by_prompt[i]]
        metrics = straight.journal.record(n, "iteration").metrics
        assert metrics["rollout/draws"] == draws > 1
        assert metrics["rollout/groups_kept"] == len(kept)
        assert metrics["reward/groups_without_signal"] == 0
        assert metrics["rollout/reward_mean_drawn"] < metrics["train/reward_mean"]
        assert record.output["chunks"] == draws * PER_DRAW
        trained = sum(map(len, rollouts["tokens"]))
        assert trained < record.output["generated_tokens"]
        prompts = sum(map(len, rollouts["prompt_tokens"]))
        assert straight.journal.record(n, "train").output["tokens"] == trained + prompts


def test_a_run_that_is_killed_between_draws_ends_as_if_never_killed(runs_dir, straight, tmp_path):
    commands = Commands(runs_dir, tmp_path)
    run = commands.run_of("dynamic-killed")
    begin = ["run", str(TINY / "bf16.yaml"), *overrides(runs_dir, "dynamic-killed")]
    # The flow process, when one of the two chunks of the second draw is committed.
    ended = commands.call(*begin, kill=("commit:rollout.0003:2:before-record",))
    assert (ended.code, ended.reached) == (KILLED, ("commit:rollout.0003:2:before-record",))
    assert run.journal.is_committed(2, "rollout.0002")
    assert not run.journal.is_committed(2, "rollout.0003")
    # Then the engine, over the same chunk: the command survives that.
    deaths = ("engine:rollout:2:3:generated",)
    ended = commands.call("resume", run.name, f"--runs-dir={runs_dir}", kill=deaths)
    assert ended.code == 0, ended.text[-3000:]
    assert ended.reached == deaths
    assert faults_of(straight, run, whole=True) == ([], 0, 0)


def test_a_fork_goes_on_with_the_next_prompts_and_trains_on_fewer_groups_than_wanted(
    runs_dir, straight
):
    """Of two samples few differ: its draws end before there are enough."""
    from flows.opening import identity
    from fp8rl.fork import fork

    recipe = with_overrides(
        straight.recipe,
        [
            *("rollout.max_draws=2", "rollout.samples=2", "learner.updates=4", "iterations=3"),
            *("precision.kv_cache=fp8", "precision.allow_fp8_kv_without_qk_norm=true"),
            "name=dynamic-fork",
        ],
    )
    run, lock = fork(straight, "dynamic-fork", recipe, identity(recipe))
    lock.release()
    train(recipe, resume="dynamic-fork")
    after = straight.journal.record(2, "rollout").output["next_batch"]
    record = run.journal.record(3, "rollout")
    assert record.inputs["first_batch"] == after > 2
    assert record.output["next_batch"] == after + 2
    assert table(run, 3, "rollout", "drawn")["prompt_id"] == batches(run, after, after + 2)
    rollouts = table(run, 3, "rollout", "rollouts")
    kept = record.metrics["rollout/groups_kept"]
    assert 0 < kept < recipe.rollout.prompts
    assert len(rollouts["prompt_id"]) == 2 * kept
    tokens = sum(
        len(p) + len(r) for p, r in zip(rollouts["prompt_tokens"], rollouts["tokens"], strict=True)
    )
    assert run.journal.record(3, "train").output["tokens"] == tokens
    assert run.journal.record(3, "iteration").metrics["kv/tokens_available"] <= tokens
