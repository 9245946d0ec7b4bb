"""The CUDA side of the adapter in a real vLLM engine on a CPU, with one thing stood in for.

vLLM's own Fp8LinearMethod, its config, model and loading code are the real ones, and so are all lines
of CudaEngine and CudaWeights. Only the product of a linear is a stand-in: no kernel that vLLM has for
CUDA runs on a CPU. So this shows that what is published is what vLLM's FP8 linears are given; it says
nothing of the kernels, of CUDA graphs, or of memory that sleeps.
"""

from pathlib import Path

import pytest
import torch

from fp8rl.learner.batch import make_batch
from fp8rl.learner.learner import Learner
from fp8rl.mismatch import mismatch_panel
from fp8rl.model.kv_scales import KvScales, KvScalesError, LayerScales
from fp8rl.model.manifest import SCALE_SUFFIX, PublishedWeightsError
from fp8rl.model.precision import Format
from fp8rl.model.published import read_published
from fp8rl.recipe.schema import TinyModel
from fp8rl.rollout import cuda_config
from fp8rl.rollout.cuda_engine import CudaEngine
from fp8rl.rollout.cuda_weights import CudaWeights, UnprovableEngineError
from fp8rl.rollout.engine import EngineStateError
from fp8rl.rollout.requests import requests_for
from tests.models import RAGGED, publish, random_weights, recipe_with, write_model

pytestmark = pytest.mark.engine

TINY = TinyModel(layers=2)
STAND_IN = "StandInBlockKernel"


class OnCpu(CudaEngine):
    """CudaEngine where vLLM packs BF16 weights for its CPU kernels, which it does not on CUDA."""

    environment = cuda_config.ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "1"}

    def _options(self, model_dir, max_len):
        return super()._options(model_dir, max_len) | {
            "enforce_eager": True,
            "enable_sleep_mode": False,
        }

    def _weights_view(self, model):
        return PackedForCpu(model, self.dims)


class PackedForCpu(CudaWeights):
    def _repack(self):
        super()._repack()
        for module in self.model.modules():
            if "Unquantized" in type(getattr(module, "quant_method", None)).__name__:
                module.quant_method.process_weights_after_loading(module)


@pytest.fixture(scope="module")
def stand_in():
    """A kernel that multiplies dequantised operands, in the place of vLLM's kernels for CUDA."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel as module
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import PlatformEnum

    class StandInBlockKernel(module.Fp8BlockScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def apply_block_scaled_mm(self, A, B, As, Bs):
            a = A.float() * As.repeat_interleave(128, 1)
            b = B.float() * Bs.repeat_interleave(128, 0).repeat_interleave(128, 1)
            return (a @ b.T).to(self.config.out_dtype)

    def keep_weight(self, layer):
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", keep_weight)
        kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS
        patch.setitem(kernels, PlatformEnum.CPU, [StandInBlockKernel])
        patch.setitem(cuda_config.KERNELS, STAND_IN, None)
        patch.setitem(cuda_config.ATTENTION, "CPU_ATTN", None)
        yield


class Pair:
    def __init__(self, folder: Path) -> None:
        self.recipe = recipe_with(
            model={"tiny": TINY.model_dump()},
            precision={
                "rollout": "fp8",
                "learner": "fp8",
                "kv_cache": "fp8",
                "exclude": ["*.1.self_attn.o_proj"],
            },
            rollout={"max_new_tokens": 12, "chunk_size": 16, "kv_cache_mib": 64},
        )
        self.folder = folder
        self.model_dir = write_model(TINY, folder / "model")
        self.learner = Learner(self.model_dir, self.recipe)
        self.learner.load(self.model_dir, 0)
        self.learner.publish(self.folder / "v0", version=0)
        self.engine = OnCpu(self.model_dir, self.recipe, max_len=256)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return read_published(self.folder / "v0", 0)[1]

    def scales(self) -> KvScales:
        generator = torch.Generator().manual_seed(9)
        rows = [torch.randint(4, 90, (20,), generator=generator).tolist() for _ in range(32)]
        batch = make_batch([r[:6] for r in rows], [r[6:] for r in rows])
        return self.learner.calibrate_kv(batch, version=0, source="test")

    def ready(self) -> KvScales:
        self.engine.load_weights(self.folder / "v0", 0)
        scales = self.scales()
        self.engine.apply_kv_scales(scales)
        return scales

    def requests(self):
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(4, 90, (6,), generator=generator).tolist() for _ in range(8)]
        return requests_for(prompts, list(range(8)), 2, run_seed=0, iteration=1)


@pytest.fixture(scope="module")
def pair(stand_in, tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("cuda"))


def test_published_bytes_are_what_the_linears_hold(pair):
    pair.ready()
    held = pair.engine.weights.read()
    assert held.keys() == pair.tensors.keys()
    for name, sent in pair.tensors.items():
        assert held[name].dtype is sent.dtype
        assert torch.equal(held[name].view(torch.uint8), sent.view(torch.uint8)), name


def test_vllms_own_loader_cannot_load_a_second_time(pair):
    """Why weights are copied in place: after the first load parameters have lost vLLM's loader."""
    with pytest.raises(AttributeError, match="load_"):
        pair.engine.inside(lambda model: model.load_weights(iter(pair.tensors.items())))
    pair.ready()


