"""Takes a trained policy away: a Hugging Face folder with the weights of a run, in BF16 or FP8.

    <out>/model*.safetensors   BF16; or block-wise FP8: float8_e4m3fn codes with FP32 descales under
                               `<name>_scale_inv`, as DeepSeek-V3 and Qwen3-FP8 are distributed
    <out>/config.json          the model's own; for FP8 with a quantization_config
    <out>/...                  tokenizer, chat template, generation config: copies
    <out>/export.json          the run, weight version and digest that it is of

The weights are the FP32 masters of a checkpoint, rounded once: to what the rollout engine was sent.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fp8rl import checkpoints
from fp8rl.files import put_in_place
from fp8rl.model.dims import ModelDims, read_dims
from fp8rl.model.names import name_table
from fp8rl.model.precision import Decision, Format, PlanRules, make_plan
from fp8rl.model.source import model_folder
from fp8rl.numerics.formats import BLOCK, Scaling, Scheme
from fp8rl.recipe.precision import Linear
from fp8rl.recipe.rules import RecipeError, plan_rules, rollout_fp8
from fp8rl.rollout.cuda_config import quantization_config, unequal_grids
from fp8rl.runs import Run

# What of a model's folder goes along as it is.
_BESIDE = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json"),
)
_SHARD = "5GB"


class ExportFormat(StrEnum):
    BF16 = "bf16"
    FP8 = "fp8"  # block-wise


class ExportError(RuntimeError):
    """There is nothing to export, or the place is taken; the text says what to do."""


@dataclass(frozen=True)
class Exported:
    """folder: where it is. version: of the weights. notes: what a user of the folder should know."""

    folder: Path
    version: int
    notes: list[str]


def export(
    run: Run, fmt: ExportFormat, *, version: int | None = None, out: Path | None = None
) -> Exported:
    """Writes the weights of `run` after iteration `version` (None: its newest checkpoint's).

    out: the folder to make; None: runs/<run>/export/<version>-<format>. It appears whole or not at all.
    Raises ExportError where it is there already and where there is no whole checkpoint, RecipeError
    where the recipe's scaling is not that of the format, UnsupportedModelError as `read_dims`.
    """
    recipe = run.recipe
    if fmt is ExportFormat.FP8 and recipe.precision.scaling is not Scaling.BLOCK:
        raise RecipeError(
            f"precision.scaling={recipe.precision.scaling}: the FP8 checkpoint format has 128x128 "
            "blocks. Export with --format bf16"
        )
    model_dir = model_folder(recipe) or run.folder / "model"
    checkpoint = _checkpoint(run, version)
    version = checkpoint.version
    folder = (out or run.folder / "export" / f"{version:05d}-{fmt}").resolve()
    if folder.exists():
        raise ExportError(f"{folder} is there already: remove it, or name another with --out")
    dims = read_dims(model_dir)
    linear = Linear.FP8 if fmt is ExportFormat.FP8 else Linear.BF16
    plan = make_plan(plan_rules(recipe.precision, linear), dims)
    building = checkpoints.building_folder(folder)
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        _write_weights(building, checkpoint, dims, plan, rollout_fp8(recipe.precision).weight)
        _write_config(building, model_dir, plan)
        for name in _BESIDE:
            if (model_dir / name).is_file():
                shutil.copyfile(model_dir / name, building / name)
        about = {
            "run": run.name,
            "run_id": run.id,
            "weight_version": version,
            "weights_digest": checkpoint.weights_digest,
            "recipe_digest": checkpoint.recipe_digest,
            "format": fmt.value,
        }
        (building / "export.json").write_text(json.dumps(about, indent=1))
        put_in_place(building, folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return Exported(folder, version, _notes(dims, plan))


def _notes(dims: ModelDims, plan: Mapping[str, Decision]) -> list[str]:
    notes = []
    if refused := unequal_grids(dims, plan):
        notes.append(
            f"vLLM's own FP8 loader refuses {len(refused)} of its tensors, as {refused[0]}. For vLLM "
            "export with --format bf16"
        )
    if misread := partial_blocks(dims, plan):
        notes.append(
            f"transformers without a GPU misreads or refuses {len(misread)} of its tensors, as "
            f"{misread[0]}: it takes blocks of equal size. There use --format bf16"
        )
    return notes


def partial_blocks(dims: ModelDims, plan: Mapping[str, Decision]) -> list[str]:
    """FP8 tensors with several blocks along a side of which the last is not whole; each with its shape.

    transformers' Fp8Dequantize divides a side by its number of scales: of 192 rows with two scales it
    takes 96 for each, where the format means 128 and 64.
    """
    return [
        f"{name} ({rows} x {slot.columns})"
        for slot in name_table(dims)
        for name, rows in zip(slot.hf, slot.rows, strict=True)
        if slot.columns is not None and plan[name].format.is_fp8
        if any(size > BLOCK and size % BLOCK for size in (rows, slot.columns))
    ]


def _checkpoint(run: Run, version: int | None) -> checkpoints.Checkpoint:
    found, there = checkpoints.choose(run.folder, version, run.id)
    if found is None:
        wanted = "no whole checkpoint" if version is None else f"no whole checkpoint of step {version}"
        raise ExportError(
            f"run {run.name!r} has {wanted} {there} Take one of those, or have more kept "
            "(checkpoint.every, keep_last, keep_best)"
        )
    return found


def _write_weights(
    building: Path,
    checkpoint: checkpoints.Checkpoint,
    dims: ModelDims,
    plan: Mapping[str, Decision],
    scheme: Scheme,
) -> None:
    from huggingface_hub import save_torch_state_dict

    from fp8rl.learner.checkpoint import load, weights_digest
    from fp8rl.learner.publishing import published_tensors
    from fp8rl.model.megatron import PolicyModel

    tensors, _ = load(checkpoint.folder)
    model = PolicyModel(dims, make_plan(PlanRules(Format.BF16), dims))
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[f"model/{name}"])
    found = weights_digest(model.export())
    if found != checkpoint.weights_digest:
        raise ExportError(
            f"{checkpoint.folder} gives weights {found[:12]}, its manifest says "
            f"{checkpoint.weights_digest[:12]}: `fp8rl verify` says more"
        )
    weights = dict(published_tensors(model, plan, scheme, checkpoint.version))
    save_torch_state_dict(weights, building, max_shard_size=_SHARD)


def _write_config(building: Path, model_dir: Path, plan: Mapping[str, Decision]) -> None:
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    config["dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype"] = "bfloat16"
    quantization = quantization_config(plan)
    if quantization is not None:
        # vLLM reads ignored_layers, transformers modules_to_not_convert.
        kept = [*quantization["ignored_layers"], "lm_head"]
        config["quantization_config"] = quantization | {"fmt": "e4m3", "modules_to_not_convert": kept}
    (building / "config.json").write_text(json.dumps(config, indent=2))
