"""Every way for weights and KV scales to arrive otherwise than they were sent, against the real engine.

After each fault the engine either equals one that never saw a fault, or has refused in words that name
what is wrong. `make sync-faults` writes the outcomes to benchmarks/results/sync_faults.json. Processes
that die in the middle of a sync are in tests/pipeline/test_kill.py.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8rl.model.kv_scales import KvScalesError, LayerScales
from fp8rl.model.manifest import Manifest, PublishedWeightsError
from fp8rl.model.published import read_published
from fp8rl.rollout.engine import Engine, EngineStateError
from fp8rl.sync.errors import ProofError, SyncError
from fp8rl.sync.sender import Sender
from tests.contract.pairs import ARMS, Pair
from tests.models import RAGGED, publish, random_weights

pytestmark = pytest.mark.engine

REFUSALS = (SyncError, ProofError, PublishedWeightsError, EngineStateError, KvScalesError)
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
LR = 2e-5
LIMIT = 100_000  # bytes of a bucket: several for the small model, and tensors cut in two


class Bench:
    """An engine that held version 0 and is to get version 1, and what a fresh one makes of that."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        self.pair = pair
        self.engine = self.pair.engine
        pair.sync(pair.new_learner(), 0)
        self.learner = pair.new_learner()
        self.learner.model.load(one_step_later())
        self.learner.version = 1
        self.folder = folder / "v1"
        self.learner.publish(self.folder, version=1)
        self.scales = self.pair.scales(self.learner, 1) if self.engine.fp8_kv else None
        self.manifest, self.tensors = read_published(self.folder, 1)
        self.fresh = Engine(self.pair.model_dir, self.pair.recipe, max_len=64)
        self.fresh.load_weights(self.folder, 1)
        self.wanted = self.use(self.fresh)
        self.old = self.use_old()
        self.count = 0

    def use(self, engine: Engine, version: int = 1):
        """Greedy tokens, sampled tokens and log-probs, and the scores of fixed tokens."""
        if self.scales is not None:
            engine.apply_kv_scales(dataclasses.replace(self.scales, version=version))
        requests = self.pair.requests()
        return (
            engine.generate(requests, version=version, temperature=0.0),
            engine.generate(requests, version=version),
            engine.score([r.prompt for r in requests], version=version),
        )

    def use_old(self):
        self.engine.load_weights(self.pair.folder / "v0", 0)
        return self.use(self.engine, 0)

    def payloads(self, manifest: Manifest | None = None) -> list[torch.Tensor]:
        """All buckets of version 1; the engine is told that they come, of `manifest`."""
        sender = Sender(self.folder, 1, LIMIT)
        self.engine.begin_sync(manifest or sender.manifest, LIMIT)
        found = [sender.payload(bucket.index) for bucket in sender.buckets]
        sender.close()
        assert len(found) > 5
        return found

    def deliver(self, payloads: list[torch.Tensor]) -> None:
        for index, payload in enumerate(payloads):
            self.engine.receive(index, payload)
        self.engine.finish_sync()

    def publish(self, tensors: dict[str, torch.Tensor]) -> Path:
        """A folder with tensors of another making, published as version 1."""
        self.count += 1
        folder = self.pair.folder / f"other{self.count}"
        publish(folder, 1, tensors)
        return folder

    def publish_and_load(self, tensors: dict[str, torch.Tensor]) -> None:
        self.engine.load_weights(self.publish(tensors), 1)

    def bucket_with(self, name: str) -> tuple[int, int]:
        """(bucket, offset in it) of the first byte of a tensor."""
        sender = Sender(self.folder, 1, LIMIT)
        sender.close()
        return next(
            (b.index, p.offset)
            for b in sender.buckets
            for p in b.pieces
            if p.name == name and p.start == 0
        )


