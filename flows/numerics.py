"""`fp8rl numerics`: our block scaling beside other engines' rules, and what it costs a model."""

import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fp8rl.files import write_atomic
from fp8rl.numerics.engine_rules import Operand
from fp8rl.numerics.formats import Scaling
from fp8rl.numerics.parity import (
    ParityReport,
    Probe,
    TensorError,
)
from fp8rl.parity_report import (
    KINDS,
    NO_FLOOR,
    mode_name,
    of_kind,
    of_recipe,
    plain,
    plot,
    share,
)
from fp8rl.recipe.load import LoadedRecipe

FOLDER = "numerics"
_WORST = 6


def numerics(
    loaded: LoadedRecipe, console: Console, *, weights: Path | None = None, out: Path | None = None
) -> None:
    """Makes the report over the weights that the recipe puts in FP8, prints it and writes it to `out`.

    weights: a Hugging Face folder to take instead of the recipe's model. out: runs/numerics/<arm>
    where None. Raises RecipeError where there is nothing in FP8 or the weights cannot be read.
    """
    made = of_recipe(loaded, weights=weights)
    report, recipe = made.report, loaded.recipe
    where = out or Path(recipe.runs_dir).resolve() / FOLDER / (recipe.arm or "recipe")
    figures = plain(made.head | report.to_json())
    write_atomic(where / "numerics.json", json.dumps(figures, indent=1, allow_nan=False).encode())
    plot(report, where / "numerics.png", made.title)

    if recipe.precision.scaling is not Scaling.BLOCK:
        _say(console, f"The recipe scales by {recipe.precision.scaling}; this report is on blocks.")
    _say(console, "{tensors} weights ({elements:,} values) of {weights}".format(**made.head))
    console.print(_agreement_table(report))
    for line in made.head["verdict"]:
        console.print(line, markup=False, highlight=False)
    for table in (_probe_table(report), _kinds_table(report.errors), _worst_table(report.errors)):
        console.print(table)
    _say(console, f"All figures: {where / 'numerics.json'}; as a picture: {where / 'numerics.png'}")


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left")
    return table


def _agreement_table(report: ParityReport) -> Table:
    table = _table(
        "Our 128 x 128 block rule beside other engines'",
        *("rule", "scales", "equal", "1 ulp", "further", "codes differ", "values", "proven from amax"),
    )
    equality = {(rule.name, rule.operand, rule.pow2): one for rule, one in report.equality}
    for rule, one in report.agreement:
        blocks = max(one.blocks, 1)
        equal_from = equality[rule.name, rule.operand, rule.pow2].equal_from
        if equal_from is None:
            proven = "none"
        else:
            proven = "any" if equal_from < NO_FLOOR else f"{equal_from:.1e}"
        table.add_row(
            rule.engine + (" (activations)" if rule.operand is Operand.ACTIVATIONS else ""),
            mode_name(rule),
            *(share(n / blocks) for n in (one.scales_equal, one.scales_one_ulp, one.scales_further)),
            share(one.codes_differ / max(one.elements, 1)),
            "equal" if one.values_equal else "differ",
            proven,
        )
    return table


def _cell(one: Probe) -> str:
    parts = []
    ratio = one.descale / one.our_descale
    if ratio != 1:
        parts.append("scale by ulps" if abs(ratio - 1) < 1e-5 else f"scale x{ratio:.2g}")
    if one.codes_nan:
        parts.append("NaN codes")
    elif one.codes_differ_share:
        parts.append(f"{one.codes_differ_share:.0%} of codes")
        lost = f"error {one.error:.0%}" if one.error > 2 * one.our_error else ""
        parts.append("same values" if one.values_equal else lost)
    return ", ".join(filter(None, parts)) or "="


def _probe_table(report: ParityReport) -> Table:
    blocks = [one.block for one in report.probes[0][1]]
    table = _table("Blocks where rules part ( = : as ours)", "rule", "scales", *blocks)
    same = []
    for rule, probes in report.probes:
        cells = [_cell(one) for one in probes]
        if set(cells) == {"="}:
            same.append(f"{rule.engine} ({mode_name(rule)})")
        else:
            table.add_row(rule.engine, mode_name(rule), *cells)
    table.caption = "As ours everywhere: " + ", ".join(dict.fromkeys(same))
    table.caption_justify = "left"
    return table


def _kinds_table(errors: list[TensorError]) -> Table:
    table = _table(
        "What quantisation loses, FP32 / power-of-two scales",
        *("projection", "weights", "relative error", "worst layer", "largest / amax"),
        *("become zero", "at largest code"),
    )
    for kind in KINDS:
        alike = of_kind(errors, kind)
        if not alike:
            continue

        def both(fmt: str, figure: str, reduce: Any, of: list[TensorError] = alike) -> str:
            values = (
                reduce(getattr(error.errors[mode], figure) for error in of) for mode in ("fp32", "pow2")
            )
            return " / ".join(fmt.format(value) for value in values)

        table.add_row(
            kind,
            str(len(alike)),
            both("{:.3%}", "frobenius", statistics.fmean),
            both("{:.3%}", "frobenius", max),
            both("{:.2%}", "largest", max),
            both("{:.1e}", "underflow", statistics.fmean),
            both("{:.1e}", "saturation", statistics.fmean),
        )
    return table


def _worst_table(errors: list[TensorError]) -> Table:
    table = _table(
        f"The {min(_WORST, len(errors))} weights that lose most, FP32 / power-of-two scales",
        *("weight", "shape", "relative error", "largest / amax", "become zero"),
    )
    worst = sorted(errors, key=lambda e: -max(one.frobenius for one in e.errors.values()))
    for error in worst[:_WORST]:
        fp32, pow2 = error.errors["fp32"], error.errors["pow2"]
        table.add_row(
            error.name,
            "{} x {}".format(*error.shape),
            f"{fp32.frobenius:.3%} / {pow2.frobenius:.3%}",
            f"{fp32.largest:.2%} / {pow2.largest:.2%}",
            f"{fp32.underflow:.1e} / {pow2.underflow:.1e}",
        )
    return table
