"""The policy of a finished run, taken away: by transformers, by a fresh vLLM, by format checks."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from flows.cli import app
from fp8rl.checkpoints import checkpoint_folder
from fp8rl.data.prepare import read_prompts
from fp8rl.device import compute_environment
from fp8rl.export import ExportError, ExportFormat, export
from fp8rl.learner.learner import Learner
from fp8rl.model.published import read_published
from fp8rl.numerics.formats import Scaling
from fp8rl.recipe.rules import RecipeError
from fp8rl.rollout.options import ENVIRONMENT
from fp8rl.runs import Run
from fp8rl.tables import from_parquet
from fp8rl.tracking import tracking_uri

pytestmark = pytest.mark.pipeline

LAST = 3
# A fresh vLLM, without anything of fp8rl in it but the sizes of its cache.
GREEDY = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompts, limit = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3])
llm = LLM(folder, dtype="bfloat16", max_model_len=128, enforce_eager=True, kv_cache_memory_bytes=2**28)
options = SamplingParams(temperature=0.0, max_tokens=limit)
outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], options)
print(json.dumps([output.outputs[0].text for output in outputs]))
"""


def run_of(run_arm, arm) -> Run:
    return Run(run_arm(arm).journal.folder)


def val_sequences(run):
    val = read_prompts(run.folder / "data", "val")
    return [p + a for p, a in zip(val["prompt_tokens"], val["answer_tokens"], strict=True)]


def scores(model, sequences):
    """Log-probs of every token but the first, by transformers."""
    found = []
    for tokens in sequences:
        x = torch.tensor([tokens])
        with torch.no_grad():
            logp = model(x).logits[0, :-1].float().log_softmax(-1)
        found.append(logp.gather(-1, x[0, 1:, None])[:, 0])
    return torch.cat(found)


def run_scores(run, sequences):
    """The same by the run's own learner, from its checkpoint."""
    learner = Learner(run.folder / "model", run.recipe)
    learner.restore(checkpoint_folder(run.folder, LAST))
    learner.use_kv_scales(LAST, None)  # transformers has no FP8 cache
    return torch.tensor([v for row in learner.score(sequences, version=LAST) for v in row])


def test_the_logged_model_is_the_export(run_arm, tmp_path):
    import mlflow
    from mlflow import MlflowClient

    run = run_of(run_arm, "bf16")
    out = tmp_path / "policy"
    words = ["export", run.name, "--out", str(out), "--log-model", "--runs-dir", str(run.folder.parent)]
    refused = CliRunner().invoke(app, [*words, "--format", "fp8"])
    assert refused.exit_code == 2
    assert not out.exists()
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    uri = next(word for word in done.output.split() if word.startswith("models:/")).rstrip(":")
    mlflow.set_tracking_uri(tracking_uri(run.recipe))
    held = mlflow.transformers.load_model(uri, return_type="components")
    wanted = load_file(out / "model.safetensors")
    found = held["model"].state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    val = read_prompts(run.folder / "data", "val")
    assert held["tokenizer"](val["question"][0]).input_ids == val["prompt_tokens"][0]
    mlflow_run = run_arm("bf16").summary["mlflow_run"]
    (output,) = MlflowClient().get_run(mlflow_run).outputs.model_outputs
    assert (f"models:/{output.model_id}", output.step) == (uri, LAST)
    assert MlflowClient().get_run(mlflow_run).info.status == "FINISHED"


def test_the_bf16_export_answers_as_the_run_did(run_arm, tmp_path):
    run = run_of(run_arm, "bf16")
    done = export(run, ExportFormat.BF16, out=tmp_path / "policy")
    assert (done.version, done.notes) == (LAST, [])
    about = json.loads((done.folder / "export.json").read_text())
    assert about["weights_digest"] == run.journal.record(LAST, "train").output["weights"]

    # What the engine was sent is what is there.
    _, sent = read_published(run.journal.weights_folder(LAST), LAST)
    held = load_file(done.folder / "model.safetensors")
    assert held.keys() == sent.keys()
    assert all(torch.equal(held[name], sent[name]) for name in sent)

    val = read_prompts(run.folder / "data", "val")
    (tmp_path / "prompts.json").write_text(json.dumps(val["prompt_tokens"]))
    limit = str(run.recipe.rollout.max_new_tokens)
    environment = os.environ | ENVIRONMENT | compute_environment(run.recipe)
    command = [sys.executable, "-c", GREEDY, str(done.folder), str(tmp_path / "prompts.json"), limit]
    answered = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answered.returncode == 0, answered.stderr[-3000:]
    texts = json.loads(answered.stdout.splitlines()[-1])
    evaluated = from_parquet(run.journal.read_file(LAST, "evaluate", "evaluation.parquet"))
    greedy = [
        t for t, kind in zip(evaluated["text"], evaluated["kind"], strict=True) if kind == "greedy"
    ]
    assert texts == greedy


