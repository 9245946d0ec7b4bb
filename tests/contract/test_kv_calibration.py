"""KV calibration and counting inside the real vLLM engine.

Each test names the vLLM behaviour it relies on, so that an upgrade fails here and says where.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.rescaled import rescaled
from fp8rl.learner.batch import make_batch
from fp8rl.learner.learner import Learner
from fp8rl.mismatch import mismatch_panel
from fp8rl.model.kv_scales import KvScales, KvScalesError, LayerScales
from fp8rl.numerics.kv_cache import for_cpu_kernel
from fp8rl.recipe.precision import KvStatistic
from fp8rl.rollout.engine import Engine, EngineStateError
from fp8rl.rollout.kv_observation import observed
from fp8rl.rollout.kv_shares import kv_metrics
from fp8rl.rollout.requests import requests_for
from tests import oracle
from tests.models import RAGGED, random_weights, recipe_with, write_model

pytestmark = pytest.mark.engine

LONGEST = 96


class Setup:
    def __init__(self, folder: Path) -> None:
        self.recipe = recipe_with(
            model={"tiny": RAGGED.model_dump()},
            precision={"kv_cache": "fp8"},  # BF16 linears: learner and engine see nearly the same
            rollout={"max_new_tokens": 12, "chunk_size": 16, "kv_cache_mib": 64},
        )
        model = write_model(RAGGED, folder / "model")
        self.engine = Engine(model, self.recipe, max_len=LONGEST)
        self.learner = Learner(model, self.recipe)
        self.learner.load(model, 0)
        self.learner.publish(folder / "v0", version=0)
        self.folder = folder
        self.engine.load_weights(folder / "v0", 0)

    def calibrate(self, sequences) -> KvScales:
        return self.engine.calibrate_kv(sequences, version=0, source="test")

    def learner_scales(self, sequences) -> KvScales:
        """Of the same tokens: the engine leaves the last one of each sequence out."""
        batch = make_batch([s[:1] for s in sequences], [s[1:-1] for s in sequences])
        return self.learner.calibrate_kv(batch, version=0, source="test")


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return Setup(tmp_path_factory.mktemp("kv"))


def sequences(count=40, shared=70, seed=3):
    """Up to the engine's greatest length; pairs have a whole block of vLLM's cache in common."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for n in range(count):
        if n % 2 == 0:
            prompt = torch.randint(4, 90, (shared,), generator=generator).tolist()
        rest = torch.randint(4, 90, (1 + (n * 7) % (LONGEST - shared),), generator=generator).tolist()
        rows.append([*prompt, *rest])
    rows[0] = [5] * LONGEST
    return rows


def requests(prompts=8):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(4, 90, (9,), generator=generator).tolist() for _ in range(prompts)]
    return requests_for(ids, list(range(prompts)), 2, run_seed=0, iteration=1)


def ratios(one: KvScales, other: KvScales) -> list[float]:
    return [
        getattr(a, name) / getattr(b, name)
        for a, b in zip(one.layers, other.layers, strict=True)
        for name in "qkv"
    ]


# --- calibration


def test_engine_sees_what_the_learner_sees(setup):
    """Relies on: Attention.forward taking q, k, v after rotary embedding, an instance's own `forward`
    being called, and skip_reading_prefix_cache. 40 sequences, three forward passes."""
    some = sequences()
    scales = setup.calibrate(some)
    assert (scales.side, scales.tokens) == ("engine", sum(len(s) - 1 for s in some))
    wanted = setup.learner_scales(some)
    assert wanted.tokens == scales.tokens
    assert ratios(scales, wanted) == pytest.approx([1.0] * 6, rel=0.02)
    other = ratios(setup.calibrate(sequences(seed=4)[1:6]), wanted)  # the comparison can fail
    assert max(abs(r - 1) for r in other) > 0.05


def test_stale_scales_do_not_colour_what_is_observed(setup):
    """Ruinous scales, applied before, change nothing: the pass neither writes nor reads the cache."""
    some = sequences()
    first = setup.calibrate(some)
    ruinous = tuple(LayerScales(s.q, s.k * 1e-3, s.v * 1e3) for s in first.layers)
    setup.engine.apply_kv_scales(KvScales(0, ruinous, 1, "test"))
    garbled = setup.engine.generate(requests(), version=0)
    assert setup.calibrate(some) == first
    setup.engine.apply_kv_scales(first)
    assert setup.engine.generate(requests(), version=0) != garbled


def test_generation_afterwards_is_as_before(setup):
    """The hooks are gone, and no block that the pass left unwritten is in the prefix cache."""
    some = [r.prompt * 9 for r in requests()]  # prompts of more than a block, and the same tokens
    longer = requests_for([s[:80] for s in some[::2]], list(range(8)), 2, run_seed=0, iteration=1)
    scales = setup.calibrate(some)
    setup.engine.apply_kv_scales(scales)
    before = setup.engine.generate(longer, version=0)
    setup.engine.apply_kv_scales(setup.calibrate(some))
    assert setup.engine.generate(longer, version=0) == before


