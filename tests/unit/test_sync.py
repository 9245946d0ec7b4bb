"""Buckets, receiver, transports and probe, without an engine."""

import dataclasses
import math
import os
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.model.manifest import (
    Entry,
    Manifest,
    PublishedWeightsError,
    Spec,
    manifest_of,
    read_manifest,
)
from fp8rl.model.published import PublishedFile, bytes_of, read_published, write_published
from fp8rl.recipe.schema import Recipe
from fp8rl.sync import probe
from fp8rl.sync.buckets import plan_buckets
from fp8rl.sync.errors import ProofError, SyncError
from fp8rl.sync.receiver import Receiver
from fp8rl.sync.sender import Sender
from fp8rl.sync.transport import Broadcast, HostMemory
from tests.models import publish, specs_of

NAMES = ("embed", "q_proj", "q_proj_scale_inv", "norm")


def tensors():
    generator = torch.Generator().manual_seed(3)
    return {
        "embed": torch.randn(7, 5, generator=generator).bfloat16(),
        "q_proj": torch.randn(6, 5, generator=generator).to(torch.float8_e4m3fn),
        "q_proj_scale_inv": torch.rand(1, 1, generator=generator),
        "norm": torch.randn(5, generator=generator).bfloat16(),
    }


def empty_views():
    return {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}


@pytest.fixture
def published(tmp_path):
    publish(tmp_path, 3, tensors())
    return tmp_path


# --- the manifest


def test_a_manifest_says_format_scale_and_size_of_each_tensor(published):
    manifest = read_manifest(published)
    assert list(manifest.tensors) == list(NAMES)
    q = manifest.tensors["q_proj"]
    assert (q.format, q.scale, q.size, q.shape) == ("fp8_block", "q_proj_scale_inv", 30, (6, 5))
    assert manifest.size == 70 + 30 + 4 + 10
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    "change", [lambda t: t.replace("fp8_block", "bf16"), lambda t: t[:-9], str.upper]
)
def test_a_manifest_that_was_changed_is_damaged(published, change):
    path = published / "manifest.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(PublishedWeightsError, match="is damaged: it does not match its own digest"):
        read_manifest(published)


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("q_proj_scale_inv", "q_proj: its scales are missing"),
        ("q_proj", "q_proj_scale_inv: scales of no"),
    ],
)
def test_codes_and_scales_come_in_pairs(tmp_path, gone, says):
    some = {name: tensor for name, tensor in tensors().items() if name != gone}
    with pytest.raises(PublishedWeightsError, match=says):
        publish(tmp_path, 1, some)
    with pytest.raises(PublishedWeightsError, match="not a whole weight version"):
        read_manifest(tmp_path)


def test_what_is_written_is_what_was_specified(tmp_path):
    other = tensors() | {"norm": torch.zeros(4).bfloat16()}
    with pytest.raises(PublishedWeightsError, match=r"'norm', \(4,\)"):
        write_published(tmp_path, 1, specs_of(tensors()), other.items())
    with pytest.raises(ValueError, match="zip"):
        write_published(tmp_path, 1, specs_of(tensors()), list(tensors().items())[:-1])


def test_a_published_file_is_one_that_safetensors_reads(published):
    _, read = read_published(published, 3)
    assert {n: bytes_of(t) for n, t in read.items()} == {n: bytes_of(t) for n, t in tensors().items()}
    file = PublishedFile(published, 3)
    assert file.read("norm", 2, 8) == bytes_of(tensors()["norm"])[2:8]
    file.close()


def test_publishing_holds_one_tensor_at_a_time(tmp_path):
    """All of them at once would be a second copy of the model."""
    alive, most = weakref.WeakSet(), 0

    def one_by_one():
        nonlocal most
        for name in names:
            tensor = torch.zeros(10).bfloat16()
            alive.add(tensor)
            most = max(most, len(alive))
            yield name, tensor
            del tensor

    names = [f"t{n}" for n in range(20)]
    specs = [Spec(name, (10,), "bfloat16", "bf16") for name in names]
    assert write_published(tmp_path, 1, specs, one_by_one()).size == 400
    assert most <= 2