def test_places_are_those_where_vllms_own_loader_puts_a_checkpoint(pair):
    """Relies on: vLLM's loader taking published names and fusing by its own rules: the oracle here."""
    from vllm.config import set_current_vllm_config

    model, held = pair.engine.weights.model, {}
    with set_current_vllm_config(pair.engine.llm.llm_engine.vllm_config):
        for name, module in model.named_modules():
            if hasattr(module, "logical_widths"):  # FP8 linears, as they were before the first load
                held[name] = (module.weight, module.weight_scale_inv)
                k, widths = module.input_size_per_partition, module.logical_widths
                loader = module.weight_loader_v2
                module.quant_method.create_weights(
                    module, k, widths, k, sum(widths), torch.bfloat16, weight_loader=loader
                )
    model.load_weights(iter(pair.tensors.items()))
    loaded = CudaWeights(model, pair.engine.dims).read()
    assert loaded.keys() == pair.tensors.keys()
    for name, sent in pair.tensors.items():
        assert torch.equal(loaded[name].view(torch.uint8), sent.view(torch.uint8)), name
    for name, parameters in held.items():
        module = model.get_submodule(name)
        module.weight, module.weight_scale_inv = parameters
    pair.ready()


def test_engine_computes_with_them(pair):
    """Relies on: vLLM calling its kernel with codes and descales, activations in groups of 128."""
    pair.ready()
    requests = pair.requests()
    completions = pair.engine.generate(requests, version=0)
    batch = make_batch(
        [r.prompt for r in requests], [c.tokens for c in completions], [c.logprobs for c in completions]
    )
    p = pair.learner.logprobs(batch, version=0)
    assert mismatch_panel(batch.g, p, batch.mask, truncate=2.0)["token_mult_prob_error"] < 1.15
    other = Learner(pair.model_dir, pair.recipe)
    other.model.load(random_weights(TINY, seed=5))
    other.version = 0
    far = other.logprobs(batch, version=0)
    assert mismatch_panel(batch.g, far, batch.mask, truncate=2.0)["token_mult_prob_error"] > 1.5


def test_formats_and_kv_cache_are_told(pair):
    pair.ready()
    report = pair.engine.precision_report()
    formats = {row["parameter"]: row["effective"] for row in report["parameters"]}
    assert formats["model.layers.1.self_attn.o_proj.weight"] == Format.BF16
    assert sum(f == Format.FP8_BLOCK for f in formats.values()) == 7 * TINY.layers - 1
    assert report["kv_cache"] == {"dtype": "fp8", "storage": "uint8", "query": "bf16"}


def load(pair, tensors):
    publish(pair.folder / "other", 0, tensors)
    pair.engine.load_weights(pair.folder / "other", 0)


def test_a_load_that_does_not_fit_changes_nothing_and_is_named(pair):
    pair.ready()
    before = pair.engine.weights.read()
    name = "model.layers.0.mlp.up_proj.weight"
    sent = {k: torch.zeros_like(v) for k, v in pair.tensors.items()}
    sent[name + SCALE_SUFFIX] = sent[name + SCALE_SUFFIX][:1]
    with pytest.raises(PublishedWeightsError, match=f"{name}{SCALE_SUFFIX}: sent"):
        load(pair, sent)
    after = pair.engine.weights.read()
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)


def test_a_parameter_that_moved_is_refused(pair):
    pair.ready()
    parameter = pair.engine.weights._parameters["model.norm.weight"]
    old = parameter.data
    parameter.data = old.clone()
    with pytest.raises(UnprovableEngineError, match=r"CUDA graphs read the old ones.*model\.norm"):
        pair.engine.load_weights(pair.folder / "v0", 0)
    with pytest.raises(EngineStateError, match="no whole weights"):
        pair.engine.generate(pair.requests(), version=0)
    parameter.data = old