@pytest.mark.parametrize(
    ("arm", "fmt"), [("bf16", ExportFormat.BF16), ("fp8-e2e-kv", ExportFormat.FP8)]
)
def test_plain_transformers_gives_the_runs_log_probs(run_arm, tmp_path, arm, fmt):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = run_of(run_arm, arm)
    fmt = ExportFormat.BF16 if arm == "bf16" else ExportFormat.FP8
    folder = export(run, fmt, out=tmp_path / "policy").folder
    if fmt is ExportFormat.FP8:
        _dequantise(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sequences = val_sequences(run)
    difference = (scores(model, sequences) - run_scores(run, sequences)).abs()
    assert difference.mean() < (0.01 if arm == "bf16" else 0.03)
    # It can fail: the weights that the run began with are further away.
    before = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32)
    far = (scores(before, sequences) - run_scores(run, sequences)).abs()
    assert far.mean() > 3 * difference.mean()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(sequences[0]) == AutoTokenizer.from_pretrained(run.folder / "model").decode(
        sequences[0]
    )


def _dequantise(folder):
    """Codes times descales, block by block, as any reader of the format does."""
    from safetensors.torch import save_file

    tensors = load_file(folder / "model.safetensors")
    plain = {}
    for name, value in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if value.dtype is torch.float8_e4m3fn:
            scales = tensors[f"{name}_scale_inv"]
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = value.float() * wide[: value.shape[0], : value.shape[1]]
        plain[name] = value.float()
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


def test_the_fp8_export_is_of_the_format_that_vllm_and_transformers_read(run_arm, tmp_path):
    from transformers import FineGrainedFP8Config
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    run = run_of(run_arm, "fp8-e2e-kv")
    folder = export(run, ExportFormat.FP8, out=tmp_path / "policy").folder
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    vllm = Fp8Config.from_config(config)
    assert vllm.is_checkpoint_fp8_serialized
    assert (vllm.activation_scheme, vllm.weight_block_size) == ("dynamic", [128, 128])
    assert vllm.ignored_layers == ["lm_head"]  # an empty list of ours counts as none
    theirs = FineGrainedFP8Config.from_dict(config)
    assert tuple(theirs.weight_block_size) == (128, 128)
    assert theirs.modules_to_not_convert == ["lm_head"]
    _, sent = read_published(run.journal.weights_folder(LAST), LAST)
    held = load_file(folder / "model.safetensors")
    assert held.keys() == sent.keys()
    assert all(torch.equal(held[n].view(torch.uint8), sent[n].view(torch.uint8)) for n in sent)


def test_what_cannot_be_exported_says_what_can(run_arm, tmp_path, monkeypatch):
    run = run_of(run_arm, "bf16")
    with pytest.raises(ExportError, match=r"no whole checkpoint of step 2 \(there: 3\)"):
        export(run, ExportFormat.BF16, version=2)
    export(run, ExportFormat.BF16, version=LAST, out=tmp_path / "taken")
    with pytest.raises(ExportError, match="is there already"):
        export(run, ExportFormat.BF16, out=tmp_path / "taken")
    assert not list(tmp_path.glob(".*"))
    precision = run.recipe.precision.model_copy(update={"scaling": Scaling.TENSOR})
    recipe = run.recipe.model_copy(update={"precision": precision})
    monkeypatch.setattr(Run, "recipe", property(lambda self: recipe))
    with pytest.raises(RecipeError, match="128x128"):
        export(run, ExportFormat.FP8, out=tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_the_command_says_where_it_is(run_arm, tmp_path):
    run = run_of(run_arm, "fp8-e2e-kv")
    words = ["export", run.name, "--format", "fp8", "--out", str(tmp_path / "policy")]
    done = CliRunner().invoke(app, [*words, "--runs-dir", str(run.folder.parent)])
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "policy") in done.output
    again = CliRunner().invoke(app, [*words, "--runs-dir", str(run.folder.parent)])
    assert again.exit_code == 2
    assert "is there already" in again.output
