"""KV scales from the learner's own q, k and v."""

import torch
from megatron.core import parallel_state

from fp8rl.learner.batch import Batch
from fp8rl.model.kv_observer import KvObserver
from fp8rl.model.kv_scales import KvScales
from fp8rl.model.megatron import PolicyModel
from fp8rl.recipe.rules import kv_percentile
from fp8rl.recipe.schema import Recipe


@torch.no_grad()
def calibrate(
    model: PolicyModel,
    recipe: Recipe,
    batch: Batch,
    version: int,
    source: str,
    tokens_available: int | None = None,
) -> KvScales:
    """KV scales of weight `version`, which `model` holds, over prompt and response tokens of `batch`.

    source, tokens_available: which tokens those are, of how many (None: all); kept with the scales.
    Those that `model` had in use are not any more. Raises KvScalesError as `KvObserver.scales`.
    """
    precision = recipe.precision
    observer = KvObserver(model.dims.layers, kv_percentile(precision))
    model.set_kv_scales(None)  # of other weights: they must not colour what the layers above see
    model.set_observer(observer)
    try:
        for part in batch.split(recipe.learner.micro_batch):
            observer.start_batch(part.valid)
            model(part.tokens)
    finally:
        model.set_observer(None)
    observer.merge(data_parallel=parallel_state.get_data_parallel_group())
    return observer.scales(
        margin=precision.kv_margin,
        version=version,
        source=source,
        side="learner",
        tokens_available=tokens_available,
    )
