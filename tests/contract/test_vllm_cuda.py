"""What the CUDA side of the adapter relies on in vLLM, held against vLLM's own code on a CPU.

Nothing here multiplies on a GPU. The kernels' loading code is plain Python and runs on a CPU; what a
kernel reads while it runs is looked up in vLLM's source. Each test names one behaviour, and its message
says what to look at when an upgrade breaks it. docs/vllm_adapter.md lists them.
"""

import inspect
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8rl.model.dims import dims_from_hf
from fp8rl.model.names import name_table
from fp8rl.model.precision import make_plan
from fp8rl.model.tiny import hf_config
from fp8rl.recipe.rules import plan_rules
from fp8rl.recipe.schema import TinyModel
from fp8rl.rollout import cuda_config
from tests.models import recipe_with

DIMS = dims_from_hf(hf_config(TinyModel()))
RECIPE = recipe_with(precision={"rollout": "fp8", "kv_cache": "fp8", "first_layers_bf16": 1})
PLAN = make_plan(plan_rules(RECIPE.precision, RECIPE.precision.rollout), DIMS)
LINEARS = [slot for slot in name_table(DIMS) if slot.is_linear]


def source(module: str) -> str:
    """The text of a vLLM module, not imported: most CUDA modules cannot be on a CPU."""
    spec = find_spec(module)
    assert spec is not None, f"{module} is gone from vLLM: find what took its place"
    return Path(str(spec.origin)).read_text()


def class_of(kernel: str):
    from vllm.model_executor.kernels import linear

    return getattr(linear, kernel)


@pytest.fixture
def layer(monkeypatch):
    """Makes a layer of vLLM's Fp8LinearMethod with a kernel of ours to choose, never run."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.quantization import fp8

    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0))
    config = VllmConfig()

    def make(kernel: str, rows=(256, 128, 128), columns: int = 256, fill: bool = True):
        def chosen(**options):
            options.pop("module_name")
            config_class = inspect.getmodule(class_of(kernel)).FP8ScaledMMLinearLayerConfig
            return class_of(kernel)(config_class(**options))

        monkeypatch.setattr(fp8, "init_fp8_linear_kernel", chosen)
        module = torch.nn.Module()
        quantization = fp8.Fp8Config.from_config(cuda_config.quantization_config(PLAN))
        with set_current_vllm_config(config):
            config.model_config = SimpleNamespace(dtype=torch.bfloat16)
            module.quant_method = fp8.Fp8LinearMethod(quantization)
            module.quant_method.create_weights(
                module, columns, list(rows), columns, sum(rows), torch.bfloat16, weight_loader=None
            )
        if fill:
            generator = torch.Generator().manual_seed(0)
            values = torch.randn(module.weight.shape, generator=generator) * 100
            module.weight.data.copy_(values.to(torch.float8_e4m3fn))
            scales = torch.rand(module.weight_scale_inv.shape, generator=generator) * 1e-3
            module.weight_scale_inv.data.copy_(scales)
        return module

    return make


def bytes_of(module) -> tuple[torch.Tensor, torch.Tensor]:
    return module.weight.data.view(torch.uint8).clone(), module.weight_scale_inv.data.clone()


# --- the config and the layers


def test_engine_arguments_take_the_options(tmp_path):
    """Relies on: names of LLM's arguments; a per-scheme kernel choice; the attention backend's name."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(**cuda_config.engine_options(RECIPE, PLAN, tmp_path, max_len=64))
    assert args.kernel_config.linear_backend_per_quant == {"fp8_block_w8a8": "cutlass"}
    assert args.attention_config.backend.name == "FLASH_ATTN"
    assert cuda_config.ATTENTION["FLASH_ATTN"] is None


def test_kernel_that_is_asked_for_is_the_one_for_block_fp8():
    """Relies on: init_fp8_linear_kernel looking for kernels under the scheme's name."""
    from vllm.model_executor.kernels import linear

    assert 'quantization="fp8_block_w8a8"' in inspect.getsource(linear.init_fp8_linear_kernel)
    names = {kernel.__name__ for kernel in linear._LINEAR_BACKEND_KERNEL_MAP["cutlass"]}
    block = {name for name in names if "Fp8BlockScaled" in name}
    assert block == {"CutlassFp8BlockScaledMMKernel"}
    assert cuda_config.KERNELS["CutlassFp8BlockScaledMMKernel"] is None


