"""Where the learner rounds to its compute dtype: at the points of the rollout engine, or at its own.

Between the linears an engine and a training framework compute the same functions and round at other
places. Any difference of one BF16 rounding grows to BF16's own noise within some layers, and FP8
amplifies it; so the learner can round where vLLM rounds. docs/numerics.md has what each point costs.

point      vLLM 0.32                                        else, as Megatron-core and torch do
---------  -----------------------------------------------  ---------------------------------------
norm       rounds x / rms, and again its product with the   rounds once, at the end
           weight (vllm/ir/ops/layernorm.py)
residual   a norm reads the sum before it was rounded; the  a norm reads the rounded sum
           stream is rounded (fused_add_rms_norm there)
rotary     FP32 between rounded cosines and one rounding    rounds both products and their sum
           at the end (its kernel rotary_embedding)
attention  its kernel cpu_attention_with_kv_cache           scaled_dot_product_attention: FP32 sums
                                                            in another order
"""

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Rounding:
    """True: the learner rounds there as the rollout engine does."""

    norm: bool
    residual: bool
    rotary: bool
    attention: bool

    def but(self, **points: bool) -> "Rounding":
        """The same with some `points` otherwise."""
        return replace(self, **points)


POINTS = tuple(field.name for field in fields(Rounding))
ENGINE = Rounding(*(True for _ in POINTS))
MEGATRON = Rounding(*(False for _ in POINTS))
