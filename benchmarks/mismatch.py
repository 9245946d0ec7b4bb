"""The mismatch of every arm on SmolLM2-135M before any update, as results/mismatch.json.

Each arm three times: as it is, without parity (the learner rounds as Megatron-core does, and keeps K
and V in BF16: how all arms were before there was parity), and with power-of-two scales.
"""

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.pipeline import ARMS, CONFIGS, measure_arms
from fp8rl.device import resolve
from fp8rl.recipe.load import load_recipe

SMOLLM2 = CONFIGS / "smollm2"
FP8_ARMS = tuple(arm for arm in ARMS if "fp8" in arm)
WITHOUT = ("precision.parity=false", "precision.learner_kv=bf16")
POW2 = tuple(
    f"precision.{side}_scales.{kind}=pow2"
    for side in ("rollout", "learner")
    for kind in ("weights", "activations")
)


def panel(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The mismatch of each arm, under its name with underscores."""
    return {arm.replace("-", "_"): result["mismatch"] for arm, result in arms.items()}


def main() -> None:
    """Measures, prints and writes."""
    found = {
        "parity": panel(measure_arms(SMOLLM2, "--mismatch", label="parity")),
        "without_parity": panel(measure_arms(SMOLLM2, "--mismatch", *WITHOUT, label="without parity")),
        "power_of_two_scales": panel(
            measure_arms(SMOLLM2, "--mismatch", *POW2, arms=FP8_ARMS, label="power-of-two scales")
        ),
    }
    table = Table(title="token_mult_prob_error on SmolLM2-135M", title_justify="left")
    for heading in ("arm", *found):
        table.add_column(heading, justify="right" if table.columns else "left")
    for arm in found["parity"]:
        errors = [panel.get(arm, {}).get("token_mult_prob_error") for panel in found.values()]
        table.add_row(arm, *("" if error is None else f"{error:.5f}" for error in errors))
    Console().print(table)
    recipe = load_recipe(SMOLLM2 / "fp8-e2e-kv.yaml").recipe
    about = {"fp8_backend": resolve(recipe).fp8_backend, "model": "SmolLM2-135M-Instruct"}
    # The arms as they are stand at the top.
    print(record.write("mismatch", {**about, **found.pop("parity"), **found}))


if __name__ == "__main__":
    main()
