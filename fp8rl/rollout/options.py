"""What every rollout engine asks of vLLM, on a CPU as on CUDA. Imports neither torch nor vLLM."""

from pathlib import Path
from typing import Any

from fp8rl.recipe.precision import Linear
from fp8rl.recipe.schema import Recipe

# Read by vLLM when it is imported. One process, so that weights can be reached in place.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def engine_options(recipe: Recipe, model_dir: Path, *, max_len: int) -> dict[str, Any]:
    """Keyword arguments of vLLM's LLM, for an engine that starts with dummy weights.

    disable_log_stats: the statistics are what `pressure` is made of.
    """
    return {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "load_format": "dummy",
        "kv_cache_dtype": "fp8" if recipe.precision.kv_cache is Linear.FP8 else "auto",
        "kv_cache_memory_bytes": recipe.rollout.kv_cache_mib * 2**20,
        "max_model_len": max_len,
        "max_num_seqs": recipe.rollout.chunk_size,
        "logprobs_mode": "processed_logprobs",
        "seed": recipe.seed,
        "disable_log_stats": False,
    }