def test_plan_reaches_vllm_layer_by_layer():
    """Relies on: Fp8Config.from_config, and ignored_layers matching unfused names of fused layers."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
    from vllm.model_executor.models.llama import LlamaForCausalLM

    config = Fp8Config.from_config(cuda_config.quantization_config(PLAN))
    assert (config.weight_block_size, config.activation_scheme) == ([128, 128], "dynamic")
    skipped = {
        slot.vllm: is_layer_skipped(
            slot.vllm.removesuffix(".weight"),
            config.ignored_layers,
            LlamaForCausalLM.packed_modules_mapping,
            match_mode=config.ignored_layers_match_mode,
        )
        for slot in LINEARS
    }
    assert skipped == {slot.vllm: not PLAN[slot.hf[0]].format.is_fp8 for slot in LINEARS}
    assert set(skipped.values()) == {True, False}


@pytest.mark.parametrize("slot", LINEARS[:4], ids=lambda slot: slot.vllm)
def test_fp8_linear_registers_weight_and_descales(layer, slot):
    """Relies on: names, shapes and dtypes of Fp8LinearMethod.create_weights; contiguous storage."""
    module = layer("CutlassFp8BlockScaledMMKernel", slot.rows, slot.columns, fill=False)
    held = dict(module.named_parameters())
    assert held.keys() == {"weight", "weight_scale_inv"}
    assert held["weight"].shape == (sum(slot.rows), slot.columns)
    assert held["weight"].dtype is torch.float8_e4m3fn
    blocks = (sum(-(-rows // 128) for rows in slot.rows), -(-slot.columns // 128))
    assert held["weight_scale_inv"].shape == blocks
    assert held["weight_scale_inv"].dtype is torch.float32
    assert all(p.is_contiguous() for p in held.values())


def test_vllm_refuses_fused_parts_that_end_inside_a_block(layer):
    """Relies on: validate_fp8_block_shape. If it stops refusing, our own check still stands."""
    layer("CutlassFp8BlockScaledMMKernel", (256, 128, 64), 256)
    with pytest.raises(ValueError, match="not divisible by weight quantization block_n"):
        layer("CutlassFp8BlockScaledMMKernel", (256, 64, 64), 256)


def test_activations_are_cut_into_whole_groups_only():
    """Relies on: per_token_group_quant_fp8 refusing a contraction axis that is not whole groups."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    with pytest.raises(AssertionError, match="must be divisible"):
        per_token_group_quant_fp8(torch.ones(2, 192), 128, use_ue8m0=False)


# --- kernels: what they leave of what was loaded