def one_step_later() -> dict[str, torch.Tensor]:
    """The weights of version 0 after a step of Adam's size: what differs from them as little as two
    versions ever do."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: weight + LR * torch.randn(weight.shape, generator=generator).sign()
        for name, weight in random_weights(RAGGED).items()
    }


# --- the faults: each is given the bench and does its worst


def dropped_tensor(bench: Bench) -> None:
    bench.publish_and_load({k: v for k, v in bench.tensors.items() if not k.startswith(UP)})


def scale_missing(bench: Bench) -> None:
    half_a_pair(bench, UP + "_scale_inv")


def codes_missing(bench: Bench) -> None:
    half_a_pair(bench, UP)


def half_a_pair(bench: Bench, gone: str) -> None:
    """The learner's side would not publish it, so the manifest is of the test's making."""
    entries = {name: entry for name, entry in bench.manifest.tensors.items() if name != gone}
    bench.payloads(Manifest(1, entries))


def unknown_tensor(bench: Bench) -> None:
    extra = {UP.replace(".0.", ".9."): bench.tensors["model.norm.weight"].clone()}
    bench.publish_and_load(bench.tensors | extra)


def wrong_shape(bench: Bench) -> None:
    bench.publish_and_load(bench.tensors | {UP: bench.tensors[UP][:-1].clone()})


def turned(bench: Bench) -> None:
    bench.publish_and_load(bench.tensors | {UP: bench.tensors[UP].t().contiguous()})


def wrong_dtype(bench: Bench) -> None:
    other = {UP: torch.zeros(bench.tensors[UP].shape, dtype=torch.bfloat16)}
    rest = {k: v for k, v in bench.tensors.items() if k != UP + "_scale_inv"}
    bench.publish_and_load(rest | other)


def truncated_bucket(bench: Bench) -> None:
    payloads = bench.payloads()
    index, _ = bench.bucket_with(UP)
    payloads[index] = payloads[index][:-16]
    bench.deliver(payloads)


def dropped_bucket(bench: Bench) -> None:
    payloads = bench.payloads()
    del payloads[2]
    for index, payload in zip([0, 1, *range(3, 99)], payloads, strict=False):
        bench.engine.receive(index, payload)


def last_bucket_missing(bench: Bench) -> None:
    bench.deliver(bench.payloads()[:-1])


def bucket_twice(bench: Bench) -> None:
    payloads = bench.payloads()
    bench.engine.receive(0, payloads[0])
    bench.engine.receive(0, payloads[0])


def bucket_too_many(bench: Bench) -> None:
    payloads = bench.payloads()
    bench.deliver([*payloads, payloads[0]])


def buckets_swapped(bench: Bench) -> None:
    payloads = bench.payloads()
    payloads[1], payloads[2] = payloads[2], payloads[1]
    bench.deliver(payloads)


def bit_of_codes_flipped(bench: Bench) -> None:
    flip(bench, UP)


def bit_of_scales_flipped(bench: Bench) -> None:
    flip(bench, UP + "_scale_inv")


def bit_of_a_norm_flipped(bench: Bench) -> None:
    flip(bench, "model.norm.weight")


def flip(bench: Bench, name: str) -> None:
    payloads = bench.payloads()
    index, offset = bench.bucket_with(name)
    payloads[index] = payloads[index].clone()
    payloads[index][offset] ^= 1
    bench.deliver(payloads)


def scales_swapped(bench: Bench) -> None:
    """The bytes of two tensors' scales, exchanged on their way."""
    one, two = GATE + "_scale_inv", UP + "_scale_inv"
    size = bench.manifest.tensors[one].size
    assert bench.manifest.tensors[two].size == size
    payloads = bench.payloads()
    (i, a), (j, b) = bench.bucket_with(one), bench.bucket_with(two)
    first, second = payloads[i][a : a + size].clone(), payloads[j][b : b + size].clone()
    payloads[i][a : a + size], payloads[j][b : b + size] = second, first
    bench.deliver(payloads)


def digest_flipped(bench: Bench) -> None:
    entry = bench.manifest.tensors[UP]
    other = dataclasses.replace(entry, sha256="0" * 64)
    bench.deliver(bench.payloads(Manifest(1, bench.manifest.tensors | {UP: other})))


def another_versions_bytes(bench: Bench) -> None:
    bench.payloads()
    sender = Sender(bench.pair.folder / "v0", 0, LIMIT)
    bench.deliver([sender.payload(bucket.index) for bucket in sender.buckets])


def no_sync_begun(bench: Bench) -> None:
    payloads = bench.payloads()
    bench.deliver(payloads)
    bench.engine.receive(0, payloads[0])


def goes_on_after_an_error(bench: Bench) -> None:
    payloads = bench.payloads()
    bench.engine.receive(0, payloads[0])
    with pytest.raises(SyncError):
        bench.engine.receive(1, payloads[0])
    bench.engine.receive(1, payloads[1])


def ended_too_early(bench: Bench) -> None:
    bench.payloads()
    bench.engine.finish_sync()


def file_damaged(bench: Bench) -> None:
    damaged(bench, lambda content: content[:-1] + bytes([content[-1] ^ 1]))


def file_cut(bench: Bench) -> None:
    damaged(bench, lambda content: content[:-4])


def damaged(bench: Bench, change: Callable[[bytes], bytes]) -> None:
    folder = bench.publish(bench.tensors)
    path = folder / "weights.safetensors"
    path.write_bytes(change(path.read_bytes()))
    bench.engine.load_weights(folder, 1)


