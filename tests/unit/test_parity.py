"""Other engines' scale rules, re-stated, and the report that holds ours against them."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from flows.cli import app
from fp8rl.model.dims import dims_from_hf
from fp8rl.model.tiny import hf_config
from fp8rl.numerics.engine_rules import RULES, EngineRule, Operand, cut, decode
from fp8rl.numerics.formats import BLOCK, E4M3, ScaleRule, Scaling, Scheme, weight_scheme
from fp8rl.numerics.parity import (
    Agreement,
    compare_rules,
    compare_tensor,
    first_layer_inputs,
    probe,
    quantisation_error,
    scale_equality,
    tensor_error,
)
from fp8rl.numerics.quantise import quantise
from fp8rl.recipe.schema import TinyModel
from tests import oracle

F32 = np.float32
ONE_ELEMENT = Scheme(E4M3, (1, 1), ScaleRule.POW2, small_block_dtype=True)
TINY = ["numerics", "configs/tiny/fp8-e2e.yaml"]
SMALL = ["model.tiny.layers=2", "model.tiny.hidden_size=128", "model.tiny.intermediate_size=192"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As the report: two threads on busy cores wait for each other at every small operation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rule_of(name: str, pow2: bool = False, operand: Operand | None = None) -> EngineRule:
    found = [r for r in RULES if r.name == name and r.pow2 is pow2 and operand in (None, r.operand)]
    return found[0]


def scales_of(name: str, amax: float, pow2: bool = False, dtype=torch.float32) -> tuple[float, float]:
    """(factor, descale) of one block."""
    scales = rule_of(name, pow2).scales(torch.tensor([amax], dtype=torch.float32), dtype)
    return float(scales.factor), float(scales.descale)


def normal(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def agreement(x: torch.Tensor, name: str, pow2: bool = False) -> Agreement:
    return compare_tensor(x, [rule_of(name, pow2)])[0]


# Each rule on small cases, worked out by hand.


@pytest.mark.parametrize("name", ["te-kernel", "te-reference"])
def test_transformer_engine(name):
    assert scales_of(name, 448.0) == (1.0, 1.0)
    assert scales_of(name, 3.5) == (128.0, 1 / 128)
    assert scales_of(name, 0.0) == (1.0, 1.0)
    assert scales_of(name, 0.0, pow2=True) == (1.0, 1.0)
    factor, descale = scales_of(name, 3.0)
    assert factor == F32(448) / F32(3)
    assert descale == F32(1) / F32(factor)
    assert scales_of(name, 3.0, pow2=True) == (128.0, 1 / 128)  # 149.3 rounded down
    assert scales_of(name, 3.5, pow2=True) == (128.0, 1 / 128)  # exactly 128
    assert scales_of(name, 3.6, pow2=True) == (64.0, 1 / 64)  # 124.4
    for dtype in (torch.float32, torch.bfloat16):
        largest = torch.finfo(dtype).max  # 448 / 1e-37 overflows
        assert scales_of(name, 1e-37, dtype=dtype)[0] == largest
        assert scales_of(name, 1e-37, pow2=True, dtype=dtype)[0] == 2.0**127


@pytest.mark.parametrize("name", ["vllm-weights", "vllm-weights-gpu"])
def test_vllm_weights(name):
    floor = F32(1e-4) / F32(448) if name == "vllm-weights" else F32(1e-4) * F32(1 / 448)
    for amax in (0.0, 8e-6, 1e-4):
        assert scales_of(name, amax)[1] == floor
        assert scales_of(name, amax, pow2=True) == (2.0**22, 2.0**-22)  # 2^-22.1 rounded up
    assert scales_of(name, 3.5) == (128.0, 1 / 128)
    assert scales_of(name, 3.6, pow2=True) == (64.0, 1 / 64)


def test_vllm_divides_where_the_gpu_multiplies():
    amax = torch.linspace(0.1, 0.2, 1001)
    divided = rule_of("vllm-weights").scales(amax, torch.float32).descale.numpy()
    multiplied = rule_of("vllm-weights-gpu").scales(amax, torch.float32).descale.numpy()
    np.testing.assert_array_equal(divided, amax.numpy() / F32(448))
    np.testing.assert_array_equal(multiplied, amax.numpy() * (F32(1) / F32(448)))
    assert (divided != multiplied).any()


def test_vllm_activations():
    assert scales_of("vllm-activations", 0.0)[1] == F32(1e-10) / F32(448)
    # The scale has a floor of 1e-10 of its own, rounded up to 2^-33.
    assert scales_of("vllm-activations", 0.0, pow2=True)[1] == 2.0**-33
    rule = rule_of("vllm-activations")
    x = normal(1, BLOCK)
    scales = rule.scales(x.abs().amax(1), torch.float32)
    quotient = x.numpy() / scales.descale.numpy()[:, None]  # divided, not multiplied
    np.testing.assert_array_equal(rule.codes(x, scales).numpy(), oracle_codes(quotient))


def test_nemo_rl():
    assert scales_of("nemo-rl", 0.0) == (1.0, 1.0)
    factor, descale = scales_of("nemo-rl", 3.0)
    assert factor == F32(1) / F32(3) * F32(448)  # torch's number / tensor
    assert descale == F32(1) / F32(factor)
    amax = torch.rand(1000) + 0.1
    np.testing.assert_array_equal(
        (448.0 / amax).numpy(), rule_of("nemo-rl").scales(amax, amax.dtype).factor.numpy()
    )
    assert scales_of("nemo-rl", 3.6, pow2=True) == (64.0, 1 / 64)
    assert scales_of("nemo-rl", 3.5, pow2=True) == (128.0, 1 / 128)
    assert scales_of("nemo-rl", 0.0, pow2=True) == (1.0, 1.0)
    assert scales_of("nemo-rl", 1e-37, pow2=True) == (1.0, 1.0)  # exponent at its lower end
    assert scales_of("nemo-rl", 1e-37) == (math.inf, 0.0)  # overflows, and nothing catches it


def test_nemo_rl_pads_with_the_last_element():
    x = normal(130, 128)
    x[-1, -1] = 5.0
    padded = cut(x, (BLOCK, BLOCK)).amax(pads_with_last=True)
    assert torch.equal(padded, cut(x, (BLOCK, BLOCK)).amax())  # it is the edge block's own
    wide = torch.cat([x, normal(130, 2, seed=1)], 1)
    wide[-1, -1] = 9.0
    plain = cut(wide, (BLOCK, BLOCK)).amax().tolist()
    padded = cut(wide, (BLOCK, BLOCK)).amax(pads_with_last=True).tolist()
    assert padded == [plain[0], 9.0, 9.0, 9.0]
    assert agreement(wide, "nemo-rl").scales_further == 2


def test_verl():
    assert scales_of("verl-triton", 0.0)[1] == F32(1e-10) / F32(448)
    assert scales_of("verl-triton", 3.5) == (128.0, 1 / 128)
    assert scales_of("verl-triton", 3.0)[1] == F32(3) / F32(448)
    assert scales_of("verl-torch", 0.0) == (1.0, 1.0)
    assert scales_of("verl-torch", 3.0)[0] == F32(448) / F32(3)
    assert scales_of("verl-torch", 1e-37) == (math.inf, 0.0)


def oracle_codes(scaled: np.ndarray) -> np.ndarray:
    return oracle.encode(scaled.astype(F32))


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.name}-{'pow2' if r.pow2 else 'fp32'}")
def test_codes_are_the_nearest_e4m3_values(rule):
    x = normal(2, 64, seed=3) * 100
    scales = rule.scales(x.abs().amax(1), torch.float32)
    if rule.divides:
        scaled = x.numpy() / scales.descale.numpy()[:, None]
    else:
        scaled = x.numpy() * scales.factor.numpy()[:, None]
    codes = rule.codes(x, scales)
    np.testing.assert_array_equal(codes.numpy(), oracle_codes(scaled))
    np.testing.assert_array_equal(decode(codes).numpy(), oracle.decode(codes.numpy()))


# Facts about agreement.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("name", ["te-kernel", "te-reference"])
def test_ours_is_transformer_engines_bit_for_bit(name, pow2, dtype):
    x = normal(300, 200, dtype=dtype) * torch.exp2((torch.arange(300.0) - 150) / 4)[:, None].to(dtype)
    x[:128] = 0
    x[128:256, :128] = 1e-38
    one = agreement(x, name, pow2)
    assert (one.blocks, one.scales_equal, one.elements) == (6, 6, 60_000)
    assert (one.codes_differ, one.values_differ, one.largest_difference) == (0, 0, 0.0)


def test_fp32_scales_of_vllm_are_ours_to_the_last_place():
    x = normal(1024, 1024, dtype=torch.bfloat16)
    one = agreement(x, "vllm-weights")
    assert one.scales_further == 0
    assert 0.2 < one.scales_one_ulp / one.blocks < 0.8
    assert 5e-5 < one.codes_differ / one.elements < 5e-3
    assert not one.values_equal
    # A code that differs is a neighbour: a step of E4M3 at the top is 32, of 448.
    assert one.largest_difference <= 32 / 448 * (1 + 1e-5)
    gpu = agreement(x, "vllm-weights-gpu")
    assert gpu.scales_equal < one.scales_equal
    assert gpu.codes_differ > one.codes_differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [r for r in RULES if r.pow2], ids=lambda r: f"{r.name}-{r.operand}")
def test_power_of_two_scales_make_all_rules_equal(rule, dtype):
    """Blocks of all sizes above the largest floor, amax on powers of two among them."""
    x = torch.cat([normal(128, 256, seed=n) * 2.0 ** (n - 4) for n in range(20)]).to(dtype)
    x[5, 5], x[135, 5], x[300, 200] = 448 * 2.0**-8, 448 * 2.0**-3, 0.5
    one = compare_tensor(x, [rule])[0]
    assert one.scales_equal == one.blocks
    assert (one.codes_differ, one.values_differ) == (0, 0)


EXACT_FP32 = {"te-kernel", "te-reference", "verl-torch"}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.name}-{r.operand}-{r.pow2}")
def test_scale_equality_over_every_bf16_amax(rule):
    one = scale_equality(rule)
    assert one.zero is (rule.name in EXACT_FP32 | {"nemo-rl"})
    if not rule.pow2:
        exact = rule.name in EXACT_FP32
        assert (one.equal_from is not None) is exact
        assert (one.bf16_share, one.fp32_share) == (1.0, 1.0) if exact else one.fp32_share < 0.8
        twice_rounded = rule.name in ("nemo-rl", "vllm-weights-gpu")
        assert one.most_ulps == (0 if exact else 2 if twice_rounded else 1)
        return
    assert one.bf16_share == 1.0
    if rule.operand is Operand.ACTIVATIONS:
        floor = {"te-kernel": 1e-37, "vllm-activations": 448 * 2.0**-34}[rule.name]
    else:
        floor = 448 * 2.0**-23 if rule.name.startswith("vllm") else 1e-35
    assert one.equal_from <= floor * 1.01
    if rule.name.startswith("vllm"):
        assert one.equal_from > floor


@pytest.mark.parametrize("name", ["vllm-weights", "vllm-weights-gpu", "nemo-rl", "vllm-activations"])
def test_the_logarithm_is_the_only_exception_of_powers_of_two(name):
    """A few FP32 numbers just above 448 * 2^k, more of them for larger |k|, and none below."""
    rule = rule_of(name, pow2=True)
    beside = scale_equality(rule).beside_powers
    assert beside
    assert max(beside.values()) <= 16
    for k in beside:
        power = torch.tensor(448 * 2.0**k)
        near = (power.view(torch.int32) + torch.arange(-99, 100, dtype=torch.int32)).view(torch.float32)
        ours = quantise(near[:, None], ONE_ELEMENT).scale_inv[:, 0]
        theirs = rule.scales(near, torch.float32).descale
        differ = ours != theirs
        assert torch.equal(theirs[differ] * 2, ours[differ])
        assert not differ[:100].any()  # at the power and below
        bf16 = near.bfloat16().float() == near
        assert not differ[bf16].any()


def test_away_from_powers_no_fp32_amax_is_an_exception():
    amax = (torch.arange(1 << 23, dtype=torch.int32) + 0x3C000000).view(torch.float32)  # a binade
    ours = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    theirs = rule_of("vllm-weights", pow2=True).scales(amax, torch.float32).descale
    apart = (ours != theirs).nonzero()[:, 0]
    assert 0 < len(apart) <= 16
    assert int(apart.max() - apart.min()) == len(apart) - 1  # next to each other


def test_where_rules_part():
    zeros, tiny, smallest, huge, above = range(5)
    vllm = probe(rule_of("vllm-weights"))
    assert vllm[zeros].descale == F32(1e-4) / F32(448)
    assert vllm[zeros].our_descale == 1.0
    assert (vllm[zeros].codes_differ_share, vllm[zeros].values_equal) == (0.0, True)
    assert vllm[tiny].codes_differ_share > 0.98  # all but the zeros
    assert 0.02 < vllm[tiny].our_error <= vllm[tiny].error < 0.03
    assert vllm[smallest].error == 1.0
    assert vllm[huge].descale == vllm[huge].our_descale
    assert probe(rule_of("verl-torch"))[smallest].codes_nan > 0
    assert probe(rule_of("nemo-rl"))[smallest].codes_nan > 0
    pow2 = probe(rule_of("vllm-weights", pow2=True))
    assert pow2[above].descale * 2 == pow2[above].our_descale
    assert pow2[above].values_equal
    for name in ("te-kernel", "te-reference"):
        for each in probe(rule_of(name)) + probe(rule_of(name, pow2=True)):
            assert (each.descale, each.error) == (each.our_descale, each.our_error)
            assert each.codes_differ_share == 0


def test_counts_of_tensors_add_up():
    tensors = [("a", normal(128, 256)), ("b", normal(130, 128, seed=1, dtype=torch.bfloat16))]
    rules = [r for r in RULES if r.operand is Operand.WEIGHTS]
    both = compare_rules(tensors, Operand.WEIGHTS)
    assert [rule for rule, _ in both] == rules
    one, two = (compare_tensor(x, rules) for _, x in tensors)
    for (_, total), a, b in zip(both, one, two, strict=True):
        assert total.blocks == 4
        assert total.elements == 128 * 256 + 130 * 128
        assert total.codes_differ == a.codes_differ + b.codes_differ
        assert total.scales_equal + total.scales_one_ulp + total.scales_further == total.blocks
        assert total.largest_difference == max(a.largest_difference, b.largest_difference)


# Quantisation error.


@pytest.mark.parametrize("pow2", [False, True])
def test_error_against_numpy(pow2):
    x = normal(200, 300)
    x[3, :50] = 0
    x[130:, 140:] *= 1e-3
    x[199, 299] = 1.0  # its block loses most values to underflow
    mode = ScaleRule.POW2 if pow2 else ScaleRule.FP32
    got = quantisation_error(x, weight_scheme(Scaling.BLOCK, rule=mode))
    w = x.numpy().astype(np.float64)
    y, codes, largest = np.zeros_like(w), np.zeros(w.shape, dtype=np.uint8), 0.0
    for i in range(0, 200, 128):
        for j in range(0, 300, 128):
            tile = np.s_[i : i + 128, j : j + 128]
            amax = F32(np.abs(w[tile]).max())
            scale = F32(448) / amax
            scale = F32(2.0 ** np.floor(np.log2(np.float64(scale)))) if pow2 else scale
            codes[tile] = oracle_codes(x.numpy()[tile] * scale)
            y[tile] = (oracle.decode(codes[tile]).astype(F32) * (F32(1) / scale)).astype(np.float64)
            largest = max(largest, float(np.abs(y[tile] - w[tile]).max() / amax))
    assert got.frobenius == pytest.approx(np.linalg.norm(y - w) / np.linalg.norm(w), rel=1e-9)
    assert got.largest == pytest.approx(largest, rel=1e-6)
    assert got.underflow == ((y == 0) & (w != 0)).sum() / (w != 0).sum()
    assert got.underflow > 0.004
    assert got.saturation == (np.abs(oracle.decode(codes)) == 448).mean()
    assert got.largest <= (16 / 256 if pow2 else 16 / 448) * (1 + 1e-6)


def test_error_of_zeros_is_none():
    got = quantisation_error(torch.zeros(4, 4), weight_scheme(Scaling.BLOCK))
    assert (got.frobenius, got.largest, got.underflow, got.saturation) == (0.0, 0.0, 0.0, 0.0)


def test_tensor_error_knows_layer_and_kind():
    one = tensor_error("model.layers.7.mlp.gate_proj.weight", normal(130, 64))
    assert (one.layer, one.kind, one.shape) == (7, "gate", (130, 64))
    assert set(one.errors) == {"fp32", "pow2"}


def test_first_layer_inputs_are_normalised_embeddings():
    dims = dims_from_hf(hf_config(TinyModel()))
    table, weight = normal(50, dims.hidden, dtype=torch.bfloat16), torch.full((dims.hidden,), 2.0)
    weights = {"model.embed_tokens.weight": table, "model.layers.0.input_layernorm.weight": weight}
    x = first_layer_inputs(weights, dims, tokens=5)
    rows = table[[0, 12, 24, 37, 49]].float().numpy().astype(np.float64)
    expected = 2 * rows / np.sqrt((rows**2).mean(1, keepdims=True) + dims.norm_eps)
    assert x.dtype is torch.bfloat16
    np.testing.assert_allclose(x.float().numpy(), expected, rtol=2**-8)


# The command.


def test_command_on_the_tiny_model(tmp_path):
    done = CliRunner().invoke(app, [*TINY, *SMALL, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    for text in ("NeMo RL", "Power-of-two scales", "veRL, Triton", "What quantisation loses", "down"):
        assert text in done.output
    assert (tmp_path / "out" / "numerics.png").stat().st_size > 20_000
    figures = json.loads((tmp_path / "out" / "numerics.json").read_text())
    assert figures["tensors"] == len(figures["errors"]) == 14
    assert {error["kind"] for error in figures["errors"]} == {"q", "k", "v", "o", "gate", "up", "down"}
    by_rule = {(r["rule"], r["scales"], r["operand"]): r for r in figures["rules"]}
    assert len(by_rule) == len(RULES)
    assert by_rule["te-kernel", "fp32", "weights"]["scales_equal_share"] == 1.0
    assert by_rule["vllm-weights", "pow2", "weights"]["codes_differ"] == 0
    assert by_rule["vllm-activations", "fp32", "activations"]["blocks"] > 0
    assert len(figures["probes"]) == len(figures["scale_equality"]) == len(RULES)


def test_command_on_a_folder_and_its_refusals(tmp_path):
    model = TinyModel(layers=1, hidden_size=128, intermediate_size=128)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(model)))
    base = [*TINY, "--weights", str(folder), f"runs_dir={tmp_path / 'runs'}"]
    done = CliRunner().invoke(app, base)
    assert done.exit_code == 2
    assert "no *.safetensors" in done.output
    layer = "model.layers.0"
    shapes = {f"{layer}.self_attn.{p}_proj.weight": (128, 128) for p in "qo"}
    shapes |= {f"{layer}.self_attn.{p}_proj.weight": (64, 128) for p in "kv"}
    shapes |= {f"{layer}.mlp.{p}_proj.weight": (128, 128) for p in ("gate", "up", "down")}
    shapes |= {"model.embed_tokens.weight": (99, 128)}
    weights = {name: normal(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    weights[f"{layer}.input_layernorm.weight"] = torch.ones(128)
    save_file(weights, folder / "model.safetensors")
    done = CliRunner().invoke(app, base)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "runs" / "numerics" / "fp8-e2e" / "numerics.json").is_file()
    up = f"{layer}.mlp.up_proj.weight"
    weights[up][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors")
    done = CliRunner().invoke(app, base)
    assert (done.exit_code, f"{up}: 1 of" in done.output) == (2, True)
    weights[up] = weights[up].nan_to_num().to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors")
    done = CliRunner().invoke(app, base)
    assert (done.exit_code, "quantised already" in done.output) == (2, True)
    weights.pop(up)
    save_file(weights, folder / "model.safetensors")
    done = CliRunner().invoke(app, base)
    assert (done.exit_code, f"no tensor {up}" in done.output) == (2, True)


def test_recipe_without_fp8_is_refused():
    done = CliRunner().invoke(app, ["numerics", "configs/tiny/bf16.yaml"])
    assert (done.exit_code, "puts no weight in FP8" in done.output) == (2, True)
