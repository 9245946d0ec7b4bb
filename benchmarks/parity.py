"""Every source of mismatch by itself, on SmolLM2-135M, as results/parity.json.

For each of three arms the tokens of one iteration are sampled once. Then the learner scores them with
everything as the engine has it but one thing, and with nothing but one thing. And training steps with
and without parity take turns, for what parity costs.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

from rich.progress import track

from benchmarks import record
from benchmarks.mismatch import SMOLLM2
from fp8rl.device import compute_environment, resolve
from fp8rl.recipe.load import load_recipe

ARMS = ("bf16", "fp8-e2e", "fp8-e2e-kv")
ROUNDS = 3


class Sources:
    """A learner and an engine on the same weights, and one iteration's samples."""

    def __init__(self, path: Path, overrides: list[str], folder: Path) -> None:
        from benchmarks.measure import Bench

        self.bench = Bench(load_recipe(path, overrides).recipe, folder)
        self.learner, self.model = self.bench.learner, self.bench.learner.model
        self.batch = self.bench.batch(self.bench.engine.generate(self.bench.requests, version=0))

    def error(self, **options: Any) -> dict[str, float]:
        """token_mult_prob_error, kl_k3 and the share of log-probs that are equal to the last bit."""
        return self._between(self.batch.g, self.learner.logprobs(self.batch, version=0, **options))

    def _between(self, g: Any, p: Any) -> dict[str, float]:
        from fp8rl.mismatch import mismatch_panel

        mask = self.batch.mask
        panel = mismatch_panel(g, p, mask, truncate=2.0)
        keys = ("token_mult_prob_error", "kl_k3")
        return {key: panel[key] for key in keys} | {"equal": float((g == p)[mask].double().mean())}

    def measure(self) -> dict[str, Any]:
        """Everything of one arm."""
        from fp8rl.layerwise.setup import engine_logprobs
        from fp8rl.model.rounding import ENGINE, MEGATRON, POINTS

        found: dict[str, Any] = {"nothing": {"all_but": self.error()}}
        self.model.set_rounding(MEGATRON)
        found["nothing"]["alone"] = self.error()
        for point in POINTS:
            self.model.set_rounding(MEGATRON.but(**{point: True}))
            alone = self.error()
            self.model.set_rounding(ENGINE.but(**{point: False}))
            found[point] = {"alone": alone, "all_but": self.error()}
        self.model.set_rounding(ENGINE)
        for name, other in self._others().items():
            with other():
                found[name] = {"all_but": self.error()}
        found["micro_batch_1"] = {"all_but": self.error(micro_batch=1)}
        found["micro_batch_all"] = {"all_but": self.error(micro_batch=len(self.batch.lengths))}
        prefill = engine_logprobs(self.bench.engine, self.batch)
        found["decoding_against_prefill"] = {"all_but": self._between(self.batch.g, prefill)}
        found["one_thread"] = {"all_but": self._one_thread()}
        return found | {"train_s": self._speed()}

    def _one_thread(self) -> dict[str, float]:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.error()
        finally:
            torch.set_num_threads(threads)

    def _others(self) -> dict[str, Callable[[], Any]]:
        """What both sides do alike as it is: the learner otherwise, one at a time."""
        others: dict[str, Callable[[], Any]] = {
            "activation": self._activation_rounded_once,
            "head": self._fp32_head,
            "log_softmax": self._fp64_log_softmax,
        }
        recipe = self.bench.recipe
        if recipe.precision.learner == "fp8" and resolve(recipe).fp8_backend == "reference":
            others["product_order"] = self._products_in_two_halves
        if recipe.precision.learner_kv == "fp8":
            others["kv"] = self._bf16_kv
        return others

    @contextmanager
    def _activation_rounded_once(self) -> Iterator[None]:
        """silu(gate) * up in FP32, rounded at the end."""
        import torch.nn.functional as F

        config, before = self.model.gpt.config, self.model.gpt.config.activation_func
        hooks = [
            layer.mlp.linear_fc2.register_forward_pre_hook(lambda _m, args: (args[0].bfloat16(),))
            for layer in self.model.gpt.decoder.layers
        ]
        config.activation_func = lambda gate: F.silu(gate.float())
        try:
            yield
        finally:
            config.activation_func = before
            for hook in hooks:
                hook.remove()

    def _fp32_head(self) -> Any:
        """FP32 logits on the learner's side alone."""
        from fp8rl.model import megatron

        return patch.object(self.model.gpt.output_layer, "_forward_impl", megatron._fp32_head)

    def _fp64_log_softmax(self) -> Any:
        import torch

        before = torch.log_softmax
        return patch.object(torch, "log_softmax", lambda x, dim: before(x.double(), dim=dim).float())

    def _products_in_two_halves(self) -> Any:
        """FP8 products as the sum of two FP32 products over half of the groups each."""
        from fp8rl.numerics.backends.reference import Reference
        from fp8rl.numerics.quantise import round_trip

        def halves(_: Any, x: Any, prepared: Any, scheme: Any) -> Any:
            rounded, weight = round_trip(x, scheme, name="activation"), prepared.fused
            middle = x.shape[1] // 256 * 128
            second = rounded[:, middle:] @ weight[:, middle:].t()
            return (second + rounded[:, :middle] @ weight[:, :middle].t()).to(x.dtype)

        return patch.object(Reference, "forward", halves)

    @contextmanager
    def _bf16_kv(self) -> Iterator[None]:
        self.learner.use_kv_scales(0, None)
        try:
            yield
        finally:
            self.learner.use_kv_scales(0, self.bench.scales)

    def _speed(self) -> dict[str, list[float]]:
        """Seconds of a training step with and without parity, in turns; the first round warms up."""
        from fp8rl.model.rounding import ENGINE, MEGATRON

        seconds: dict[str, list[float]] = {"parity": [], "without": []}
        for _ in range(ROUNDS + 1):
            for name, rounding in (("parity", ENGINE), ("without", MEGATRON)):
                self.model.set_rounding(rounding)
                started = perf_counter()
                self.bench.train(self.batch)
                seconds[name].append(perf_counter() - started)
        return {name: values[1:] for name, values in seconds.items()}


def _of(arm: str) -> dict[str, Any]:
    """`Sources.measure` in a process of its own."""
    path = SMOLLM2 / f"{arm}.yaml"
    environment = os.environ | compute_environment(load_recipe(path).recipe)
    command = [sys.executable, "-m", "benchmarks.parity", "--arm", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"{arm}: {done.stderr[-4000:]}")
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def main(arguments: list[str]) -> None:
    """Measures, prints and writes; --arm RECIPE: prints one arm's JSON."""
    if arguments:
        with tempfile.TemporaryDirectory() as temporary:
            print(json.dumps(Sources(Path(arguments[1]), [], Path(temporary)).measure()))
        return
    arms = {arm: _of(arm) for arm in track(ARMS, description="sources of mismatch")}
    cost = {
        f"train_parity_over_without_{arm}": median(
            a / b for a, b in zip(*(found["train_s"][k] for k in ("parity", "without")), strict=True)
        )
        for arm, found in arms.items()
    }
    for arm, found in arms.items():
        for source, values in found.items():
            if source != "train_s":
                print(arm, source, values)
    print(cost)
    print(record.write("parity", {"model": "SmolLM2-135M-Instruct", **cost, "arms": arms}))


if __name__ == "__main__":
    main(sys.argv[1:])
