"""What the learner publishes: master weights requantised into the rollout's formats, one by one."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from fp8rl import faults
from fp8rl.model.manifest import SCALE_FORMAT, SCALE_SUFFIX, Spec
from fp8rl.model.megatron import PolicyModel
from fp8rl.model.precision import Decision
from fp8rl.numerics.formats import Scheme


def published_specs(model: PolicyModel, plan: Mapping[str, Decision], scheme: Scheme) -> list[Spec]:
    """What the rollout engine is to hold, by Hugging Face name, in the order of the name table.

    plan: the rollout's. scheme: of its FP8 weights: float8_e4m3fn codes, and FP32 descales under
    `<name>_scale_inv`. The rest: BF16.
    """
    specs = []
    for slot in model.table:
        fmt = plan[slot.hf[0]].format
        for name, rows in zip(slot.hf, slot.rows, strict=True):
            shape = (rows,) if slot.columns is None else (rows, slot.columns)
            if not fmt.is_fp8:
                specs.append(Spec(name, shape, "bfloat16", fmt))
                continue
            scale = name + SCALE_SUFFIX
            specs.append(Spec(name, shape, "float8_e4m3fn", fmt, scale))
            specs.append(Spec(scale, scheme.scale_shape(*shape), "float32", SCALE_FORMAT))
    return specs


def published_tensors(
    model: PolicyModel, plan: Mapping[str, Decision], scheme: Scheme, version: int | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `published_specs`, one after the other: all at once they would be a copy of the
    model. version: of the weights, by which a test names a scale that is to come out wrong."""
    for slot in model.table:
        if not plan[slot.hf[0]].format.is_fp8:
            for name, master in model.export_slot(slot).items():
                yield name, master.bfloat16()
            continue
        for name, codes in model.quantised(slot, scheme).items():
            yield name, codes.float8()
            scales = name + SCALE_SUFFIX
            factor = faults.factor(f"learner:scale:{version}:{scales}")
            yield scales, codes.scale_inv if factor == 1 else codes.scale_inv * factor
