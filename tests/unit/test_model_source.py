"""Where a recipe's model is, and GGUF files that become model folders."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from fp8rl.model import source
from fp8rl.model.dims import UnsupportedModelError, read_dims
from fp8rl.model.gguf import GgufError, convert
from fp8rl.model.source import describe_model, gguf_file, model_dims, model_folder
from fp8rl.model.tiny import tiny_dims
from fp8rl.recipe.rules import RecipeError
from tests.models import RAGGED, random_weights, recipe_with, write_gguf, write_model

UNTIED = RAGGED.model_copy(update={"tied_embeddings": False})


def recipe_of(file, runs, **sections):
    return recipe_with(
        model={"gguf": str(file)}, warm_start={"steps": 0}, runs_dir=str(runs), **sections
    )


# --- which file


def test_files_that_are_not_there_say_so(tmp_path, monkeypatch):
    package = tmp_path / "shipping_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('must not be imported')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert gguf_file("package:shipping_a_model/model.gguf") == package / "model.gguf"
    assert gguf_file(str(package / "model.gguf")) == package / "model.gguf"
    for name, message in (
        (str(tmp_path / "no.gguf"), r"no file at .*no\.gguf"),
        ("package:shipping_a_model", "not of the form package:<module>/<file>"),
        ("package:a.b/model.gguf", "not of the form package:<module>/<file>"),
        ("package:shipping_a_model/other.gguf", "has no file 'other.gguf'"),
        ("package:nowhere_installed/model.gguf", r"no package 'nowhere_installed'.*extra `models`"),
    ):
        with pytest.raises(RecipeError, match=message):
            gguf_file(name)


# --- the hub


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache with one model, laid out as the hub's own client does; nothing can be downloaded."""
    import huggingface_hub

    model = tmp_path / "hub" / "models--some--model"
    for commit in ("a" * 40, "b" * 40):
        write_model(RAGGED, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("b" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: real(name, cache_dir=tmp_path / "hub", **options),
    )
    source._from_hub.cache_clear()
    yield model
    source._from_hub.cache_clear()


def of_hub(name):
    return recipe_with(model={"hub": name}, warm_start={"steps": 0})


def test_a_model_of_the_hub_is_pinned_to_its_commit(cache):
    recipe = source.pinned(of_hub("some/model"))
    assert recipe.model.hub == f"some/model@{'b' * 40}"
    assert model_folder(recipe) == (cache / "snapshots" / ("b" * 40)).resolve()
    assert model_dims(recipe) == tiny_dims(RAGGED)
    assert describe_model(recipe)["hub"] == recipe.model.hub
    (cache / "refs" / "main").write_text("a" * 40)  # the hub has gone on
    source._from_hub.cache_clear()
    assert source.pinned(recipe) == recipe
    older = source.pinned(of_hub(f"some/model@{'a' * 40}"))
    assert model_folder(older).name == "a" * 40
    assert source.pinned(recipe_with()) == recipe_with()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("some/other", "not in the cache .* cannot be downloaded"),
        ("some/model@no-such-branch", "cannot be downloaded"),
        ("a/b/c", "is no name of a model"),
        ("../../etc", "is no name of a model"),
    ],
)
def test_what_the_hub_does_not_give_is_said_in_words(cache, name, words):
    with pytest.raises(RecipeError, match=rf"model\.hub: .*{words}"):
        model_dims(of_hub(name))


# --- GGUF files


def test_a_file_that_is_not_gguf_and_missing_readers_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\3\4")
    with pytest.raises(RecipeError, match=r"model\.gguf: .* is not a GGUF file"):
        model_dims(recipe_of(file, tmp_path))
    file.write_bytes(b"GGUF and no more")
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"accelerate and gguf, not installed.*extra `models`"):
        model_dims(recipe_of(file, tmp_path))


# --- the conversion


@pytest.mark.parametrize("tiny", [RAGGED, UNTIED], ids=["tied", "untied"])
def test_weights_dimensions_and_ids_are_those_written(tmp_path, tiny):
    """q and k are written in llama.cpp's order of rows, and come back in Hugging Face's."""
    file, folder = write_gguf(tiny, tmp_path / "m.gguf"), tmp_path / "folder"
    folder.mkdir()
    convert(file, folder)
    dims = read_dims(folder)
    assert dims.norm_eps == pytest.approx(1e-5)
    assert (dims.tied_embeddings, dims.vocab) == (tiny.tied_embeddings, 101)
    weights, want = load_file(folder / "model.safetensors"), random_weights(tiny)
    assert weights.keys() == want.keys()
    assert all(torch.equal(weights[name], want[name].bfloat16()) for name in want)
    ids = json.loads((folder / "generation_config.json").read_text())
    assert (ids["bos_token_id"], ids["eos_token_id"], ids["pad_token_id"]) == (1, 2, 2)