def memory_overwritten(bench: Bench) -> None:
    bench.engine.load_weights(bench.folder, 1)
    bench.engine.weights.views()[UP].view(torch.uint8)[0, 0] ^= 1
    try:
        bench.engine.prove(None)
    finally:
        bench.engine.version = None


def packed_copy_forgotten(bench: Bench) -> None:
    """The bytes are there, and the kernels go on with the weights of before."""
    repack = bench.engine.weights.repack
    bench.engine.weights.repack = lambda: None
    try:
        bench.engine.load_weights(bench.folder, 1)
    finally:
        bench.engine.weights.repack = repack


def prefix_cache_kept(bench: Bench) -> None:
    reset = bench.engine.llm.reset_prefix_cache
    bench.engine.llm.reset_prefix_cache = lambda: False
    try:
        bench.engine.load_weights(bench.folder, 1)
    finally:
        bench.engine.llm.reset_prefix_cache = reset


WEIGHT_FAULTS = {
    dropped_tensor: UP,
    scale_missing: UP,
    codes_missing: UP,
    unknown_tensor: UP.replace(".0.", ".9."),
    wrong_shape: UP,
    turned: UP,
    wrong_dtype: UP,
    truncated_bucket: "bucket ",
    dropped_bucket: "bucket 2 (",
    last_bucket_missing: "is missing",
    bucket_twice: "bucket 0 came out of order",
    bucket_too_many: "are in",
    buckets_swapped: "arrived with digest",
    bit_of_codes_flipped: UP,
    bit_of_scales_flipped: UP + "_scale_inv",
    bit_of_a_norm_flipped: "model.norm.weight",
    scales_swapped: GATE + "_scale_inv",
    digest_flipped: UP,
    another_versions_bytes: "arrived with digest",
    no_sync_begun: "no sync was begun",
    goes_on_after_an_error: "no sync was begun",
    ended_too_early: "bucket 0 (",
    file_damaged: "arrived with digest",
    file_cut: "is not what its manifest says",
    memory_overwritten: UP,
    packed_copy_forgotten: "computes with other weights",
    prefix_cache_kept: "prefix cache",
}


def layer_missing(bench: Bench) -> None:
    send(bench, lambda layers: layers[:-1])


def send(bench: Bench, change: Callable[[tuple], tuple], version: int = 1) -> None:
    layers = change(bench.scales.layers)
    bench.engine.apply_kv_scales(dataclasses.replace(bench.scales, layers=layers, version=version))


def one(**values: float) -> Callable[[Bench], None]:
    def fault(bench: Bench) -> None:
        send(bench, lambda layers: (layers[0], dataclasses.replace(layers[1], **values)))

    return fault


def stale_scales(bench: Bench) -> None:
    send(bench, lambda layers: layers, version=0)


def host_copy_left_behind(bench: Bench) -> None:
    """One of the two copies of a scale is of before."""

    def tensors_only(scales):
        for layer, values in zip(bench.engine.weights.attention(), scales.layers, strict=True):
            layer._k_scale.fill_(values.k)
        return bench.engine.weights.read_kv_scales()

    apply = bench.engine.weights.apply_kv_scales
    bench.engine.weights.apply_kv_scales = tensors_only
    try:
        send(bench, lambda layers: tuple(LayerScales(9.0, 9.0, 9.0) for _ in layers))
    finally:
        bench.engine.weights.apply_kv_scales = apply


def no_scales(bench: Bench) -> None:
    bench.engine.generate(bench.pair.requests(), version=1)


SCALE_FAULTS = {
    "layer_missing": (layer_missing, "KV scales for 1 layers, the model has 2"),
    "scale_zero": (one(k=0.0), "layer 1: k_scale is 0.0"),
    "scale_negative": (one(v=-0.1), "layer 1: v_scale is -0.1"),
    "scale_nan": (one(v=float("nan")), "layer 1: v_scale is nan"),
    "scale_inf": (one(q=float("inf")), "layer 1: q_scale is inf"),
    "scale_default": (one(k=1.0), "layer 1: k_scale is 1.0"),
    "scales_stale": (stale_scales, "KV scales are of weight version 0"),
    "host_copy_left_behind": (host_copy_left_behind, "on the device"),
    "no_scales": (no_scales, "no KV scales for weight version 1"),
}


@pytest.fixture(scope="module")
def benches(pairs, tmp_path_factory):
    made: dict[str, Bench] = {}

    def get(arm: str) -> Bench:
        if arm not in made:
            made[arm] = Bench(pairs(arm), tmp_path_factory.mktemp(f"{arm}-sync"))
        return made[arm]

    return get


