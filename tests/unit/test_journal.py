"""The run folder, published weights and KV scales: whole or refused."""

import json
import os
import socket

import pytest
import torch

from fp8rl.journal import Journal, JournalError, RunExistsError, StepRecord, process_start
from fp8rl.model.kv_scales import KvScales, KvScalesError, LayerScales
from fp8rl.model.published import (
    PublishedWeightsError,
    read_published,
    write_published,
)

ABOUT = {
    "started": "2026-01-01T00:00:00",
    "recipe_digest": "d" * 64,
    "machine": {"host": socket.gethostname()},
    "pid": os.getpid(),
    "pid_started": process_start(os.getpid()),
}


def new(runs, name="r", **about):
    return Journal.create(runs, name, "iterations: 1\n", ABOUT | about)


def test_step_is_committed_with_digests_and_read_back(tmp_path):
    journal = new(tmp_path)
    record = StepRecord("rollout", 3, 1.5, inputs={"weight_version": 2}, metrics={"m": 0.5})
    committed = journal.commit(record, {"rollouts.parquet": b"data"})
    assert committed.t_ms > 0
    assert journal.record(3, "rollout") == committed
    assert journal.read_file(3, "rollout", "rollouts.parquet") == b"data"


def test_uncommitted_changed_or_missing_data_is_refused(tmp_path):
    journal = new(tmp_path)
    with pytest.raises(JournalError, match="never ended"):
        journal.record(1, "train")
    journal.commit(StepRecord("rollout", 1, 0.1), {"a": b"data"})
    path = journal.step_folder(1) / "a"
    path.write_bytes(b"date")
    with pytest.raises(JournalError, match="is not what"):
        journal.read_file(1, "rollout", "a")
    path.unlink()
    with pytest.raises(JournalError, match="missing or changed"):
        journal.read_file(1, "rollout", "a")


def test_taken_name_says_what_is_there_and_changes_nothing(tmp_path):
    journal = new(tmp_path)
    journal.commit(StepRecord("rollout", 1, 0.1), {})
    journal.commit(StepRecord("train", 1, 0.1), {})
    before = {p: p.read_bytes() for p in journal.folder.rglob("*") if p.is_file()}
    with pytest.raises(RunExistsError) as error:
        new(tmp_path)
    text = str(error.value)
    assert "last committed step: train of iteration 1" in text
    assert f"running, process {os.getpid()}" in text
    assert {p: p.read_bytes() for p in journal.folder.rglob("*") if p.is_file()} == before


def test_states_of_a_run(tmp_path):
    killed = new(tmp_path, "killed", pid_started=1.0)  # the number was reused by another process
    assert "killed" in killed.describe()
    elsewhere = new(tmp_path, "elsewhere", machine={"host": "another-host"})
    assert "unknown: it was started on another-host" in elsewhere.describe()
    done = new(tmp_path, "done")
    done.commit(StepRecord("iteration", 3, 0.1), {})
    assert "last committed step: iteration 3 is complete" in done.describe()
    done.finish("finished")
    assert "state: finished" in done.describe()
    (tmp_path / "empty").mkdir()
    assert "killed while it was being created" in Journal(tmp_path / "empty").describe()


TENSORS = {"a": torch.arange(6.0).view(2, 3).bfloat16(), "b": torch.ones(3).to(torch.float8_e4m3fn)}


def test_published_weights_read_back(tmp_path):
    manifest = write_published(tmp_path, 4, TENSORS)
    read, tensors = read_published(tmp_path, 4)
    assert read == manifest
    assert all(
        torch.equal(tensors[n].view(torch.uint8), t.view(torch.uint8)) for n, t in TENSORS.items()
    )


def test_digest_is_of_the_tensors(tmp_path):
    first = write_published(tmp_path / "1", 1, TENSORS)
    assert write_published(tmp_path / "2", 2, TENSORS).digest == first.digest
    changed = TENSORS | {"b": torch.zeros(3).to(torch.float8_e4m3fn)}
    assert write_published(tmp_path / "3", 1, changed).digest != first.digest


@pytest.mark.parametrize("fault", ["flip", "truncate", "delete", "manifest", "version", "tensor"])
def test_faulty_published_weights_are_refused(tmp_path, fault):
    write_published(tmp_path, 1, TENSORS)
    file, version = tmp_path / "weights.safetensors", 1
    content = bytearray(file.read_bytes())
    if fault == "flip":
        content[-1] ^= 1
        file.write_bytes(content)
    elif fault == "truncate":
        file.write_bytes(content[:-4])
    elif fault == "delete":
        file.unlink()
    elif fault == "manifest":
        (tmp_path / "manifest.json").unlink()
    elif fault == "version":
        version = 2
    else:
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        del manifest["tensors"]["a"]
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PublishedWeightsError):
        read_published(tmp_path, version)


def test_old_tensors_go_and_manifests_stay(tmp_path):
    journal = new(tmp_path)
    for version in range(4):
        write_published(journal.weights_folder(version), version, TENSORS)
    journal.drop_weights_before(2)
    kept = sorted(p.parent.name for p in journal.folder.glob("weights/*/weights.safetensors"))
    assert kept == ["v00002", "v00003"]
    assert len(list(journal.folder.glob("weights/*/manifest.json"))) == 4


GOOD = LayerScales(0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (KvScales(1, (GOOD,), 5, ""), "1 layers, the model has 2"),
        (KvScales(0, (GOOD, GOOD), 5, ""), "weight version 0"),
        (
            KvScales(1, (GOOD, LayerScales(0.1, 1.0, 0.3)), 5, ""),
            "layer 1: k_scale is 1.0, the default",
        ),
        (KvScales(1, (GOOD, LayerScales(0.1, 0.0, 0.3)), 5, ""), "layer 1: k_scale is 0.0"),
        (KvScales(1, (LayerScales(float("nan"), 1, 1), GOOD), 5, ""), "layer 0: q_scale is nan"),
        (KvScales(1, (LayerScales(0.1, 0.1, float("inf")), GOOD), 5, ""), "layer 0: v_scale is inf"),
        (KvScales(1, (LayerScales(-0.1, 0.1, 0.1), GOOD), 5, ""), "layer 0: q_scale is -0.1"),
    ],
)
def test_unusable_kv_scales_are_refused(scales, message):
    with pytest.raises(KvScalesError, match=message):
        scales.require_usable(layers=2, version=1)


def test_kv_scales_read_back_exactly():
    scales = KvScales(3, (GOOD, LayerScales(1 / 3, 1e-7, 0.7)), 99, "rollouts")
    assert KvScales.from_json(scales.to_json()) == scales
