"""What a rank leaves to an engine on the same GPU, and when; no GPU and no rank starts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dapo.config.schema import Config
from dapo.workers import actor
from dapo.workers.actor import ActorWorker
from dapo.workers.training.collective_errors import RankVersion


@pytest.fixture
def worker(monkeypatch):
    """(a rank that is made of stand-ins, what happened to it in order)."""
    events: list[str] = []

    def note(name: str):
        return lambda *given, **named: events.append(name)

    found = ActorWorker(Config(), "cuda")
    found._version = RankVersion()
    found._policy = found._mesh = None
    found._optimizer = SimpleNamespace(zero_grad=lambda: None)
    found._moments = SimpleNamespace(to_host=note("moments to the host"))
    found._updater = SimpleNamespace(
        scale=SimpleNamespace(forget=lambda: None),
        policy_logprobs=lambda batches: events.append("forward") or [[torch.zeros(2)]],
        reference_logprobs=lambda batches: events.append("forward") or [[torch.zeros(2)]],
    )
    sender = SimpleNamespace(num_buckets=3, gather=lambda index: events.append(f"gather {index}"))
    found._senders = {"ipc": sender, "broadcast": sender}
    for name in ("take_snapshot", "export_hf", "load_state", "save_state"):
        monkeypatch.setattr(actor.state, name, note(name))
    found._release = note("release")
    return found, events


CALLS = {
    "policy": (lambda rank: rank.logprobs((), reference=False), "forward"),
    "reference": (lambda rank: rank.logprobs((), reference=True), "forward"),
    "copy": (lambda rank: rank.stage(0, export=True), "take_snapshot"),
    "export": (lambda rank: rank.export_hf("there"), "export_hf"),
    "load": (lambda rank: rank.load("there", 0), "moments to the host"),
}


@pytest.mark.parametrize(("call", "before"), CALLS.values(), ids=CALLS)
def test_memory_is_given_back_after_what_runs_beside_an_engine_that_is_awake(worker, call, before):
    rank, events = worker
    call(rank)
    assert events[-2:] == [before, "release"]


def test_also_where_it_fails(worker, monkeypatch):
    rank, events = worker

    def fails(*given):
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(actor.state, "export_hf", fails)
    rank._updater.policy_logprobs = fails
    for call in (lambda: rank.export_hf("there"), lambda: rank.logprobs((), reference=False)):
        with pytest.raises(RuntimeError, match="full"):
            call()
    assert events == ["release", "release"]


@pytest.mark.parametrize(("transport", "after"), [("ipc", ["release"]), ("broadcast", [])])
def test_memory_is_given_back_after_the_last_bucket_and_not_while_a_broadcast_is_on_its_way(worker, transport, after):
    """Freeing waits for the GPU, and the engines take a broadcast bucket only when this call has returned."""
    rank, events = worker
    for index in range(3):
        rank.gather_bucket(transport, index)
    assert events == ["gather 0", "gather 1", "gather 2", *after]


def test_a_rank_looks_at_its_own_nodes_allocator_before_it_joins_the_others(monkeypatch):
    """The driver's machine may have another environment than the node of a rank."""
    joined = []
    monkeypatch.setattr(actor.mesh, "join", lambda *where, **how: joined.append(where))
    monkeypatch.setattr(ActorWorker, "_build", lambda self: None)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    def start(device="cuda", **trainer):
        cfg = Config()
        cfg.trainer = replace(cfg.trainer, **trainer)
        ActorWorker(cfg, device).start(0, 1, "127.0.0.1", 1)

    with pytest.raises(ValueError, match=r"CUDA_ALLOC_CONF \(expandable_segments:True\): .*; leave .* every"):
        start(colocate="time")
    assert not joined
    start(colocate="time", preflight=False)
    start()  # its engines have GPUs of their own
    start("cpu", colocate="time")
    assert len(joined) == 3
