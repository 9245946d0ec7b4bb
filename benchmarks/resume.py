"""`make bench-resume`: what a kill costs on SmolLM2, as benchmarks/results/resume.json.

A run with checkpoints every 5 iterations is killed in the train step of iteration 4, before that step
is committed, and resumed. Three training steps are replayed over the journalled rollouts. Reported are
the replay beside the train time that was recorded and beside the time that repeating the lost
iterations would take, the tokens that were generated again (none), and the start-up by part.

start_up_s is all of the time to the first new step but the replay, which begins when everything else
is up. Beside it stands the start-up of a resume after a stop in good order, with nothing to replay and
no leftovers of a killed process to put right.

On a CPU training weighs more beside generation than on GPUs: the ratio is of this machine.
"""

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.commands import call, fp8rl
from fp8rl.report import STEPS
from fp8rl.runs import Run

CONFIG = Path(__file__).parent.parent / "configs" / "smollm2" / "fp8-e2e-kv.yaml"
KILLED_IN = 4


def measure(folder: Path) -> dict[str, Any]:
    """Runs, kills and resumes in `folder`; raises RuntimeError where that does not go as planned."""
    runs, log = folder / "runs", folder / "log.txt"
    planted = {
        "at": f"commit:train:{KILLED_IN}:before-record",
        "do": "kill",
        "once": str(folder / "killed"),
    }
    call(
        log,
        *("run", str(CONFIG), f"runs_dir={runs}", "name=bench", "iterations=5"),
        *("checkpoint.every=5", "evaluate.every=5", "evaluate.samples=1", "evaluate.bf16=false"),
        "task.val_prompts=32",
        planted=[planted],
    )
    run = Run(runs / "bench")
    if run.state().state != "killed" or not (folder / "killed").exists():
        raise RuntimeError(f"the run was not killed as planned:\n{log.read_text()[-3000:]}")
    lost = [run.journal.record(n, step) for n in range(1, KILLED_IN) for step in STEPS]
    rollouts = {n: run.journal.record(n, "rollout") for n in range(1, KILLED_IN + 1)}
    fp8rl(log, "resume", "bench", "--runs-dir", str(runs), f"stop.after_iteration={KILLED_IN}")
    start, new_step = run.attempts()[-1]["start_s"], run.attempts()[-1]["first_new_step"]
    fp8rl(log, "resume", "bench", "--runs-dir", str(runs), "stop.after_iteration=null")
    without = run.attempts()[-1]["start_s"]
    if without["replay"] > 1:
        raise RuntimeError(f"the second resume had something to replay: {without}")
    again = [n for n, was in rollouts.items() if run.journal.record(n, "rollout") != was]
    tokens = sum(run.journal.record(n, "rollout").output["generated_tokens"] for n in again)
    recorded_train = sum(r.seconds for r in lost if r.step == "train")
    repeating = sum(r.seconds for r in lost)
    return {
        "replayed_steps": KILLED_IN - 1,
        "replay_s": start["replay"],
        "recorded_train_s": recorded_train,
        "replay_over_recorded_train": start["replay"] / recorded_train,
        "start_up_s": start["total"] - start["replay"],
        "repeating_lost_iterations_s": repeating,
        "replay_over_repeating": start["replay"] / repeating,
        "tokens_generated_again": tokens,
        "from_command_to_first_new_step_s": start,
        "after_a_stop_in_good_order_s": without,
        "first_new_step": new_step,
    }


def main() -> None:
    console = Console()
    with tempfile.TemporaryDirectory() as folder, console.status("run, kill, resume"):
        result = measure(Path(folder))
    table = Table(title="A kill in iteration 4's train step, checkpoints every 5 iterations")
    table.add_column("what")
    table.add_column("value", justify="right")
    for key, value in result.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in rows:
            shown = f"{number:.3f}" if isinstance(number, float) else str(number)
            table.add_row(f"{key} {part}".strip(), shown)
    console.print(table)
    console.print(f"written: {record.write('resume', result)}")


if __name__ == "__main__":
    main()
