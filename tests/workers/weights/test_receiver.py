"""The engine's half of a weight sync in an engine of several processes: a failure leaves it able to go on."""

import sys
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from dapo.workers.engines.life import LifeSigns
from dapo.workers.engines.worker import RolloutWorker
from dapo.workers.remote import WorkerLost
from dapo.workers.weights.bucket import Bucket, digest, plan_buckets
from tests.support.weights.recorder import in_loop

WIDTH = 4


class Model(nn.Module):
    """One parameter, loaded as vLLM's models load theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    @torch.no_grad()
    def load_weights(self, tensors) -> set[str]:
        return {name for name, tensor in tensors if self.weight.copy_(tensor) is not None}


class Answers:
    """A queue of what one process answers."""

    def __init__(self) -> None:
        self.items: deque = deque()

    def dequeue(self, timeout=None):
        return self.items.popleft()


@pytest.fixture(scope="module")
def receiver():
    """The module, which at its import lets the process end with its parent."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("dapo.sandbox.kernel.die_with", lambda pid: None)
        import dapo.workers.weights.receiver as module

        for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
            monkeypatch.setattr(module, name, lambda *model: None)
        monkeypatch.setattr(module, "set_current_vllm_config", lambda config: nullcontext())
        yield module
        del sys.modules[module.__name__]


def model_config(*, tied: bool = False, has_copy: bool = False) -> SimpleNamespace:
    """As vLLM leaves it where the files hold a copy of a tied head."""
    return SimpleNamespace(
        hf_config=SimpleNamespace(tie_word_embeddings=tied and not has_copy),
        word_embeddings_untied_by_checkpoint=tied and has_copy,
    )


def make_engine(receiver, slots: list[torch.Tensor]):
    """AsyncLLM's calls to two processes, which vLLM's own executor carries; process k reads buckets from slot k."""

    class Process(receiver.WeightReceiverExtension):
        def __init__(self, rank: int) -> None:
            self.vllm_config = SimpleNamespace(
                parallel_config=SimpleNamespace(rank=rank),
                model_config=model_config(),
            )
            self.weight_transfer_engine = receiver.BucketTransferEngine(None, self.vllm_config, "cpu", Model())
            self.weight_transfer_engine._device = torch.device("cpu")
            self._slot = slots[rank]

        def init_weight_transfer_engine(self, init_info) -> None:
            self.weight_transfer_engine.init_transfer_engine(receiver.BucketInitInfo(**init_info))

        def start_weight_update(self) -> None:
            self.weight_transfer_engine.start_weight_update()

        def update_weights(self, update_info) -> None:
            self.weight_transfer_engine._source = SimpleNamespace(receive=lambda bucket: self._slot, close=lambda: None)
            self.weight_transfer_engine.receive_weights(receiver.BucketUpdateInfo(**update_info))

        def finish_weight_update(self) -> None:
            self.weight_transfer_engine.finish_weight_update()

    processes, executor = [Process(rank) for rank in range(len(slots))], MultiprocExecutor.__new__(MultiprocExecutor)

    def ask(request) -> None:
        method, args, kwargs, _ = request
        for process, answers in zip(processes, executor.response_mqs, strict=True):
            try:
                answer = (WorkerProc.ResponseStatus.SUCCESS, getattr(process, method)(*args, **kwargs))
            except Exception as error:
                answer = (WorkerProc.ResponseStatus.FAILURE, str(error))
            answers.items.append(answer)

    executor.is_failed, executor.futures_queue = False, deque()
    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=ask)
    executor.response_mqs = [Answers() for _ in slots]

    async def call(method: str, kwargs=None):
        return executor.collective_rpc(method, kwargs=kwargs)

    async def nothing(answer=None):
        return answer

    versions: list[str] = []
    return SimpleNamespace(
        processes=processes,
        versions=versions,
        collective_rpc=call,
        init_weight_transfer_engine=lambda asked: call("init_weight_transfer_engine", {"init_info": asked.init_info}),
        start_weight_update=lambda: call("start_weight_update"),
        update_weights=lambda asked: call("update_weights", {"update_info": asked.update_info}),
        finish_weight_update=lambda: call("finish_weight_update"),
        update_weight_version=lambda version: nothing(versions.append(version)),
        resume_generation=nothing,
        pause_generation=lambda **how: nothing(),
        errored=False,
        is_paused=lambda: nothing(True),
    )