def test_kernel_or_attention_that_hides_what_arrived_is_refused(pair, monkeypatch):
    model = pair.engine.weights.model
    with monkeypatch.context() as patch:
        patch.delitem(cuda_config.KERNELS, STAND_IN)
        with pytest.raises(UnprovableEngineError, match=r"layers\.0\.self_attn\.qkv_proj.*StandIn"):
            CudaWeights(model, pair.engine.dims)
    monkeypatch.setitem(cuda_config.ATTENTION, "CPU_ATTN", "it hides them")
    with pytest.raises(UnprovableEngineError, match=r"layer 0: .*CPU_ATTN: it hides them"):
        CudaWeights(model, pair.engine.dims)


def test_scales_are_applied_after_a_wake_whatever_vllm_did_to_them(pair):
    """vLLM 28783 reset scales to 1.0 as the KV cache woke; here that is planted."""
    scales = pair.ready()
    first = pair.engine.generate(pair.requests(), version=0)
    pair.engine.sleep()
    with pytest.raises(EngineStateError, match="no whole weights"):
        pair.engine.generate(pair.requests(), version=0)
    with pytest.raises(EngineStateError, match="not awake"):
        pair.engine.wake_for_generation(scales)
    pair.engine.wake_for_weights()
    pair.engine.load_weights(pair.folder / "v0", 0)
    with pytest.raises(EngineStateError, match="scales must be applied again"):
        pair.engine.wake_for_generation(None)
    for layer in pair.engine.weights.attention():
        for name in ("_q_scale", "_k_scale", "_v_scale"):
            getattr(layer, name).fill_(1.0)
    with pytest.raises(KvScalesError, match="on the device"):
        pair.engine.weights.read_kv_scales()
    assert pair.engine.after_wake(scales) == list(scales.layers)
    assert pair.engine.weights.read_kv_scales() == list(scales.layers)
    assert pair.engine.generate(pair.requests(), version=0) == first


def test_scales_of_another_version_do_not_pass_a_wake(pair):
    good = pair.ready()
    stale = KvScales(3, tuple(LayerScales(s.q, s.k, s.v) for s in good.layers), 1, "stale")
    with pytest.raises(KvScalesError, match="weight version 3"):
        pair.engine.after_wake(stale)
    with pytest.raises(EngineStateError, match="no KV scales"):
        pair.engine.generate(pair.requests(), version=0)


def test_model_whose_blocks_would_differ_does_not_start(stand_in, tmp_path):
    recipe = recipe_with(model={"tiny": RAGGED.model_dump()}, precision={"rollout": "fp8"})
    with pytest.raises(EngineStateError, match=r"layers\.0\.self_attn\.k_proj\.weight: 64 rows"):
        CudaEngine(write_model(RAGGED, tmp_path / "model"), recipe, max_len=64)


# --- the engine itself, of either device


def test_dropped_prefix_cache_is_empty(pair):
    """Relies on: reset_prefix_cache saying that it dropped everything, and doing so."""
    from vllm import SamplingParams

    pair.ready()
    generator = torch.Generator().manual_seed(2)
    prompt = {"prompt_token_ids": torch.randint(4, 90, (200,), generator=generator).tolist()}
    parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def cached() -> int:
        return pair.engine.llm.generate([prompt], parameters, use_tqdm=False)[0].num_cached_tokens

    pair.engine._drop_prefix_cache()
    assert cached() == 0
    assert cached() > 0
    pair.engine._drop_prefix_cache()
    assert cached() == 0


def test_kv_cache_has_the_bytes_that_the_recipe_gives_it(pair):
    """Relies on: kv_cache_memory_bytes being what the cache of all layers takes."""
    pair.ready()
    caches = [layer.kv_cache for layer in pair.engine.weights.attention()]
    used = sum(c.nbytes if isinstance(c, torch.Tensor) else c[0].nbytes for c in caches)
    assert 0.95 < used / (pair.recipe.rollout.kv_cache_mib * 2**20) <= 1


def test_answers_get_their_full_length_where_the_end_is_ignored(pair, monkeypatch):
    """Relies on: ignore_eos and an empty stop_token_ids, which timings need."""
    pair.ready()
    monkeypatch.setattr(pair.engine, "eos", list(range(60)))  # most of what there is to say
    requests = pair.requests()
    assert any(c.finish == "stop" for c in pair.engine.generate(requests, version=0))
    full = pair.engine.generate(requests, version=0, ignore_end=True)
    assert {(len(c.tokens), c.finish) for c in full} == {(12, "length")}


def test_padding_of_the_vocabulary_is_zero(pair):
    """Relies on: vLLM padding the embedding's rows, and dummy weights leaving noise there."""
    embedding = pair.engine.weights._parameters["model.embed_tokens.weight"]
    vocab = pair.engine.dims.vocab
    assert len(embedding) > vocab
    embedding.data[vocab:] = 1.0
    pair.ready()
    assert not embedding[vocab:].any()
