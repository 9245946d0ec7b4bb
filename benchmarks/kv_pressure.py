"""`make bench-kv`: what an FP8 KV cache buys where the cache is too small, on SmolLM2-135M.

A BF16 and an FP8 KV cache of the same bytes, everything else BF16, on the real CPU engine; the same 32
sequences with answers of 192 tokens each. Every pair of arms and pressure is a process with its own
engine; they take turns, and each FP8 turn is set against the BF16 turn of its round. Also: the share
that recalibrating the KV scales has in an iteration. Written: benchmarks/results/kv_pressure.json and
docs/kv_pressure.png; see docs/kv_pressure.md.

The CPU engine's kernel for an FP8 cache is faster than its BF16 one whatever the pressure. That is a
property of that kernel and says nothing about a GPU; the effect shown here is the ratio of ratios.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.turns import in_turns
from fp8rl.device import compute_environment
from fp8rl.recipe.load import load_recipe
from fp8rl.recipe.schema import Recipe

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs" / "smollm2"
PLOT = ROOT / "docs" / "kv_pressure.png"
ARMS = {"bf16": "bf16", "fp8": "bf16-kv"}  # KV cache: recipe
RECALIBRATED = "fp8-rollout-kv"

SEQUENCES = 32  # the recipe's chunk
# Four times the recipe's answers. With the longest prompt, 64, they fill two blocks of 128 tokens.
ANSWER = 192
# An odd number, for a median; as many as fit into ten minutes.
ROUNDS = 3
ITERATIONS = 3
# Each process generates so many tokens of each answer before its first turn.
WARM_UP = 24


@dataclass(frozen=True)
class Setting:
    """kv_mib: bytes of the cache. demand: blocks that all sequences need at their full length, over
    those that the BF16 cache has for them. why: chosen before anything was measured, for this."""

    kv_mib: int
    demand: float
    why: str


# A BF16 block of SmolLM2 has 2.8125 MiB (30 layers x K and V x 3 heads x 64 numbers x 2 bytes x 128
# tokens), an FP8 block half of it. 32 sequences need 64 blocks, and vLLM keeps one for itself.
SETTINGS = {
    "none": Setting(256, 0.7, "the recipe's default: everything fits, in BF16 too"),
    "half": Setting(93, 2.0, "BF16 holds half of what is needed, FP8 just all of it"),
    "quarter": Setting(48, 4.0, "BF16 holds a quarter, FP8 half: the cache is short for both"),
}
# The ratios at the top of the result: without pressure, and where the cache is what limits both arms.
AT_REST, UNDER_PRESSURE = "none", "quarter"


def recipe_of(arm: str, kv_mib: int, answer: int = ANSWER) -> Recipe:
    """The arm's recipe with another cache and longer answers."""
    return load_recipe(
        CONFIGS / f"{arm}.yaml",
        [
            f"rollout.kv_cache_mib={kv_mib}",
            f"rollout.max_new_tokens={answer}",
            f"rollout.chunk_size={SEQUENCES}",
        ],
    ).recipe


# --- in processes of their own


def prepare(folder: Path) -> None:
    """Weights, KV scales and prompts for all arms, in `folder`."""
    from fp8rl.data.prepare import batch_prompts, prepare_data
    from fp8rl.learner.batch import make_batch
    from fp8rl.learner.learner import Learner
    from fp8rl.model.source import model_folder

    recipe = recipe_of(ARMS["fp8"], SETTINGS[AT_REST].kv_mib)
    model_dir = model_folder(recipe)
    assert model_dir is not None
    prepare_data(recipe, model_dir, folder / "data")
    learner = Learner(model_dir, recipe)
    learner.load(model_dir, 0)
    learner.publish(folder / "w0", version=0)
    prompts = batch_prompts(folder / "data", recipe, 0)
    answers = make_batch(prompts["prompt_tokens"], prompts["answer_tokens"])
    scales = learner.calibrate_kv(answers, version=0, source="benchmark")
    (folder / "kv_scales.json").write_text(scales.to_json())


def take_turns(arm: str, kv_mib: int, answer: int, folder: Path) -> None:
    """Warms up and says "ready", then generates once for each line that comes in and says how that
    went."""
    from fp8rl.data.prepare import batch_prompts
    from fp8rl.model.kv_scales import KvScales
    from fp8rl.model.source import model_folder
    from fp8rl.rollout.engine import Engine
    from fp8rl.rollout.requests import requests_for

    recipe = recipe_of(arm, kv_mib, answer)
    model_dir = model_folder(recipe)
    assert model_dir is not None
    engine = Engine(model_dir, recipe, max_len=recipe.rollout.max_prompt_tokens + answer)
    engine.load_weights(folder / "w0", 0)
    if engine.fp8_kv:
        engine.apply_kv_scales(KvScales.from_json((folder / "kv_scales.json").read_text()))
    prompts = batch_prompts(folder / "data", recipe, 0)
    samples = recipe.rollout.samples
    requests = requests_for(
        prompts["prompt_tokens"], prompts["id"], samples, run_seed=recipe.seed, iteration=1
    )
    assert len(requests) == SEQUENCES
    engine.recipe = recipe_of(arm, kv_mib, WARM_UP)
    engine.generate(requests, version=0, ignore_end=True)
    engine.recipe = recipe
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        completions = engine.generate(requests, version=0, ignore_end=True)
        seconds = time.perf_counter() - started
        tokens = sum(len(c.tokens) for c in completions)
        values = {"tokens_per_sec": tokens / seconds, "pressure": engine.pressure.to_dict()}
        print("turn", json.dumps(values), flush=True)