@pytest.fixture(scope="module")
def outcomes():
    """{case: outcome}; written where `make sync-faults` asks for it."""
    found: dict[str, str] = {}
    yield found
    if os.environ.get("FP8RL_WRITE_SYNC_FAULTS") == "1":
        from benchmarks.record import write

        silent = [case for case, outcome in found.items() if outcome == "passed silently"]
        write(
            "sync_faults",
            {
                "cases": len(found),
                "refused_or_equal": len(found) - len(silent),
                "passed_silently": len(silent),
                "outcomes": found,
            },
        )


def suffer(bench: Bench, fault: Callable[[Bench], None], says: str) -> str:
    """What came of the fault; raises where the refusal says too little, or is none."""
    refusal = ""
    try:
        fault(bench)
    except REFUSALS as error:
        refusal = str(error)
    if not refusal:
        return "equal" if bench.use(bench.engine) == bench.wanted else "passed silently"
    assert says in refusal
    with pytest.raises(EngineStateError, match=r"no whole weights|no KV scales"):
        bench.engine.generate(bench.pair.requests(), version=1)
    return "refused"


@pytest.mark.parametrize("arm", ARMS)
def test_version_1_is_not_version_0(benches, arm):
    bench = benches(arm)
    assert bench.wanted != bench.old


WEIGHT_CASES = [
    *(("fp8-e2e-kv", fault) for fault in WEIGHT_FAULTS),
    *(("bf16", fault) for fault in (packed_copy_forgotten, bit_of_a_norm_flipped, buckets_swapped)),
]


@pytest.mark.parametrize(("arm", "fault"), WEIGHT_CASES, ids=lambda x: getattr(x, "__name__", x))
def test_faulty_weights_are_refused_by_name_and_a_retry_succeeds(benches, outcomes, arm, fault):
    bench = benches(arm)
    bench.engine.load_weights(bench.pair.folder / "v0", 0)
    outcome = suffer(bench, fault, WEIGHT_FAULTS[fault])
    outcomes[f"weights, {arm}: {fault.__name__}"] = outcome
    assert outcome == "refused"
    bench.deliver(bench.payloads())
    assert bench.use(bench.engine) == bench.wanted


@pytest.mark.parametrize("name", SCALE_FAULTS)
def test_faulty_scales_are_refused_by_name_and_a_retry_succeeds(benches, outcomes, name):
    bench = benches("fp8-e2e-kv")
    bench.deliver(bench.payloads())
    fault, says = SCALE_FAULTS[name]
    outcomes[f"KV scales: {name}"] = outcome = suffer(bench, fault, says)
    assert outcome == "refused"
    assert bench.use(bench.engine) == bench.wanted


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("times", [2, 10])
def test_synced_many_times_equals_a_fresh_engine(benches, outcomes, arm, times):
    bench = benches(arm)
    assert bench.use_old() == bench.old
    for _ in range(times - 1):
        bench.deliver(bench.payloads())
        bench.engine.load_weights(bench.pair.folder / "v0", 0)
    bench.deliver(bench.payloads())
    assert bench.use(bench.engine) == bench.wanted
    outcomes[f"{arm}: synced {times} times"] = "equal"


def test_sampled_read_back_takes_scales_with_their_codes(benches):
    from fp8rl.rollout.proof import sample_names

    bench = benches("fp8-e2e-kv")
    chosen = sample_names(bench.manifest, 5)
    assert 5 <= len(chosen) < len(bench.manifest.tensors)
    for name in chosen:
        assert bench.manifest.tensors[name].scale in (None, *chosen)
        assert not name.endswith("_scale_inv") or name.removesuffix("_scale_inv") in chosen
    other = sample_names(dataclasses.replace(bench.manifest, version=2), 5)
    assert other != chosen
    assert sample_names(bench.manifest, None) == list(bench.manifest.tensors)


@pytest.mark.parametrize("arm", ARMS)
def test_scores_are_the_log_probs_of_prompt_tokens(benches, arm):
    """Relies on: vLLM's prompt_logprobs, which skip the prefix cache."""
    bench = benches(arm)
    bench.deliver(bench.payloads())
    sequences = [r.prompt for r in bench.pair.requests()]
    _, _, scores = bench.use(bench.engine)
    learner = bench.learner.score(sequences, version=1)
    differences = [abs(g - p) for a, b in zip(scores, learner, strict=True) for g, p in zip(a, b)]  # noqa: B905
    assert len(differences) == sum(len(s) - 1 for s in sequences)
    assert sum(differences) / len(differences) < 0.1
    assert bench.engine.score(sequences, version=1) == scores
