"""Proof that the live engine holds, and computes with, the weights it was sent.

Bytes are read back from the engine's memory and compared with the manifest. That alone would not
show a packed copy that was forgotten: kernels read those. So the products of some linears are compared
too, on random input, with what the published bytes give.
"""

import random
from collections.abc import Iterable

import torch

from fp8rl.model.manifest import Manifest
from fp8rl.model.names import Slot
from fp8rl.model.published import tensor_digest
from fp8rl.rollout.engine_weights import EngineWeights
from fp8rl.sync.errors import ProofError

# Of the largest result: the sums are in FP32 in other orders, and results are rounded to BF16 once.
_TOLERANCE = 0.01
_ROWS = 8


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
    """Raises ProofError naming those of `names` whose bytes in the engine are not the manifest's."""
    held = weights.read(names)
    wrong = [n for n, t in held.items() if tensor_digest(t) != manifest.tensors[n].sha256]
    if wrong:
        raise ProofError(
            f"the engine does not hold what weight version {manifest.version} says: {', '.join(wrong)}"
        )


@torch.inference_mode()
def check_products(weights: EngineWeights, names: Iterable[str]) -> int:
    """Compares the products of the linears that hold `names`; returns of how many.

    Raises ProofError naming a linear that computes with other weights than it holds.
    """
    names = set(names)
    slots = [slot for slot in weights.table if slot.is_linear and names & set(slot.hf)]
    for slot in slots:
        error = _product_error(weights, slot)
        if not error <= _TOLERANCE:
            raise ProofError(
                f"{slot.vllm} computes with other weights than it holds: its products differ by "
                f"{error:.3g} of the largest"
            )
    return len(slots)


def _product_error(weights: EngineWeights, slot: Slot) -> float:
    """Largest difference of the linear's products from the reference, relative to the largest."""
    layer = weights.linear(slot)
    assert slot.columns is not None
    generator = torch.Generator().manual_seed(slot.columns)
    x = torch.randn(_ROWS, slot.columns, generator=generator).bfloat16().to(layer.weight.device)
    # The precision report is of real forward passes; this is none.
    effective = getattr(layer, "fp8rl_effective", None)
    got = layer.quant_method.apply(layer, x).float()
    if effective is None:
        vars(layer).pop("fp8rl_effective", None)
    else:
        layer.fp8rl_effective = effective
    want = weights.reference_product(slot, x)
    return float((got - want).abs().max() / want.abs().max())
