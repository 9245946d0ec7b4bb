"""The `fp8rl` command as a user calls it, in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8rl.report import STEPS
from tests.arms import SHORT, TINY

pytestmark = pytest.mark.pipeline

SMOLLM2 = TINY.parent / "smollm2"
FP8RL = [str(Path(sys.executable).parent / "fp8rl")]


def call(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*FP8RL, *arguments], capture_output=True, text=True, timeout=timeout, env=environment()
    )


def environment() -> dict[str, str]:
    """As a user's shell: Prefect embedded by the command itself (HOME is the tests' own)."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}


def test_validate_and_explain():
    path = str(TINY / "fp8-e2e-kv.yaml")
    done = call("validate", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "valid" in done.stdout
    done = call("explain", path, "seed=5")
    assert done.returncode == 0
    shown = ("command line", "base.yaml", "default", "FP8 (block scaling", "fp8_block", "embed_tokens")
    for text in shown:
        assert text in done.stdout


def test_bad_input_is_refused_with_exit_code_2_before_anything_starts(tmp_path):
    for arguments, text in (
        (["run", "nowhere.yaml"], "no recipe at nowhere.yaml"),
        (["run", str(TINY / "bf16.yaml"), "rollout.sample=3"], "did you mean 'rollout.samples'"),
        (["run", str(TINY / "bf16.yaml"), "device=cuda"], "not built yet"),
        (["demo", "rollout.top_p=0.9"], "rollout.top_p"),
        (
            ["run", str(TINY / "bf16.yaml"), "model.path=/nowhere", "warm_start.steps=0"],
            "no config.json",
        ),
        (
            ["run", str(SMOLLM2 / "bf16.yaml"), "model.gguf=package:nowhere_installed/a.gguf"],
            "no package 'nowhere_installed' is installed here",
        ),
    ):
        done = call(*arguments, f"runs_dir={tmp_path / 'runs'}")
        assert done.returncode == 2, arguments
        assert text in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_demo_compares_the_two_arms(runs_dir, run_arm):
    run_arm("bf16")  # for the warm start
    done = call("demo", *SHORT, f"runs_dir={runs_dir}")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((runs_dir / "demo" / "summary.json").read_text())
    assert set(summary) == {"fp8-e2e-kv", "bf16"}
    for arm in summary.values():
        for key in (
            "val_accuracy_before",
            "val_accuracy_after",
            "val_greedy_before",
            "val_greedy_after",
            "token_mult_prob_error",
            "kl_k3",
            "tokens_per_sec_per_gpu",
            "iteration_s",
        ):
            assert isinstance(arm[key], float)
        assert set(arm["steps_s"]) == set(STEPS)
    assert (runs_dir / "demo" / "arms.png").stat().st_size > 10_000
    assert "The two arms side by side" in done.stdout
    assert "iteration 3" in done.stdout
