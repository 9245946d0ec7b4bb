"""Our block scaling against other engines' rules, and what it costs: figures over a model's weights.

    compare_rules       do codes, descales and dequantised values of these tensors agree?
    scale_equality      for which amax at all do a rule's scales equal ours? Every BF16 amax is tried,
                        and the FP32 amax beside powers of two, where rules round apart.
    probe               blocks where rules part: zero, tiny, huge, beside a power of two
    quantisation_error  what a tensor loses, with FP32 and with power-of-two scales

All are functions of tensors. Scales are descales unless a factor is named; "one ulp apart" means
neighbours among FP32 numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fp8rl.model.dims import ModelDims
from fp8rl.model.precision import layer_of
from fp8rl.numerics import formats
from fp8rl.numerics.engine_rules import (
    E4M3_MAX,
    RULES,
    Blocks,
    EngineRule,
    Operand,
    Scales,
    cut,
    decode,
)
from fp8rl.numerics.formats import BLOCK, ScaleRule, Scaling, Scheme
from fp8rl.numerics.quantise import quantise, round_trip, scale_and_inverse

MODES = (ScaleRule.FP32, ScaleRule.POW2)
_LARGEST_CODE = 0x7E
_TINY = torch.finfo(torch.float32).tiny


def ulps_apart(a: Tensor, b: Tensor) -> Tensor:
    """Steps between FP32 numbers from `a` to `b`, both positive (int64)."""
    return (a.view(torch.int32).long() - b.view(torch.int32).long()).abs()


@dataclass
class Agreement:
    """How far a rule agrees with ours. Scales are descales, one a block.

    largest_difference: of dequantised values, relative to their block's amax; inf with NaN codes.
    """

    blocks: int = 0
    scales_equal: int = 0
    scales_one_ulp: int = 0
    scales_further: int = 0
    elements: int = 0
    codes_differ: int = 0
    codes_nan: int = 0
    values_differ: int = 0
    largest_difference: float = 0.0

    def add(self, other: "Agreement") -> None:
        """Counts `other`, of other tensors, in."""
        for name, value in vars(other).items():
            joined = max if name == "largest_difference" else (lambda a, b: a + b)
            setattr(self, name, joined(getattr(self, name), value))

    @property
    def values_equal(self) -> bool:
        return self.values_differ == 0

    def shares(self) -> dict[str, Any]:
        """Counts and shares, for JSON."""
        figures = asdict(self) | {"values_equal": self.values_equal}
        for name in ("scales_equal", "scales_one_ulp", "scales_further"):
            figures[f"{name}_share"] = figures[name] / max(self.blocks, 1)
        for name in ("codes_differ", "values_differ"):
            figures[f"{name}_share"] = figures[name] / max(self.elements, 1)
        return figures


def scheme_of(rule: EngineRule) -> Scheme:
    """Our scheme for what `rule` is compared on."""
    weights = rule.operand is Operand.WEIGHTS
    make = formats.weight_scheme if weights else formats.activation_scheme
    return make(Scaling.BLOCK, rule=ScaleRule.POW2 if rule.pow2 else ScaleRule.FP32)


def _tile(operand: Operand) -> tuple[int, int]:
    return (BLOCK, BLOCK) if operand is Operand.WEIGHTS else (1, BLOCK)


def _agree(
    ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], blocks: Blocks, amax: Tensor
) -> Agreement:
    """ours, theirs: codes [R, C] and descales [blocks]."""
    (our_codes, our_scales), (codes, scales) = ours, theirs
    apart = ulps_apart(scales, our_scales)
    result = Agreement(
        blocks=scales.numel(),
        scales_equal=int((apart == 0).sum()),
        scales_one_ulp=int((apart == 1).sum()),
        scales_further=int((apart > 1).sum()),
        elements=codes.numel(),
        codes_differ=int((codes != our_codes).sum()),
        codes_nan=int(((codes & 0x7F) == 0x7F).sum()),
    )
    if result.codes_differ or result.scales_equal < result.blocks:
        difference = decode(codes).mul_(blocks.spread(scales))
        difference -= decode(our_codes).mul_(blocks.spread(our_scales))
        result.values_differ = int((difference != 0).sum())
        relative = difference.abs_() / blocks.spread(amax.clamp(min=_TINY))
        result.largest_difference = float(torch.where(relative.isnan(), torch.inf, relative).max())
    return result


def compare_tensor(x: Tensor, rules: Sequence[EngineRule], *, name: str = "tensor") -> list[Agreement]:
    """How far each of `rules`, all for the same operand, agrees with ours on `x` [R, C]."""
    blocks = cut(x, _tile(rules[0].operand))
    amax = blocks.amax()
    ours: dict[bool, tuple[Tensor, Tensor]] = {}
    results: list[tuple[EngineRule, Scales, Agreement]] = []
    for rule in rules:
        if rule.pow2 not in ours:
            quantised = quantise(x, scheme_of(rule), name=name)
            ours[rule.pow2] = (quantised.codes, quantised.scale_inv.flatten())
        top = blocks.amax(pads_with_last=True) if rule.pads_with_last else amax
        scales = rule.scales(top, x.dtype)
        # The same factors and descales make the same codes: no need to cast once more.
        agreement = next((done for r, of_r, done in results if _same_cast(rule, scales, r, of_r)), None)
        if agreement is None:
            codes = blocks.whole(rule.codes(blocks.values, scales))
            agreement = _agree(ours[rule.pow2], (codes, scales.descale), blocks, amax)
        results.append((rule, scales, agreement))
    return [agreement for _, _, agreement in results]


def _same_cast(a: EngineRule, of_a: Scales, b: EngineRule, of_b: Scales) -> bool:
    # Without a clamp the cast itself saturates; only with factors that overshoot could that matter,
    # and such a rule has factors of its own.
    same = (a.pow2, a.divides) == (b.pow2, b.divides)
    return same and torch.equal(of_a.factor, of_b.factor) and torch.equal(of_a.descale, of_b.descale)


def compare_rules(
    tensors: Iterable[tuple[str, Tensor]], operand: Operand
) -> list[tuple[EngineRule, Agreement]]:
    """How far each rule for `operand` agrees with ours over all `tensors`."""
    rules = [rule for rule in RULES if rule.operand is operand]
    totals = [Agreement() for _ in rules]
    for name, x in tensors:
        for total, one in zip(totals, compare_tensor(x, rules, name=name), strict=True):
            total.add(one)
    return list(zip(rules, totals, strict=True))


# The amax of any block that matters lies well inside these.
_USUAL = (2.0**-13, 2.0**9)
# Powers of two whose blocks lie in the usual range, and how many FP32 numbers are tried on either
# side of each: at these sizes an ulp of log2 is at most 15 ulps of the number.
_POWERS = range(-21, 1)
_BESIDE = 64


@dataclass(frozen=True)
class ScaleEquality:
    """For which amax a rule's factor and descale equal ours.

    zero: for a block of zeros. equal_from: smallest BF16 amax from which on all are equal, None where
    some in the usual range are not. bf16_share: share of the BF16 amax in the usual range that are
    equal. fp32_share: of FP32 amax, evenly over one binade. most_ulps: between descales there.
    beside_powers: by exponent k, how many FP32 amax beside 448 * 2^k are not equal.
    """

    zero: bool
    equal_from: float | None
    bf16_share: float
    fp32_share: float
    most_ulps: int
    beside_powers: dict[int, int]


def _scales_differ(rule: EngineRule, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    factor, descale = scale_and_inverse(amax, scheme_of(rule), dtype)
    theirs = rule.scales(amax, dtype)
    apart = ulps_apart(theirs.descale, descale)
    return (theirs.factor != factor) | (apart != 0), apart


def scale_equality(rule: EngineRule, powers: Iterable[int] = _POWERS) -> ScaleEquality:
    """Tries every BF16 amax, a binade of FP32 amax, and FP32 amax beside each of the powers of two."""
    amax = (torch.arange(0x7F80, dtype=torch.int32) << 16).view(torch.float32)
    differ, _ = _scales_differ(rule, amax, torch.bfloat16)
    unequal = differ.nonzero().flatten().tolist()
    first = unequal[-1] + 1 if unequal and unequal[-1] > 0 else 1
    usual = (amax >= _USUAL[0]) & (amax < _USUAL[1])
    binade = (torch.arange(0, 1 << 23, 61, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    in_binade, apart = _scales_differ(rule, binade, torch.float32)
    beside = {}
    steps = torch.arange(-_BESIDE, _BESIDE + 1, dtype=torch.int32)
    for k in powers if rule.pow2 else ():
        near = torch.tensor(E4M3_MAX * 2.0**k).view(torch.int32) + steps
        count = int(_scales_differ(rule, near.view(torch.float32), torch.float32)[0].sum())
        if count:
            beside[k] = count
    return ScaleEquality(
        zero=not bool(differ[0]),
        equal_from=None if bool(differ[usual].any()) else float(amax[first]),
        bf16_share=float((~differ[usual]).float().mean()),
        fp32_share=float((~in_binade).float().mean()),
        most_ulps=int(apart.max()),
        beside_powers=beside,
    )


@dataclass(frozen=True)
class Probe:
    """A synthetic block and what a rule makes of it, beside ours. Errors: relative, Frobenius."""

    block: str
    descale: float
    our_descale: float
    codes_differ_share: float
    codes_nan: int
    values_equal: bool
    error: float
    our_error: float


def probe_blocks(operand: Operand) -> dict[str, Tensor]:
    """Normal values scaled to a given amax, the first few of them zero, and a block of zeros."""
    noise = torch.randn(_tile(operand), generator=torch.Generator().manual_seed(0))
    noise[:, 0] = 0.0
    noise /= noise.abs().max()
    above = torch.nextafter(torch.tensor(E4M3_MAX * 2.0**-10), torch.tensor(1.0))
    tops = {
        "zeros": 0.0,
        "amax 8e-6": 8e-6,
        "amax 1e-38": 1e-38,
        "amax 3e38": 3e38,
        "amax just above 448 * 2^-10": float(above),
    }
    return {name: (noise * top).float() for name, top in tops.items()}


def probe(rule: EngineRule) -> list[Probe]:
    """What `rule` and ours make of blocks where rules part."""
    results = []
    for name, x in probe_blocks(rule.operand).items():
        ours = quantise(x, scheme_of(rule), name=name)
        blocks = cut(x, _tile(rule.operand))
        scales = rule.scales(blocks.amax(), x.dtype)
        codes = rule.codes(blocks.values, scales).view(x.shape)
        agreement = _agree(
            (ours.codes, ours.scale_inv.flatten()), (codes, scales.descale), blocks, blocks.amax()
        )
        results.append(
            Probe(
                name,
                float(scales.descale),
                float(ours.scale_inv),
                agreement.codes_differ / codes.numel(),
                agreement.codes_nan,
                agreement.values_equal,
                _relative_error(decode(codes).double() * scales.descale.double(), x),
                _relative_error(ours.values().double() * ours.scale_inv.double(), x),
            )
        )
    return results


def _relative_error(y: Tensor, x: Tensor) -> float:
    """|y - x| / |x|, Frobenius, in float64; 0 where both are zero."""
    norm = float(torch.linalg.vector_norm(x.double()))
    error = float(torch.linalg.vector_norm(y.double() - x.double()))
    return error / norm if norm else error


@dataclass(frozen=True)
class QuantisationError:
    """What a tensor loses when it is quantised and dequantised.

    frobenius: |y - x| / |x|. largest: the largest |y - x| relative to its own block's amax.
    underflow: share of the values other than zero that become zero. saturation: share of the values
    that lie at the largest code.
    """

    frobenius: float
    largest: float
    underflow: float
    saturation: float


def quantisation_error(x: Tensor, scheme: Scheme) -> QuantisationError:
    """The error of `x` [R, C] under our quantiser; `scheme` has a tile of whole numbers."""
    high, wide = scheme.tile
    assert high is not None
    assert wide is not None
    x = x.float()
    y = round_trip(x, scheme)
    codes = quantise(x, scheme).codes
    frobenius = _relative_error(y, x)
    blocks = cut(y.sub_(x), (high, wide))
    amax = cut(x, (high, wide)).amax().clamp_(min=_TINY)
    return QuantisationError(
        frobenius,
        float((blocks.amax() / amax).max()),
        int(((codes & 0x7F == 0) & (x != 0)).sum()) / max(int((x != 0).sum()), 1),
        int((codes & 0x7F == _LARGEST_CODE).sum()) / max(x.numel(), 1),
    )


@dataclass(frozen=True)
class TensorError:
    """Errors of one projection, by scale mode."""

    name: str
    layer: int
    kind: str
    shape: tuple[int, int]
    errors: dict[str, QuantisationError]


def tensor_error(name: str, x: Tensor) -> TensorError:
    """Errors of the weight `name` in 128 x 128 blocks, with FP32 and with power-of-two scales."""
    layer = layer_of(name)
    return TensorError(
        name,
        -1 if layer is None else layer,
        name.removesuffix(".weight").rpartition(".")[2].removesuffix("_proj"),
        (x.shape[0], x.shape[1]),
        {m: quantisation_error(x, formats.weight_scheme(Scaling.BLOCK, rule=m)) for m in MODES},
    )


ACTIVATIONS_FROM = ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight")


def first_layer_inputs(weights: Mapping[str, Tensor], dims: ModelDims, tokens: int = 1024) -> Tensor:
    """Activations that need no forward pass: what q, k and v of the first layer read.

    BF16 [tokens, hidden]: normalised embeddings of `tokens` tokens, evenly spread over the vocabulary.
    """
    embeddings, norm = ACTIVATIONS_FROM
    table = weights[embeddings]
    rows = torch.linspace(0, len(table) - 1, min(tokens, len(table))).round().long()
    x = torch.nn.functional.rms_norm(table[rows].float(), (dims.hidden,), eps=dims.norm_eps)
    return (x * weights[norm].float()).bfloat16()


@dataclass
class ParityReport:
    """All figures of a report."""

    agreement: list[tuple[EngineRule, Agreement]]
    equality: list[tuple[EngineRule, ScaleEquality]]
    probes: list[tuple[EngineRule, list[Probe]]]
    errors: list[TensorError]

    def to_json(self) -> dict[str, Any]:
        """The report as dicts and lists."""
        return {
            "rules": [_named(rule) | agreement.shares() for rule, agreement in self.agreement],
            "scale_equality": [_named(rule) | asdict(one) for rule, one in self.equality],
            "probes": [
                _named(rule) | {"blocks": [asdict(one) for one in probes]}
                for rule, probes in self.probes
            ],
            "errors": [asdict(error) for error in self.errors],
        }


def _named(rule: EngineRule) -> dict[str, Any]:
    mode = ScaleRule.POW2 if rule.pow2 else ScaleRule.FP32
    return {"rule": rule.name, "engine": rule.engine, "operand": rule.operand, "scales": mode}


def make_report(weights: Mapping[str, Tensor], names: Sequence[str], dims: ModelDims) -> ParityReport:
    """The report over the weights `names` of `weights` (Hugging Face names, as a learner holds them).

    Weights are taken as FP32 masters, whatever they are stored in.
    """
    inputs = [("inputs of layer 0", first_layer_inputs(weights, dims))]
    threads = torch.get_num_threads()
    # Thousands of small passes: on busy cores a second thread makes them ten times slower.
    torch.set_num_threads(1)
    try:
        masters = ((name, weights[name].float()) for name in names)
        return ParityReport(
            compare_rules(masters, Operand.WEIGHTS) + compare_rules(inputs, Operand.ACTIVATIONS),
            [(rule, scale_equality(rule)) for rule in RULES],
            [(rule, probe(rule)) for rule in RULES],
            [tensor_error(name, weights[name]) for name in names],
        )
    finally:
        torch.set_num_threads(threads)