def test_engine_does_not_generate_until_scales_are_applied(setup):
    scales = setup.calibrate(sequences())
    with pytest.raises(EngineStateError, match="no KV scales for weight version 0"):
        setup.engine.generate(requests(), version=0)
    assert setup.engine.apply_kv_scales(scales) == list(scales.layers)
    setup.engine.generate(requests(), version=0)


def test_engine_does_not_generate_with_scales_that_did_not_arrive(setup, monkeypatch):
    scales = setup.calibrate(sequences())
    setup.engine.apply_kv_scales(scales)
    wrong = [LayerScales(s.q, s.k * 2, s.v) for s in scales.layers]
    monkeypatch.setattr(setup.engine.weights, "read_kv_scales", lambda: wrong)
    with pytest.raises(KvScalesError, match="are not those sent"):
        setup.engine.apply_kv_scales(scales)
    with pytest.raises(EngineStateError, match="no KV scales for weight version 0"):
        setup.engine.generate(requests(), version=0)


def test_percentile_in_the_engine(setup, monkeypatch):
    amax = setup.calibrate(sequences())
    changed = setup.recipe.precision.model_copy(
        update={"kv_statistic": KvStatistic.PERCENTILE, "kv_percentile": 99.0}
    )
    monkeypatch.setattr(setup.engine, "recipe", setup.recipe.model_copy(update={"precision": changed}))
    cut = setup.calibrate(sequences())
    assert cut.statistic == "percentile 99"
    assert all(r < 0.95 for r in ratios(cut, amax))


def test_another_version_and_bad_sequences_are_refused(setup):
    with pytest.raises(EngineStateError, match="holds weights 0, not version 4"):
        setup.engine.calibrate_kv(sequences(), version=4, source="test")
    limits = setup.engine.llm.llm_engine.vllm_config.scheduler_config
    with pytest.raises(KvScalesError, match="sequence 0 has"):
        setup.calibrate([[5] * (limits.max_num_batched_tokens + 2)])
    with pytest.raises(KvScalesError, match="saw nothing of layers"):
        setup.calibrate([])


def test_a_sequence_that_is_not_whole_is_a_fault(setup):
    """Relies on: attention metadata with query_start_loc and seq_lens. Second tokens read the cache."""
    scales = setup.calibrate(sequences())
    setup.engine.apply_kv_scales(scales)
    seen = []
    with observed(setup.engine.weights.attention(), lambda *values: seen.append(values)) as found:
        setup.engine.generate(requests(), version=0)
    assert "not whole in a forward pass (1 of them)" in found.fault
    assert seen  # the prompts were whole
    setup.engine.generate(requests(), version=0)
    for layer in setup.engine.weights.attention():
        assert "forward" not in vars(layer)


def test_attention_that_is_more_than_causal_is_refused(setup, monkeypatch):
    layer = setup.engine.weights.attention()[1]
    monkeypatch.setattr(layer.impl, "sliding_window", (31, 0))
    with pytest.raises(KvScalesError, match="sliding_window"):
        setup.calibrate(sequences())
    assert "forward" not in vars(setup.engine.weights.attention()[0])


# --- what the cache could not hold


NOT_WRITTEN = 0x7F  # E4M3's NaN


def first_cache(engine) -> torch.Tensor:
    """Relies on: Attention.kv_cache, a tensor or a list of one per virtual engine."""
    cache = engine.weights.attention()[0].kv_cache
    return cache if isinstance(cache, torch.Tensor) else cache[0]


def written_to(engine) -> np.ndarray:
    """The numbers that were written to the first layer's cache since it was filled."""
    codes = first_cache(engine).numpy().ravel()
    return oracle.decode(codes[codes != NOT_WRITTEN])


def test_counts_are_those_of_the_bytes_in_the_cache(setup):
    """Relies on: AttentionImpl.do_kv_cache_update being called once for what is written."""
    scales = setup.calibrate(sequences())
    engine, some = setup.engine, requests(2)

    def run(k: float, v: float):
        layers = tuple(LayerScales(s.q, s.k * k, s.v * v) for s in scales.layers)
        engine.apply_kv_scales(KvScales(0, layers, 1, "test"))
        first_cache(engine).fill_(NOT_WRITTEN)
        engine.take_kv_counts()
        done = engine.generate(some, version=0)
        counts = engine.take_kv_counts()
        # Prompt and sampled tokens but the last one of each.
        tokens = sum(len(r.prompt) + len(c.tokens) - 1 for r, c in zip(some, done, strict=True))
        heads = RAGGED.kv_heads * RAGGED.hidden_size // RAGGED.heads
        assert counts["elements"] == [tokens * heads] * RAGGED.layers
        written = written_to(engine)
        assert len(written) == 2 * tokens * heads
        return counts, written

    counts, written = run(1.0, 1.0)
    assert counts["k_saturated"] == counts["v_saturated"] == [0, 0]
    few = counts["k_underflow"][0] + counts["v_underflow"][0]
    assert (written == 0).sum() == few
    counts, written = run(1 / 64, 1.0)
    # 448 is also what magnitudes from 432 on are rounded to.
    assert counts["v_saturated"][0] == 0 < counts["k_saturated"][0] <= (abs(written) == 448).sum()
    assert counts["k_saturated"][0] > 0.8 * (abs(written) == 448).sum()
    counts, written = run(1.0, 2.0**12)
    assert counts["v_underflow"][0] > 100 + counts["k_underflow"][0]
    assert (written == 0).sum() == counts["v_underflow"][0] + counts["k_underflow"][0]
    assert engine.take_kv_counts()["elements"] == [0, 0]


