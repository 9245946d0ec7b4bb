"""The real SmolLM2-135M-Instruct: its conversion from GGUF, and the learner beside transformers."""

from pathlib import Path

import pytest
import torch

from fp8rl.data.chat import question_tokens
from fp8rl.learner.batch import make_batch
from fp8rl.learner.learner import Learner
from fp8rl.learner.logprobs import token_logprobs
from fp8rl.mismatch import mismatch_panel
from fp8rl.model.dims import read_dims
from fp8rl.model.megatron import PolicyModel, read_hf_weights
from fp8rl.model.precision import Format, PlanRules, make_plan
from fp8rl.model.source import model_folder
from fp8rl.recipe.load import load_recipe

CONFIGS = Path(__file__).parents[2] / "configs" / "smollm2"
CHATS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "State the final answer to the following arithmetic problem: 12 + 5 =": "12 + 5 = 17.",
    "Name three colours.": "1. Red\n2. Green\n3. Blue\n\nThese are the primary colours of light.",
    "Say something odd.": "Zebra, 8,192 umbrellas! Quietly\tthe moon taxed 3.5% of it.",
}


@pytest.fixture(scope="module")
def recipe(runs_dir):
    return load_recipe(CONFIGS / "bf16.yaml", [f"runs_dir={runs_dir}", "learner.micro_batch=2"]).recipe


@pytest.fixture(scope="module")
def folder(recipe):
    return model_folder(recipe)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def reference(folder):
    """transformers' own model in FP32."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def batch(recipe, tokenizer, reference):
    """Chats, with transformers' log-probs of the replies in place of a rollout's."""
    prompts = [question_tokens(tokenizer, recipe.task, question) for question in CHATS]
    replies = [[*tokenizer(reply).input_ids, tokenizer.eos_token_id] for reply in CHATS.values()]
    logprobs = []
    for prompt, reply in zip(prompts, replies, strict=True):
        tokens = torch.tensor([prompt + reply])
        with torch.no_grad():
            logp = torch.log_softmax(reference(tokens).logits[0, :-1], -1)
        of_token = logp[torch.arange(len(logp)), tokens[0, 1:]]
        logprobs.append(of_token[len(prompt) - 1 :].tolist())
    return make_batch(prompts, replies, logprobs)


def test_converted_model_is_smollm2(folder):
    dims = read_dims(folder)
    assert (dims.hidden, dims.intermediate, dims.layers, dims.vocab) == (576, 1536, 30, 49152)
    assert (dims.heads, dims.kv_heads, dims.head_dim, dims.tied_embeddings) == (9, 3, 64, True)
    assert (dims.rope_theta, dims.max_positions) == (100_000.0, 8192)
    assert dims.norm_eps == pytest.approx(1e-5)
    weights = read_hf_weights(folder, dims)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_converted_model_answers_and_ends_its_turn(recipe, tokenizer, reference):
    prompt = question_tokens(tokenizer, recipe.task, "What is the capital of France?")
    out = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)
    answer = out[0, len(prompt) :].tolist()
    assert tokenizer.decode(answer[:-1]) == "The capital of France is Paris."
    assert answer[-1] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_fp32_policy_agrees_with_transformers(folder, batch):
    dims = read_dims(folder)
    plan = make_plan(PlanRules(Format.BF16), dims)
    model = PolicyModel(dims, plan, compute_dtype=torch.float32)
    model.load(read_hf_weights(folder, dims))
    with torch.no_grad():
        logp, _ = token_logprobs(model(batch.tokens), batch.tokens, 1.0)
    assert (logp - batch.g)[batch.mask].abs().max() < 1e-3
    assert batch.g[batch.mask].std() > 1  # sure and unsure tokens


@pytest.mark.parametrize(("arm", "limit"), [("bf16", 1.05), ("fp8-e2e", 1.25)])
def test_learner_agrees_with_transformers(recipe, folder, batch, arm, limit):
    """In its own precision, with micro-batches. FP8's distance from FP32 is that of its rounding:
    transformers with FP8 linears by PyTorch's casts is as far from its own FP32 (1.19 here).
    """
    precision = load_recipe(CONFIGS / f"{arm}.yaml").recipe.precision
    learner = Learner(folder, recipe.model_copy(update={"precision": precision}))
    learner.load(folder, 0)
    p = learner.logprobs(batch, version=0)
    error = mismatch_panel(batch.g, p, batch.mask, truncate=2.0)["token_mult_prob_error"]
    assert error < limit
    shifted = mismatch_panel(batch.g.roll(1, 1), p, batch.mask, truncate=2.0)
    assert shifted["token_mult_prob_error"] > 2  # the comparison can fail
