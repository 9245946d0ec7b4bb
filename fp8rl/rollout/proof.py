"""Proof that the live engine holds, and computes with, the weights it was sent.

Bytes are read back from the engine's memory and compared with the manifest. That alone would not
show a packed copy that was forgotten: kernels read those. So the products of some linears are compared
too, with what the published bytes give. Their inputs are rows with a single one: each product is then a
column of the weight, to the last bit but one, and one training step shows, which in a sum of many
products would not.
"""

import random
from collections.abc import Iterable

import torch

from fp8rl.model.manifest import Manifest
from fp8rl.model.names import Slot
from fp8rl.model.published import differing
from fp8rl.rollout.engine_weights import EngineWeights
from fp8rl.sync.errors import ReadBackError

# One unit of BF16's last place: a product has no sum that could round, but an FP8 one is scaled.
_TOLERANCE = 2.0**-7
_COLUMNS = 16


def sample_names(manifest: Manifest, count: int | None) -> list[str]:
    """`count` of the manifest's tensors (all where None), others for each version.

    FP8 tensors come with their scales.
    """
    names = list(manifest.tensors)
    if count is not None and count < len(names):
        chosen = set(random.Random(manifest.version).sample(names, count))
        pairs = {e.name: e.scale for e in manifest.tensors.values() if e.scale is not None}
        chosen |= {scale for name, scale in pairs.items() if name in chosen}
        chosen |= {name for name, scale in pairs.items() if scale in chosen}
        names = [name for name in names if name in chosen]
    return names


def read_back(weights: EngineWeights, manifest: Manifest, names: Iterable[str]) -> None:
    """Raises ReadBackError naming those of `names` whose bytes in the engine are not the manifest's."""
    wrong = differing(manifest, weights.read(names))
    if wrong:
        raise ReadBackError(
            f"the engine does not hold what weight version {manifest.version} says: {', '.join(wrong)}"
        )


@torch.inference_mode()
def check_products(weights: EngineWeights, names: Iterable[str], version: int) -> None:
    """Compares the products of the linears that hold `names`. version: with it the columns change that
    are looked at.

    Raises ReadBackError naming a linear that computes with other weights than it holds.
    """
    names = set(names)
    for slot in weights.table:
        if not slot.is_linear or names.isdisjoint(slot.hf):
            continue
        wrong = _wrong_products(weights, slot, version)
        if wrong:
            raise ReadBackError(
                f"{slot.vllm} computes with other weights than it holds: {wrong} products of "
                f"{_COLUMNS} columns differ"
            )


def _wrong_products(weights: EngineWeights, slot: Slot, version: int) -> int:
    """How many products of the linear with single columns of its weight are not the reference's."""
    layer = weights.linear(slot)
    assert slot.columns is not None
    columns = random.Random(f"{version} {slot.vllm}").sample(range(slot.columns), _COLUMNS)
    x = torch.zeros(_COLUMNS, slot.columns, dtype=torch.bfloat16, device=layer.weight.device)
    x[range(_COLUMNS), columns] = 1
    # The precision report is of real forward passes; this is none.
    effective = getattr(layer, "fp8rl_effective", None)
    got = layer.quant_method.apply(layer, x).float()
    if effective is None:
        vars(layer).pop("fp8rl_effective", None)
    else:
        layer.fp8rl_effective = effective
    want = weights.reference_product(slot, x)
    return int(((got - want).abs() > _TOLERANCE * want.abs()).sum())