def test_tokenizer_splits_digits_first_and_has_the_chat_template(tmp_path):
    def tokenizer(pre):
        folder = tmp_path / pre
        folder.mkdir()
        convert(write_gguf(RAGGED, tmp_path / f"{pre}.gguf", pre=pre), folder)
        return AutoTokenizer.from_pretrained(folder)

    smollm = tokenizer("smollm")
    assert smollm("a\n\n12").tokens() == ["a", "ĊĊ", "1", "2"]
    assert tokenizer("gpt-2")("a\n\n12").tokens() == ["a", "Ċ", "Ċ", "1", "2"]
    turns = [{"role": "user", "content": "5"}]
    ids = smollm.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert smollm.decode(ids) == "<|im_start|>user\n5<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1
    assert smollm.eos_token_id == 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pre": "strange"}, GgufError, r"tokenizer\.ggml\.pre='strange'"),
        ({"eos_token_id": 0}, GgufError, "ends a turn with '<|im_end|>'"),
        ({"leave_out": "model.layers.1.mlp.up_proj.weight"}, GgufError, "do not make up the model"),
        ({"extra_tensor": "rope_freqs.weight"}, GgufError, "does not have: rope_freqs.weight"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, GgufError, r"does not have: blk\.0\.attn_q\.bias"),
        ({"rope_scaling": "linear"}, GgufError, "scaled rotary embedding is not supported"),
    ],
)
def test_files_that_would_convert_to_something_else_are_refused(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        convert(write_gguf(RAGGED, tmp_path / "m.gguf", **changes), tmp_path)


# --- the converted folder


@pytest.fixture
def fake_converter(monkeypatch):
    """Stands in for the conversion's process: a folder with a config."""
    calls = []

    def run(file, folder):
        calls.append(folder)
        write_model(RAGGED, folder)

    monkeypatch.setattr(source, "_run_converter", run)
    return calls


def test_a_file_is_converted_once_and_again_where_its_content_differs(tmp_path, fake_converter):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF 1")
    recipe = recipe_of(file, tmp_path / "runs")
    folder = model_folder(recipe)
    assert model_folder(recipe) == folder
    assert model_dims(recipe) == tiny_dims(RAGGED)
    assert len(fake_converter) == 1
    about = describe_model(recipe)
    assert (about["kind"], about["folder"]) == ("gguf", str(folder))
    assert folder.name == about["sha256"][:16]
    assert about["gguf"] == str(file)
    file.write_bytes(b"GGUF 2!")
    assert model_folder(recipe) != folder
    assert len(fake_converter) == 2
    assert sorted(p.name[0] for p in folder.parent.iterdir() if p.name[0] == ".") == []


def test_a_conversion_that_fails_leaves_nothing_and_says_why(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF and no more")
    recipe = recipe_of(file, tmp_path / "runs")
    with pytest.raises(RecipeError, match=r"m\.gguf cannot be converted: "):
        model_folder(recipe)
    assert list((tmp_path / "runs" / ".cache" / "models").iterdir()) == []


def test_the_slower_of_two_processes_keeps_the_folder_of_the_faster(tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF 1")
    recipe = recipe_of(file, tmp_path / "runs")

    def slow(file, folder):
        monkeypatch.setattr(source, "_run_converter", lambda _, folder: write_model(RAGGED, folder))
        other = model_folder(recipe)  # begins later, ends earlier
        (other / "mark").touch()
        write_model(RAGGED, folder)

    monkeypatch.setattr(source, "_run_converter", slow)
    folder = model_folder(recipe)
    assert (folder / "mark").is_file()
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_folder_made_otherwise_is_not_used(tmp_path, fake_converter):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF 1")
    recipe = recipe_of(file, tmp_path / "runs")
    record = model_folder(recipe) / source.RECORD_FILE
    record.write_text(record.read_text().replace('"code": 1', '"code": 0'))
    with pytest.raises(RecipeError, match="was not made by this version"):
        model_folder(recipe)
    record.unlink()
    with pytest.raises(RecipeError, match="Remove it"):
        model_folder(recipe)


def test_paths_and_the_tiny_model(tmp_path):
    tiny = recipe_with()
    assert model_folder(tiny) is None
    assert describe_model(tiny) == {"kind": "tiny"}
    given = recipe_with(model={"path": os.path.relpath(tmp_path)}, warm_start={"steps": 0})
    assert model_folder(given) == tmp_path
    assert describe_model(given) == {"kind": "path", "folder": str(tmp_path)}
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        model_dims(given)