def test_a_repeated_chunk_has_the_same_counts(setup):
    setup.engine.apply_kv_scales(setup.calibrate(sequences()))
    counts = []
    for _ in range(2):
        setup.engine.take_kv_counts()
        setup.engine.generate(requests(), version=0)
        counts.append(setup.engine.take_kv_counts())
    assert counts[0] == counts[1]
    assert counts[0]["elements"][0] > 0


# --- a model whose K and V leave E4M3's range


def test_calibrated_scales_keep_a_rescaled_model_where_scale_one_ruins_it(setup):
    """The same function, K and V up to 2^10 times larger: with scales of both sides the log-probs are
    as before, with scale 1.0, which the product refuses, they are not."""
    dims = setup.engine.dims
    keys, values = [[9, 10], [10, 8]], [[10, 9], [8, 10]]
    weights = rescaled(random_weights(RAGGED), dims, keys, values)
    plain = setup.learner.model.export()
    setup.learner.model.load(weights)
    try:
        setup.learner.publish(setup.folder / "rescaled", version=0)
        setup.engine.load_weights(setup.folder / "rescaled", 0)
        some = sequences()
        ones = KvScales(0, (LayerScales(1.0, 1.0, 1.0),) * RAGGED.layers, 1, "test")
        with pytest.raises(KvScalesError, match=r"is 1\.0"):
            setup.engine.apply_kv_scales(ones)
        errors, saturated = {}, {}
        for name, scales in (
            ("learner", setup.learner_scales(some)),
            ("engine", setup.calibrate(some)),
            ("one", ones),
        ):
            if name == "one":
                setup.engine.weights.apply_kv_scales(ones)
            else:
                setup.engine.apply_kv_scales(scales)
            setup.engine.take_kv_counts()
            done = setup.engine.generate(requests(), version=0)
            saturated[name] = kv_metrics(setup.engine.take_kv_counts())["kv/saturated_share"]
            batch = make_batch(
                [r.prompt for r in requests()], [c.tokens for c in done], [c.logprobs for c in done]
            )
            p = setup.learner.logprobs(batch, version=0)
            panel = mismatch_panel(batch.g, p, batch.mask, truncate=2.0)
            errors[name] = panel["token_mult_prob_error"]
    finally:
        setup.learner.model.load(plain)
        setup.engine.load_weights(setup.folder / "v0", 0)
    assert max(errors["learner"], errors["engine"]) < 1.15
    assert errors["one"] > max(errors["learner"], errors["engine"]) + 0.2
    assert saturated["one"] > 0.1
    assert max(saturated["learner"], saturated["engine"]) < 1e-3


def test_cache_holds_the_nearest_numbers_and_vllm_alone_would_cut_off():
    """Relies on: cpu_attn_reshape_and_cache. Where vLLM's own rounding is mended, the last line fails:
    then numerics/kv_cache.py need not round any more."""
    from vllm import _custom_ops as ops

    tokens, block, width = 100, 128, 64
    scale = 0.0371
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(tokens, 1, width, generator=generator) ** 3 * 30 * scale).bfloat16()

    def stored(values: torch.Tensor) -> np.ndarray:
        cache = torch.full((1, 1, 2 * block, width), NOT_WRITTEN, dtype=torch.uint8)
        ops.cpu_attn_reshape_and_cache(
            values, values, *cache.chunk(2, dim=2), torch.arange(tokens), "vec",
            k_scale=scale, v_scale=scale, kv_cache_dtype="fp8",
        )  # fmt: skip
        codes = cache.numpy().ravel()
        return np.sort(oracle.decode(codes[codes != NOT_WRITTEN]))

    flat = x.reshape(-1)
    want = (flat.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    rounded = for_cpu_kernel(x, scale)
    np.testing.assert_array_equal(stored(rounded), np.sort(torch.cat((want, want)).numpy()))
    assert np.abs(stored(x)).mean() < 0.97 * np.abs(stored(rounded)).mean()