PLACE = {"transport": "ipc", "capacity": 16, "address": "", "port": 0, "memory": {}}
INFO = PLACE | {"group_size": 3, "first_rank": 1, "timeout_s": 1.0}


@pytest.fixture
def engine(receiver):
    """(the actor that speaks to an engine of two processes, the engine, the memory that each reads, its bucket)."""
    slots = [torch.arange(WIDTH, dtype=torch.float32).view(torch.uint8) for _ in range(2)]
    [plan] = plan_buckets([("weight", (WIDTH,))], bucket_bytes=64, itemsize=4)
    worker, engine = RolloutWorker(), make_engine(receiver, slots)
    worker._engine, worker._asleep, worker._keeps = engine, False, False
    worker._life, worker._running = LifeSigns(), {}
    return worker, engine, slots, Bucket(index=0, plan=plan, dtype="float32", digest=digest(slots[0]))


async def sync(worker: RolloutWorker, bucket: Bucket, version: int) -> None:
    await worker.leave_weights()
    await worker.start_update()
    await worker.load_bucket(bucket)
    await worker.finish_update(version)


@pytest.mark.parametrize("broken", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
@in_loop
async def test_a_bucket_that_arrives_altered_is_told_and_the_next_sync_is_whole(engine, broken):
    """Answers that vLLM leaves unread after an error would be those to its next question."""
    worker, engine, slots, bucket = engine
    whole = [slot.clone() for slot in slots]
    for process in broken:
        slots[process][0] ^= 1
    with pytest.raises(RuntimeError, match=r"^RuntimeError: weight bucket 0 has digest \w+, the actors sent \w+$"):
        await sync(worker, bucket, 1)
    assert engine.versions == []
    for slot, bits in zip(slots, whole, strict=True):
        slot.copy_(bits)
    await sync(worker, bucket, 2)
    assert engine.versions == ["2"]
    for process in engine.processes:
        assert process.weight_transfer_engine.model.weight.tolist() == [0.0, 1.0, 2.0, 3.0]


@in_loop
async def test_parameters_that_stay_stale_keep_the_version(engine):
    worker, engine, _, _ = engine
    await worker.leave_weights()
    await worker.start_update()
    with pytest.raises(RuntimeError, match=r"left 1 parameters stale: \['weight'\]"):
        await worker.finish_update(1)
    assert engine.versions == [] and await worker._engine.collective_rpc("weight_failure") != ["", ""]
    await worker.leave_weights()
    assert await worker._engine.collective_rpc("weight_failure") == ["", ""]
    with pytest.raises(RuntimeError, match=r"no actor rank shares memory with this engine"):
        await worker.connect_weights(INFO)


@in_loop
async def test_an_engine_that_vllm_leaves_in_no_known_state_is_lost(engine, receiver, monkeypatch):
    """Its other process has answered too, and the executor would take that for the answer to its next call."""
    worker, _, _, _ = engine

    def no_room(*model) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    await worker.leave_weights()
    await worker.start_update()
    assert (await worker.pulse()).requests == 0
    monkeypatch.setattr(receiver, "finalize_layerwise_reload", no_room)
    with pytest.raises(RuntimeError, match="Worker failed with error 'CUDA out of memory'"):
        await worker.leave_weights()
    with pytest.raises(WorkerLost, match="vLLM failed: RuntimeError: Worker failed .*CUDA out of memory"):
        await worker.pulse()


@pytest.mark.parametrize(("tied", "has_copy"), [(False, False), (True, False), (True, True)])
def test_only_a_head_of_its_own_must_come(receiver, tied, has_copy):
    model, config = nn.Module(), SimpleNamespace(model_config=model_config(tied=tied, has_copy=has_copy))
    model.lm_head = Model()
    config.parallel_config = SimpleNamespace(rank=0)
    engine = receiver.BucketTransferEngine(None, config, "cpu", model)
    engine._device = torch.device("cpu")
    engine.start_weight_update()
    engine.finish_weight_update()
    assert ("lm_head.weight" in engine.failure) == (not tied), engine.failure