def test_every_kernel_that_vllm_may_choose_is_judged():
    """A kernel that an upgrade adds is refused until cuda_config.KERNELS says whether it reads back."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    offered = {k.__name__ for k in linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]}
    assert offered == cuda_config.KERNELS.keys(), (
        "vLLM's block FP8 kernels for CUDA changed: read process_weights_after_loading of each new one "
        "and enter it in cuda_config.KERNELS"
    )


PLAIN = [name for name, why in cuda_config.KERNELS.items() if why is None and "Deep" not in name]


@pytest.mark.parametrize("kernel", PLAIN)
def test_allowed_kernel_computes_from_the_storage_that_was_registered(layer, kernel):
    """Relies on: process_weights_after_loading making new Parameters over the same storage.

    So a copy into that storage is a whole reload. If this fails, a second load must go another way.
    """
    module = layer(kernel)
    before, storage = bytes_of(module), (module.weight.data_ptr(), module.weight_scale_inv.data_ptr())
    module.quant_method.process_weights_after_loading(module)
    assert (module.weight.data_ptr(), module.weight_scale_inv.data_ptr()) == storage
    assert all(torch.equal(a, b) for a, b in zip(bytes_of(module), before, strict=True))
    params = module.quant_method.fp8_linear._get_layer_params(module)
    assert (params.weight.data_ptr(), params.block_scale.data_ptr()) == storage


@pytest.fixture
def deep_gemm(monkeypatch):
    """DeepGEMM as on Hopper: it is not installed, and there it returns 128x128 FP32 scales as given."""
    from vllm.model_executor.kernels.linear.scaled_mm import deep_gemm as kernel
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.utils import deep_gemm as utils

    cast = utils.per_block_cast_to_fp8
    uncompiled = getattr(cast, "_torchdynamo_orig_callable", cast)
    monkeypatch.setattr(utils, "per_block_cast_to_fp8", uncompiled)
    monkeypatch.setattr(fp8_utils, "transform_sf_into_required_layout", lambda sf, **_: sf)
    monkeypatch.setattr(kernel, "is_deep_gemm_supported", lambda: True)

    def use(e8m0: bool):
        monkeypatch.setattr(kernel, "is_deep_gemm_e8m0_used", lambda: e8m0)

    return use


def test_deep_gemm_with_fp32_scales_leaves_bytes_and_storage(layer, deep_gemm):
    """Relies on: VLLM_USE_DEEP_GEMM_E8M0=0 and DeepGEMM's own layout rule for Hopper (its layout.hpp:
    FP32 scales of 128x128 blocks need no transform)."""
    assert cuda_config.ENVIRONMENT["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    assert "VLLM_USE_DEEP_GEMM_E8M0" in source("vllm.envs")
    deep_gemm(False)
    module = layer("DeepGemmFp8BlockScaledMMKernel")
    before, storage = bytes_of(module), (module.weight.data_ptr(), module.weight_scale_inv.data_ptr())
    module.quant_method.process_weights_after_loading(module)
    assert all(torch.equal(a, b) for a, b in zip(bytes_of(module), before, strict=True))
    assert (module.weight.data_ptr(), module.weight_scale_inv.data_ptr()) == storage


def test_deep_gemm_with_ue8m0_writes_other_bytes_and_is_refused(layer, deep_gemm):
    """Relies on: `use_deep_gemm_e8m0` on the kernel saying so, and descales multiplying codes."""
    from fp8rl.rollout.cuda_weights import UnprovableEngineError, _require_readable_weights

    deep_gemm(True)
    module = layer("DeepGemmFp8BlockScaledMMKernel")
    codes, scales = module.weight.data.float(), module.weight_scale_inv.data.clone()
    want = codes * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    module.quant_method.process_weights_after_loading(module)
    new = module.weight_scale_inv.data
    assert torch.equal(new, torch.exp2(torch.log2(new).round()))
    assert not torch.equal(new, scales)
    got = module.weight.data.float() * new.repeat_interleave(128, 0).repeat_interleave(128, 1)
    torch.testing.assert_close(got, want, rtol=0.07, atol=float(new.max()) * 2**-9)
    with pytest.raises(UnprovableEngineError, match="UE8M0"):
        _require_readable_weights("x", module.quant_method.fp8_linear)


@pytest.mark.parametrize("kernel", ["MarlinFP8ScaledMMLinearKernel", "HummingFP8ScaledMMLinearKernel"])
def test_kernels_refused_for_repacking_do_repack(kernel):
    """If this fails vLLM changed them; they may have become readable."""
    text = inspect.getsource(class_of(kernel).process_weights_after_loading)
    assert "prepare_fp8_layer_for_marlin" in text or "convert_linear_layer_to_humming" in text


def test_flashinfer_kernel_takes_activations_in_bf16():
    """Relies on: apply_input_quant being False there, the reason that it is refused."""
    assert not class_of("FlashInferFp8DeepGEMMDynamicBlockScaledKernel").apply_input_quant
    for name in PLAIN:
        assert class_of(name).apply_input_quant, f"{name} rounds activations by another rule now"


def test_bf16_layers_are_left_as_they_are_on_cuda():
    """Relies on: UnquantizedLinearMethod and the embedding's method repacking on CPU and XPU only."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        text = inspect.getsource(method.process_weights_after_loading)
        body = [line for line in text.splitlines()[1:] if line.strip()]
        top = [line.strip() for line in body if len(line) - len(line.lstrip()) == 8]
        assert [line for line in top if not line.startswith("#")] in (
            ["if current_platform.is_cpu():"],
            ["if current_platform.is_cpu():", "elif current_platform.is_xpu():"],
        ), f"{method.__name__} does something on CUDA now: see that a second load still reaches it"


# --- KV scales


@pytest.mark.parametrize(
    "backend", [name for name, why in cuda_config.ATTENTION.items() if why is None]
)
def test_allowed_attention_reads_scales_from_device_memory(backend):
    """Relies on: no plain-number copy of a scale being read, which a CUDA graph would keep."""
    text = source(f"vllm.v1.attention.backends.{backend.lower()}")
    for name in "qkv":
        assert f"layer._{name}_scale" in text
        assert f"_{name}_scale_float" not in text, (
            f"{backend} now reads {name}_scale as a number: does a CUDA graph see a later version?"
        )