# --- buckets


sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(sizes, st.integers(1, 50))
def test_buckets_hold_every_byte_once_and_no_more_than_their_limit(lengths, limit):
    specs = {f"t{n}": Spec(f"t{n}", (size,), "float8_e4m3fn", "bf16") for n, size in enumerate(lengths)}
    manifest = manifest_of(1, specs, dict.fromkeys(specs, ""))
    buckets = plan_buckets(manifest, limit)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert all(bucket.size == limit for bucket in buckets[:-1])
    assert sum(bucket.size for bucket in buckets) == manifest.size
    assert len(buckets) == math.ceil(manifest.size / limit)
    seen = {name: [] for name in specs}
    for bucket in buckets:
        end = 0
        for piece in bucket.pieces:
            assert piece.offset == end
            end += piece.stop - piece.start
            seen[piece.name] += range(piece.start, piece.stop)
            assert piece.is_last == (piece.stop == manifest.tensors[piece.name].size)
    assert seen == {f"t{n}": list(range(size)) for n, size in enumerate(lengths)}


@pytest.mark.parametrize("limit", [1, 7, 30, 113, 114, 10_000])
def test_what_is_sent_arrives_whatever_the_buckets(published, limit):
    sender, views = Sender(published, 3, limit), empty_views()
    receiver = Receiver(views, sender.manifest, limit)
    transport = HostMemory()
    for bucket in sender.buckets:
        ticket = transport.send(sender.payload(bucket.index))
        ticket.flags.writeable = False  # as Ray gives it
        receiver.take(bucket.index, transport.receive(ticket, bucket.size))
    receiver.finish()
    sender.close()
    assert {n: bytes_of(t) for n, t in views.items()} == {n: bytes_of(t) for n, t in tensors().items()}


def test_nothing_is_changed_by_what_does_not_fit(published):
    manifest = read_manifest(published)
    for name, other in (("norm", torch.ones(5)), ("embed", torch.ones(5, 7).bfloat16())):
        views = empty_views() | {name: other.clone()}
        with pytest.raises(PublishedWeightsError, match=f"{name}: sent"):
            Receiver(views, manifest, 10)
        assert torch.equal(views[name], other)


def take_all(receiver, payloads):
    for index, payload in enumerate(payloads):
        receiver.take(index, payload)


def test_a_wrong_byte_is_noticed_in_any_bucket(published):
    for limit in (9, 1000):
        sender = Sender(published, 3, limit)
        payloads = [sender.payload(bucket.index) for bucket in sender.buckets]
        for payload in payloads:
            receiver = Receiver(empty_views(), sender.manifest, limit)
            payload[0] ^= 128
            with pytest.raises(SyncError, match="arrived with digest"):
                take_all(receiver, payloads)
            payload[0] ^= 128
        sender.close()


# --- transports


def _rank(rank, size, port, folder, results):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    transport, sender = Broadcast(torch.device("cpu")), Sender(folder, 3, 40)
    views = empty_views()
    receiver = Receiver(views, sender.manifest, 40)
    for bucket in sender.buckets:
        if rank == 0:
            transport.send(sender.payload(bucket.index))
        else:
            receiver.take(bucket.index, transport.receive(None, bucket.size))
    if rank:
        receiver.finish()
        results[rank] = {name: bytes_of(view) for name, view in views.items()}
    dist.destroy_process_group()


def test_broadcast_delivers_to_every_rank(published):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank, (3, port, published, results), nprocs=3)
        wanted = {name: bytes_of(tensor) for name, tensor in tensors().items()}
        assert dict(results) == {1: wanted, 2: wanted}


def test_tickets_of_host_memory_are_arrays_that_ray_shares():
    ticket = HostMemory().send(torch.arange(4, dtype=torch.uint8))
    assert isinstance(ticket, np.ndarray)
    assert ticket.tolist() == [0, 1, 2, 3]


