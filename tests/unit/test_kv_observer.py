"""KV calibration: what the observer keeps, over batches and over ranks."""

import multiprocessing
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
import torch

from fp8rl.model.kv_observer import KvObserver
from fp8rl.model.kv_scales import KvScalesError

LAYERS = 2


def qkv(tokens=40, seed=0, dtype=torch.bfloat16):
    """q, k, v [tokens, heads, 8] with heavy tails, by layer."""
    generator = torch.Generator().manual_seed(seed)

    def values(heads):
        x = torch.randn(tokens, heads, 8, generator=generator)
        return (x * x * x * 3).to(dtype)

    return [tuple(values(heads) for heads in (4, 2, 2)) for _ in range(LAYERS)]


def seen(layers, observer):
    observer.start_tokens(len(layers[0][0]))
    for number, values in enumerate(layers):
        observer(number, *values)
    return observer


def scales_of(observer, margin=1.0):
    return observer.scales(
        margin=margin, version=3, source="test", side="learner", tokens_available=observer.tokens
    )


def expected(layers, statistic):
    return [[float(statistic(np.abs(x.float().numpy()))) / 448 for x in values] for values in layers]


@pytest.mark.parametrize("percentile", [None, 100.0, 99.99, 99.9, 75.0, 50.3])
@pytest.mark.parametrize("tokens", [1, 40, 1250])
def test_scales_are_of_the_exact_statistic_of_all_elements(percentile, tokens):
    """Against the definition: the smallest magnitude that so many do not exceed, in whole numbers."""
    layers = qkv(tokens)
    got = scales_of(seen(layers, KvObserver(LAYERS, percentile)))

    def statistic(x):
        if percentile is None:
            return x.max()
        values, counts = np.unique(x, return_counts=True)
        enough = Fraction(str(percentile)) * x.size / 100
        return values[[int(up_to) >= enough for up_to in counts.cumsum()].index(True)]

    assert [list(asdict(layer).values()) for layer in got.layers] == expected(layers, statistic)


def test_several_batches_are_as_one():
    whole = qkv(40)
    for percentile in (None, 99.0):
        parts = KvObserver(LAYERS, percentile)
        for rows in (slice(0, 7), slice(7, 40)):
            seen([tuple(x[rows] for x in values) for values in whole], parts)
        assert scales_of(parts) == scales_of(seen(whole, KvObserver(LAYERS, percentile)))


def test_margin_and_what_is_said_of_the_scales():
    observer = seen(qkv(), KvObserver(LAYERS, 99.5))
    scales = observer.scales(margin=1.5, version=4, source="s", side="engine", tokens_available=77)
    assert scales.layers[1].k == pytest.approx(1.5 * scales_of(observer).layers[1].k, rel=1e-12)
    assert (scales.version, scales.tokens, scales.tokens_available) == (4, 40, 77)
    assert (scales.source, scales.side, scales.statistic) == ("s", "engine", "percentile 99.5")


@pytest.mark.parametrize("percentile", [None, 100.0])
def test_padding_does_not_count(percentile):
    observer = KvObserver(1, percentile)
    observer.start_batch(torch.tensor([[True, True, False]]))
    x = torch.ones(3, 1, 1, 2)
    x[2] = 100.0
    observer(0, x, x * 2, x * 3)
    layer = scales_of(observer).layers[0]
    assert (layer.q, layer.k, layer.v) == (1 / 448, 2 / 448, 3 / 448)
    assert observer.tokens == 2


def test_fp32_is_exact_for_the_amax_and_rounded_up_for_a_percentile():
    layers = qkv(dtype=torch.float32)
    assert [list(asdict(s).values()) for s in scales_of(seen(layers, KvObserver(LAYERS))).layers] == (
        expected(layers, np.max)
    )
    got = scales_of(seen(layers, KvObserver(LAYERS, 99.0)))
    wanted = expected(layers, lambda x: np.percentile(x, 99.0, method="inverted_cdf"))
    for layer, row in zip(got.layers, wanted, strict=True):
        for scale, exact in zip(asdict(layer).values(), row, strict=True):
            assert exact <= scale <= exact * (1 + 2**-7)


@pytest.mark.parametrize("percentile", [None, 99.0])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_element_that_is_not_finite_is_refused(percentile, value, dtype):
    layers = qkv(dtype=dtype)
    layers[1][2][3, 0, 0] = value
    with pytest.raises(KvScalesError, match="layer 1: KV calibration saw v that are NaN or Inf"):
        scales_of(seen(layers, KvObserver(LAYERS, percentile)))


@pytest.mark.parametrize("percentile", [None, 99.0])
def test_a_layer_without_a_scale_is_refused(percentile):
    with pytest.raises(KvScalesError, match=r"saw nothing of layers \[1\]"):
        scales_of(seen(qkv()[:1], KvObserver(LAYERS, percentile)))
    layers = qkv()
    layers[0][1].zero_()
    with pytest.raises(KvScalesError, match=r"layer 0: k_scale is 0\.0"):
        scales_of(seen(layers, KvObserver(LAYERS, percentile)))


# --- over ranks: two processes over gloo


def _part(split, rank):
    """What `rank` of two sees: other tokens (data), other heads (tensor), other layers (pipeline)."""
    whole = qkv(40)
    if split == "data":
        rows = slice(0, 13) if rank == 0 else slice(13, 40)
        return {n: tuple(x[rows] for x in values) for n, values in enumerate(whole)}
    if split == "tensor":
        return {n: tuple(x.chunk(2, 1)[rank] for x in values) for n, values in enumerate(whole)}
    return {rank: whole[rank]}


def _worker(rank, store, results):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    alone = [dist.new_group([n]) for n in range(2)]
    merged = {}
    for split in ("data", "tensor", "pipeline"):
        for percentile in (None, 99.0):
            observer = KvObserver(LAYERS, percentile)
            part = _part(split, rank)
            observer.start_tokens(len(next(iter(part.values()))[0]))
            for number, values in part.items():
                observer(number, *values)
            observer.merge(data_parallel=None if split == "data" else alone[rank])
            merged[split, percentile] = scales_of(observer)
        broken = KvObserver(LAYERS)  # a NaN that one rank sees is seen by all
        seen(qkv(), broken)
        if rank == 1:
            broken(0, *(torch.full((1, 1, 8), float("nan"), dtype=torch.bfloat16) for _ in range(3)))
        broken.merge()
        try:
            merged[split, "nan"] = scales_of(broken)
        except KvScalesError as error:
            merged[split, "nan"] = str(error)
    results.put((rank, merged))
    dist.destroy_process_group()


def test_ranks_come_to_the_scales_of_one_process(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = [(rank, str(tmp_path / "store"), results) for rank in range(2)]
    workers = [context.Process(target=_worker, args=a) for a in arguments]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert found[0] == found[1]
    for (split, percentile), merged in found[0].items():
        if percentile == "nan":
            assert "NaN or Inf" in merged, split
        else:
            assert merged == scales_of(seen(qkv(40), KvObserver(LAYERS, percentile))), split
