"""A mixture of prompts with three rewards, killed between reward and training, and carried on."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fp8rl.data.prepare import read_prompts
from fp8rl.files import file_sha256
from fp8rl.tables import from_parquet
from tests.kill.harness import KILLED, Commands, faults_of

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
RECIPE = {
    "iterations": 3,
    "warm_start": {"steps": 0},  # random weights: what is tried is the way of the data
    "rollout": {"prompts": 4, "samples": 4, "max_prompt_tokens": 96, "max_new_tokens": 12},
    "evaluate": {"every": 3},
    "precision": {"rollout": "fp8", "learner": "fp8"},
}
REWARDS = [
    {"kind": "numeric"},
    {"kind": "math_verify", "weight": 0.5},
    {"kind": "length", "max_chars": 16, "buffer_chars": 16, "weight": 0.25},
]
KILL = "commit:reward:2:committed"


@pytest.fixture
def begin(tmp_path):
    """The command that begins a run of a given name, and the Parquet file."""
    path = tmp_path / "products.parquet"
    rows = [
        {"uid": f"{a}x{b}", "said": {"text": f"{a} times {b} is", "gold": a * b}}
        for a in range(2, 6)
        for b in range(2, 5)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    columns = {"question": "said.text", "answer": "said.gold", "id": "uid"}
    task = {
        "sources": [
            {"name": "chain_sum", "options": SUMS, "weight": 2},
            {"path": str(path), "columns": columns},
        ],
        "train_prompts": 24,
        "val_prompts": 6,
        "extract": "last_number",
        "rewards": REWARDS,
    }
    recipe = tmp_path / "mixture.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "task": task}))
    runs = tmp_path / "runs"
    return path, lambda name: ("run", str(recipe), f"name={name}", f"runs_dir={runs}")


def test_a_mixture_killed_after_its_rewards_ends_as_if_never_killed(begin, tmp_path):
    path, command = begin
    commands = Commands(tmp_path / "runs", tmp_path / "logs")
    ended = commands.call(*command("whole"))
    assert ended.code == 0, ended.text[-3000:]
    whole, killed = commands.run_of("whole"), commands.run_of("killed")

    ended = commands.call(*command("killed"), kill=(KILL,))
    assert (ended.code, ended.reached) == (KILLED, (KILL,))
    assert killed.journal.is_committed(2, "reward")
    assert not killed.journal.is_committed(2, "train")
    ended = commands.call("resume", "killed", f"--runs-dir={tmp_path / 'runs'}")
    assert ended.code == 0, ended.text[-3000:]
    assert faults_of(whole, killed, whole=True) == ([], 0, 0)

    # Both sources by their weights, and the columns as they are mapped.
    train, val = (read_prompts(killed.folder / "data", split) for split in ("train", "val"))
    entries = [json.loads(entry) for entry in (*train["entry"], *val["entry"])]
    assert Counter(entry["source"] for entry in entries) == {"chain_sum": 20, "products.parquet": 10}
    for entry in entries:
        if entry["source"] == "products.parquet":
            a, b = map(int, entry["id"].split("x"))
            assert (entry["question"], entry["answer"]) == (f"{a} times {b} is", str(a * b))
    sources = killed.journal.record(0, "prepare_data").output["sources"]
    assert [one.get("files") for one in sources] == [None, {str(path): file_sha256(path)}]

    # Each reward was asked, and they add up.
    for n in (1, 2, 3):
        texts = from_parquet(killed.journal.read_file(n, "rollout", "rollouts.parquet"))["text"]
        columns = from_parquet(killed.journal.read_file(n, "reward", "rewards.parquet"))
        assert columns["reward_length"] == [-min(1.0, len(text) / 16) for text in texts]
        parts = [columns[f"reward_{reward['kind']}"] for reward in REWARDS]
        weights = [reward.get("weight", 1.0) for reward in REWARDS]
        for total, *rewards in zip(columns["reward"], *parts, strict=True):
            assert total == pytest.approx(sum(w * r for w, r in zip(weights, rewards, strict=True)))
        # Digits are a tenth of what random weights say: some samples hold a number, some none.
        for kind in ("numeric", "math_verify"):
            assert {"wrong", "unparsable"} <= set(columns[f"status_{kind}"]), columns
            assert not {"error", "timeout"} & set(columns[f"status_{kind}"])
        metrics = killed.journal.record(n, "reward").metrics
        assert metrics["reward/length_mean"] == pytest.approx(
            sum(columns["reward_length"]) / len(texts), abs=1e-12
        )
