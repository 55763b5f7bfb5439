"""Where roles run and how weights travel: what cannot work is refused before anything starts, with key and remedy."""

import pytest

from dapo.config.rules.placement import placement
from dapo.config.schema import Config

SHARED = {"colocate": "memory", "engines": 2, "ranks": 2, "vllm": {"gpu_memory_utilization": 0.5}}


OWNED = {"colocate": "time", "engines": 2, "ranks": 8, "vllm": {"tensor_parallel_size": 4}}
LENT = {"colocate": "lend", "engines": 5, "ranks": 8, "vllm": {"tensor_parallel_size": 4}}


def problems(
    *,
    colocate="none",
    engines=1,
    ranks=1,
    transport="auto",
    device="auto",
    vllm=None,
    staleness=0,
    offload="none",
) -> list[str]:
    cfg = Config()
    cfg.filter_groups.max_staleness, cfg.actor.offload = staleness, offload
    cfg.trainer.colocate, cfg.trainer.device = colocate, device
    cfg.rollout.num_engines, cfg.rollout.vllm = engines, vllm or {}
    cfg.actor.num_workers, cfg.weight_sync.transport = ranks, transport
    return list(placement(cfg))


@pytest.mark.parametrize("transport", ["auto", "broadcast"])
def test_pools_of_their_own_take_any_transport_between_processes(transport):
    assert problems(engines=3, ranks=4, transport=transport, vllm={"tensor_parallel_size": 4}) == []


@pytest.mark.parametrize("transport", ["auto", "ipc"])
def test_shared_gpus(transport):
    assert problems(**SHARED, transport=transport) == []


@pytest.mark.parametrize("offload", ["none", "host", "phase"])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("settings", [OWNED, LENT])
def test_gpus_taken_in_turn(settings, offload, staleness):
    assert problems(**settings, offload=offload, staleness=staleness) == []


def test_without_gpus_one_engine_may_take_turns_with_any_number_of_ranks():
    assert problems(colocate="time", engines=1, ranks=3, device="cpu") == []


def test_without_gpus_roles_may_be_colocated_by_any_transport():
    assert problems(colocate="memory", transport="broadcast", device="cpu") == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        pytest.param({"transport": "ipc"}, ("`weight_sync.transport` (ipc)", "`trainer.colocate=time`"), id="ipc"),
        pytest.param(
            SHARED | {"transport": "broadcast"}, ("`weight_sync.transport` (broadcast)", "take auto or ipc"), id="nccl"
        ),
        pytest.param(
            SHARED | {"engines": 3}, ("`rollout.num_engines` (3)", "`actor.num_workers` (2)", "equal"), id="counts"
        ),
        pytest.param(
            SHARED | {"vllm": {"gpu_memory_utilization": 0.5, "tensor_parallel_size": 2}},
            ("`rollout.vllm.tensor_parallel_size` (2) must be 1", "`trainer.colocate=time`"),
            id="tensor-parallel",
        ),
        pytest.param(
            OWNED | {"engines": 3},
            ("`rollout.num_engines` (3)", "size` (4) must be `actor.num_workers` (8)", "`rollout.num_engines=2`"),
            id="owned",
        ),
        pytest.param(
            {"colocate": "time", "engines": 3, "ranks": 7, "vllm": {"tensor_parallel_size": 2}},
            (
                "ranks; set `actor.num_workers=6` with `rollout.num_engines=3`, or `actor.num_workers=8` with "
                "`rollout.num_engines=4`, or `rollout.vllm.tensor_parallel_size=1` with `rollout.num_engines=7`, or `t",
            ),
            id="owned, ranks are left over",
        ),
        pytest.param(
            OWNED | {"ranks": 6, "vllm": {"tensor_parallel_size": 8}},
            ("set `actor.num_workers=8` with `rollout.num_engines=1`, or `rollout.vllm.tensor_parallel_size=6` with",),
            id="owned, too few for one",
        ),
        pytest.param(
            OWNED | {"ranks": 7, "vllm": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}},
            ("set `actor.num_workers=4` with `rollout.num_engines=1`, or `actor.num_workers=8` with `rollout.num_e",),
            id="owned, in stages",
        ),
        pytest.param(
            LENT | {"ranks": 6},
            ("`actor.num_workers` (6)", "multiple of `rollout.vllm.tensor_parallel_size` (4)", "lend their GPUs"),
            id="lent",
        ),
        pytest.param(LENT | {"ranks": 2}, ("`actor.num_workers` (2)", "(4)"), id="no whole engine"),
        pytest.param(
            LENT | {"transport": "ipc"}, ("`weight_sync.transport` (ipc)", "auto or broadcast"), id="two ways"
        ),
        pytest.param(
            SHARED | {"offload": "phase"},
            ("`actor.offload` (phase)", "`trainer.colocate` (memory)", "`trainer.colocate=time`"),
            id="offload",
        ),
        pytest.param(
            SHARED | {"vllm": {}}, ("`rollout.vllm.gpu_memory_utilization` is missing", "such as 0.5"), id="memory"
        ),
    ],
)
def test_what_cannot_work_is_refused(settings, said):
    (problem,) = problems(**settings)
    for part in said:
        assert part in problem