def test_flashinfer_keeps_the_first_scales_it_saw():
    """The reason that it is refused. If this fails, look whether it may be allowed."""
    text = source("vllm.v1.attention.backends.flashinfer")
    assert "if self.bmm1_scale is None" in text
    assert "self.bmm1_scale *= layer._q_scale_float * layer._k_scale_float" in text
    assert "self.bmm2_scale *= layer._v_scale_float" in text


def test_queries_are_quantised_by_the_device_q_scale():
    """Relies on: Attention.query_quant, made where the backend takes FP8 queries, fed with _q_scale."""
    from vllm.model_executor.layers.attention import Attention

    assert "self.query_quant = QuantFP8(" in inspect.getsource(Attention.__init__)
    forward = inspect.getsource(Attention.forward)
    assert "self.query_quant(query, self._q_scale)" in forward
    for backend in ("flash_attn", "triton_attn"):
        text = source(f"vllm.v1.attention.backends.{backend}")
        assert "supports_quant_query_input" in text


def test_all_copies_of_a_scale_are_known():
    """Relies on: set_default_quant_scales naming every copy; buffers, numbers and host tensors.

    A copy that an upgrade adds must be set and read back in EngineWeights.apply_kv_scales.
    """
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    layer = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    held = {name for name in (*layer.__dict__, *layer._buffers) if "_scale" in name}
    scales = {f"_{n}_scale{kind}" for n in "qkv" for kind in ("", "_float")}
    assert held == scales | {"_k_scale_cpu", "_v_scale_cpu", "_prob_scale", "_prob_scale_float"}
    assert {f"_{n}_scale" for n in "qkv"} <= set(layer._buffers)


def test_kv_method_lets_go_of_its_parameters_after_the_dummy_load():
    """Relies on: q_scale, k_scale, v_scale parameters being gone once weights are processed, so that
    the model's parameters are those of the name table."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8KVCacheMethod

    layer = torch.nn.Module()
    layer.kv_cache_dtype = "fp8"
    set_default_quant_scales(layer, register_buffer=True)
    method = Fp8KVCacheMethod(Fp8Config.from_config(cuda_config.quantization_config(PLAN)))
    method.create_weights(layer)
    assert {n for n, _ in layer.named_parameters()} == {"q_scale", "k_scale", "v_scale", "prob_scale"}
    method.process_weights_after_loading(layer)
    assert list(layer.named_parameters()) == []
    layer._k_scale.fill_(0.25)
    method.process_weights_after_loading(layer)  # a reload must not put 1.0 back
    assert float(layer._k_scale) == 0.25


# --- sleep and wake


def test_wake_restores_buffers_with_the_weights_and_sets_no_scales():
    """What 0.32 does: scales are buffers, saved before a level 2 sleep, restored with the weights.

    CudaEngine.after_wake applies them again whatever vLLM does. If this fails, read Worker.wake_up:
    whether anything touches scales after the point where after_wake runs.
    """
    text = source("vllm.v1.worker.gpu_worker")
    wake = text[text.index("def wake_up(") :].split("\n    def ")[0]
    assert 'wake_weights = tags is None or "weights" in tags' in wake
    assert "_sleep_saved_buffers" in wake
    for module in ("gpu_worker", "gpu_model_runner", "gpu.model_runner"):
        other = source(f"vllm.v1.worker.{module}")
        assert "init_fp8_kv_scales" not in other
        assert "post_kv_cache_wake_up" not in other


def test_host_tensors_of_scales_are_not_saved_over_a_sleep():
    """Relies on: nothing. It is why scales are applied after a wake even where buffers come back:
    `_k_scale_cpu` is no buffer, is made on the device of the load, and a level 2 sleep discards it."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    layer = torch.nn.Module()
    with torch.device("meta"):
        set_default_quant_scales(layer, register_buffer=True)
    assert layer._k_scale_cpu.device.type == "meta"
    assert "_k_scale_cpu" not in layer._buffers


def test_tags_and_answer_of_wake_up():
    """Relies on: tags "weights" and "kv_cache"; True only where all memory is back."""
    from vllm import LLM
    from vllm.v1.executor.abstract import SLEEP_TAGS

    assert {"weights", "kv_cache"} == set(SLEEP_TAGS)
    assert inspect.signature(LLM.wake_up).return_annotation in (bool, "bool")
    assert "level" in inspect.signature(LLM.sleep).parameters