# --- the probe


def test_probe_figures():
    found = probe.compare([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.0]], limit=1.0, version=4)
    assert found.mean_abs == pytest.approx(0.5)
    assert found.max_abs == 1.0
    assert found.mult_prob_error == pytest.approx((math.exp(0.5) + 1 + math.e) / 3)
    assert found.tokens == 3
    assert found.metrics.keys() == {"probe/mean_abs", "probe/max_abs", "probe/mult_prob_error"}


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ([[-9.0, -2.0], [-3.0]], "differ by 2.833 nats"),
        ([[math.nan, -2.0], [-3.0]], "1 of 3 log-probs are not finite"),
        ([[-math.inf, -2.0], [-3.0]], "1 of 3 log-probs are not finite"),
        ([[-1.0], [-3.0]], "scored other tokens"),
        ([[-1.0, -2.0]], "scored other tokens"),
    ],
)
def test_probe_refuses(engine, says):
    with pytest.raises(ProofError, match=f"weight version 4: .*{says}"):
        probe.compare(engine, [[-1.5, -2.0], [-2.0]], limit=1.0, version=4)


def test_probe_of_nothing_is_refused():
    with pytest.raises(ProofError, match="0 of 0"):
        probe.compare([], [], limit=1.0, version=0)


def test_scores_differ_by_their_last_bit():
    one = [[-1.0, -0.1]]
    assert probe.scores_digest(one) == probe.scores_digest([list(one[0])])
    assert probe.scores_digest(one) != probe.scores_digest([[-1.0, math.nextafter(-0.1, 0)]])


def test_limits_go_by_the_arms_precision_unless_the_recipe_says():
    def limit(rollout_bf16=False, **precision):
        recipe = Recipe.model_validate({"precision": precision})
        return probe.limit_of(recipe, rollout_bf16=rollout_bf16)

    arms = [limit(), limit(rollout="fp8"), limit(rollout="fp8", kv_cache="fp8")]
    assert arms == sorted(set(arms))
    assert limit(kv_cache="fp8") == limit(rollout="fp8")
    # What both sides round does not set them apart, unless the guard has switched one of them.
    both = {"rollout": "fp8", "learner": "fp8"}
    assert limit(**both) == limit() == limit(**both, kv_cache="fp8", learner_kv="fp8")
    assert limit(**both, parity=False) == limit(rollout_bf16=True, **both) == limit(rollout="fp8")
    assert limit(**both, kv_cache="fp8") == limit(rollout="fp8", kv_cache="fp8")
    assert probe.limit_of(Recipe.model_validate({"sync": {"probe_limit": 0.3}})) == 0.3


def test_probed_are_the_first_and_every_nth_version():
    def probed(every):
        recipe = Recipe.model_validate({"sync": {"probe_every": every}})
        return [v for v in range(5, 12) if probe.is_probed(recipe, v, origin=5)]

    assert probed(0) == []
    assert probed(1) == list(range(5, 12))
    assert probed(4) == [5, 8]


def test_probe_takes_prompts_and_answers_as_long_as_the_engine_does():
    recipe = Recipe.model_validate(
        {"sync": {"probe_prompts": 2}, "rollout": {"max_prompt_tokens": 3, "max_new_tokens": 2}}
    )
    prompts = {"prompt_tokens": [[1, 2], [3], [4]], "answer_tokens": [[5, 6, 7], [8], [9]]}
    assert probe.probe_sequences(prompts, recipe) == [[1, 2, 5, 6], [3, 8]]


def test_entries_keep_what_was_specified():
    spec = Spec("a", (2, 3), "bfloat16", "bf16")
    entry = manifest_of(1, {"a": spec}, {"a": "00"}).tensors["a"]
    assert isinstance(entry, Entry)
    assert dataclasses.asdict(entry) == dataclasses.asdict(spec) | {"sha256": "00"}