def iteration_parts(folder: Path) -> dict[str, float]:
    """Seconds of each part of an iteration of configs/smollm2/fp8-rollout-kv: medians of several, after
    a first one that warms up."""
    import torch
    from transformers import AutoTokenizer

    from benchmarks.measure import Bench
    from fp8rl.data.calibration import choose
    from fp8rl.data.prepare import batch_prompts
    from fp8rl.learner.advantage import grpo_advantages
    from fp8rl.learner.batch import make_batch
    from fp8rl.model.source import model_folder
    from fp8rl.reward.score import score_all

    recipe = load_recipe(CONFIGS / f"{RECALIBRATED}.yaml").recipe
    bench = Bench(recipe, folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder(recipe), local_files_only=True)
    prompts, samples = batch_prompts(folder / "data", recipe, 0), recipe.rollout.samples
    entries = [entry for entry in prompts["entry"] for _ in range(samples)]
    ids = torch.tensor([i for i in prompts["id"] for _ in range(samples)])
    parts: dict[str, list[float]] = defaultdict(list)
    for version in range(ITERATIONS + 1):
        last = time.perf_counter()

        def note(part: str) -> None:
            nonlocal last
            now = time.perf_counter()
            parts[part].append(now - last)
            last = now

        completions = bench.engine.generate(bench.requests, version=version)
        note("rollout")
        texts = [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
        rewards = [verdict.reward for verdict in score_all(recipe.task, texts, entries)]
        note("reward")
        batch = bench.batch(completions)
        advantages = grpo_advantages(torch.tensor(rewards, dtype=torch.float64), ids).float()
        bench.learner.train(batch, advantages, iteration=version + 1, version=version)
        note("train")
        bench.learner.publish(folder / f"w{version + 1}", version=version + 1)
        bench.engine.load_weights(folder / f"w{version + 1}", version + 1)
        note("requantize")
        chosen = choose(ids.tolist(), batch.lengths.tolist(), recipe.precision.kv_tokens)
        seen = make_batch(
            [bench.requests[i].prompt for i in chosen], [completions[i].tokens for i in chosen]
        )
        scales = bench.learner.calibrate_kv(seen, version=version + 1, source="benchmark")
        bench.engine.apply_kv_scales(scales)
        note("recalibrate_kv")
    return {part: median(seconds[1:]) for part, seconds in parts.items()}


# --- together


def _python(recipe: Recipe, *arguments: str) -> str:
    """The last line that this module says with `arguments`, in the recipe's environment."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kv_pressure", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | compute_environment(recipe),
    )
    if done.returncode != 0:
        raise RuntimeError(f"{arguments}: {done.stderr[-4000:]}")
    return (done.stdout.splitlines() or [""])[-1]


def measure(folder: Path, *, rounds: int, answer: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What each turn said, by pressure and KV cache."""
    _python(recipe_of("bf16", 256), "--prepare", str(folder))
    arms = {
        f"{name} {kv}": (
            ["benchmarks.kv_pressure", "--turns", arm, str(s.kv_mib), str(answer), str(folder)],
            recipe_of(arm, s.kv_mib),
        )
        for name, s in SETTINGS.items()
        for kv, arm in ARMS.items()
    }
    said = in_turns(arms, rounds)
    return {
        name: {kv: [json.loads(line) for line in said[f"{name} {kv}"]] for kv in ARMS}
        for name in SETTINGS
    }


def summarise(turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """One pressure: each arm's cache and medians, and FP8 over BF16 (of the same round) in speed."""
    arms = {}
    for kv, said in turns.items():
        pressures = [turn["pressure"] for turn in said]
        arms[kv] = {
            "capacity_tokens": pressures[0]["capacity_tokens"],
            "tokens_per_sec": median(turn["tokens_per_sec"] for turn in said),
            "tokens_per_sec_by_turn": [turn["tokens_per_sec"] for turn in said],
            "preemptions": median(p["preemptions"] for p in pressures),
            "peak_use": max(p["peak_use"] for p in pressures),
            "running_mean": median(p["running"] / p["steps"] for p in pressures),
            "waiting_max": max(p["waiting_max"] for p in pressures),
        }
    ratios = [
        fp8["tokens_per_sec"] / bf16["tokens_per_sec"]
        for fp8, bf16 in zip(turns["fp8"], turns["bf16"], strict=True)
    ]
    return {
        "capacity_ratio": arms["fp8"]["capacity_tokens"] / arms["bf16"]["capacity_tokens"],
        "throughput_ratio": median(ratios),
        "throughput_ratio_by_turn": ratios,
        **arms,
    }


def result_of(
    turns: dict[str, dict[str, list[dict[str, Any]]]], parts: dict[str, float]
) -> dict[str, Any]:
    """All that is written. gain: the ratio under pressure over the ratio without; its rounds beside."""
    found = {name: summarise(said) for name, said in turns.items()}
    rest, tight = found[AT_REST], found[UNDER_PRESSURE]
    both = zip(tight["throughput_ratio_by_turn"], rest["throughput_ratio_by_turn"], strict=True)
    return {
        "capacity_ratio": tight["capacity_ratio"],
        "throughput_ratio_pressure": tight["throughput_ratio"],
        "throughput_ratio_no_pressure": rest["throughput_ratio"],
        "gain_from_capacity": tight["throughput_ratio"] / rest["throughput_ratio"],
        "gain_from_capacity_by_turn": [pressed / free for pressed, free in both],
        "preemptions_bf16": tight["bf16"]["preemptions"],
        "preemptions_fp8": tight["fp8"]["preemptions"],
        "recalibration_share": parts["recalibrate_kv"] / sum(parts.values()),
        "iteration_s": parts,
        "iteration_recipe": RECALIBRATED,
        "model": "SmolLM2-135M-Instruct",
        "sequences": SEQUENCES,
        "answer_tokens": ANSWER,
        "pressures": {
            name: {"kv_cache_mib": s.kv_mib, "demand_over_bf16_cache": s.demand, "why": s.why}
            | found[name]
            for name, s in SETTINGS.items()
        },
    }


def print_result(result: dict[str, Any], console: Console) -> None:
    table = Table(title="The same bytes of KV cache in BF16 and in FP8")
    headings = ("pressure", "MiB", "KV cache", "tokens held", "preemptions", "tokens/s", "FP8 / BF16")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, found in result["pressures"].items():
        for kv in ARMS:
            arm = found[kv]
            ratio = f"{found['throughput_ratio']:.2f}" if kv == "fp8" else ""
            table.add_row(
                *(name, str(found["kv_cache_mib"]), kv, f"{arm['capacity_tokens']:,}"),
                *(f"{arm['preemptions']:.0f}", f"{arm['tokens_per_sec']:.0f}", ratio),
            )
    console.print(table)
    for key in ("capacity_ratio", "gain_from_capacity", "recalibration_share"):
        console.print(f"{key}: {result[key]:.3f}")


def plot(result: dict[str, Any], path: Path) -> None:
    """tokens/s and preemptions by pressure, one colour for each KV cache, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11.5, 3.6))
    names = list(result["pressures"])
    for axis, key, title in zip(
        axes,
        ("capacity_tokens", "preemptions", "tokens_per_sec"),
        ("tokens the cache holds", "preemptions", "generated tokens/s on this CPU"),
        strict=True,
    ):
        for offset, kv, colour in ((-0.2, "bf16", "#7a869a"), (0.2, "fp8", "#2a7de1")):
            values = [result["pressures"][name][kv][key] for name in names]
            bars = axis.bar([i + offset for i in range(len(names))], values, 0.4, color=colour)
            axis.bar_label(bars, fmt="{:,.0f}", fontsize=8)
            bars.set_label(f"{kv.upper()} KV cache")
        labels = [f"{name}\n{result['pressures'][name]['kv_cache_mib']} MiB" for name in names]
        axis.set_xticks(range(len(names)), labels)
        axis.set_title(title, fontsize=10)
        axis.margins(y=0.15)
    for index, name in enumerate(names):
        found = result["pressures"][name]
        top = max(found[kv]["tokens_per_sec"] for kv in ARMS)
        axes[2].annotate(
            f"x{found['throughput_ratio']:.2f}",
            *((index, top), (0, 16)),
            textcoords="offset points",
            ha="center",
            weight="bold",
        )
    axes[2].margins(y=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str]) -> None:
    """Measures all, prints and writes. --try: one round, printed only."""
    match arguments:
        case ["--prepare", folder]:
            prepare(Path(folder))
            return
        case ["--turns", arm, kv_mib, answer, folder]:
            take_turns(arm, int(kv_mib), int(answer), Path(folder))
            return
        case ["--iteration", folder]:
            print(json.dumps(iteration_parts(Path(folder))))
            return
    trying = arguments == ["--try"]
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with console.status("KV caches under pressure, in turns"):
            turns = measure(folder, rounds=1 if trying else ROUNDS, answer=ANSWER)
        with console.status("an iteration"):
            recipe = load_recipe(CONFIGS / f"{RECALIBRATED}.yaml").recipe
            parts = json.loads(_python(recipe, "--iteration", str(folder / "iteration")))
    result = result_of(turns, parts)
    print_result(result, console)
    if not trying:
        plot(result, PLOT)
        console.print(f"written: {record.write('kv_pressure', result)}, {PLOT}")


if __name__ == "__main__":
    main(sys.argv[1:])
