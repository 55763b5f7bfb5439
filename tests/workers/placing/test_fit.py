"""What roles ask of nodes, what fits, and the advice where it does not: on tables of nodes, without Ray."""

from dataclasses import replace

import pytest

from dapo.config.compose import compose
from dapo.config.schema import Config
from dapo.workers.placing.asked import count_gpus, pools
from dapo.workers.placing.fit import Node, in_order, lines, problems
from tests.support.placed_roles import make_config


def node(gpus: int, **labels: str) -> Node:
    return Node(gpus, 64.0, float(gpus), 64.0, {"ray.io/node-id": "1f", **labels})


def found(cfg: Config, nodes: list[Node], device: str = "cuda") -> list[str]:
    return problems(pools(cfg, device), nodes)


EXPERIMENTS = [("dapo_qwen32b", 16, 8), ("dapo_qwen7b", 1, 8), ("dapo_qwen0.5b_1gpu", 1, 1)]
HYBRIDS = [("dapo_qwen32b_hybrid", 16, 8), ("dapo_qwen7b_hybrid", 1, 8)]


@pytest.mark.parametrize(("experiment", "nodes", "gpus"), EXPERIMENTS + HYBRIDS)
def test_an_experiment_fits_the_nodes_that_it_names_and_no_fewer(experiment: str, nodes: int, gpus: int) -> None:
    asked = pools(compose([], experiment), "cuda")
    assert problems(asked, [node(gpus)] * nodes) == []
    [problem] = problems(asked, [*[node(gpus)] * (nodes - 1), node(gpus - 1)])
    assert f"asked for {gpus * nodes} GPUs but the Ray cluster has {gpus * nodes - 1}" in problem


def test_too_few_gpus_names_what_was_asked_what_is_there_and_the_pools() -> None:
    [problem] = found(make_config(16, 4, 64), [node(8)])
    for part in ("asked for 128 GPUs", "has 8", "64 for rollout", "`rollout.num_engines` 16 x 4", "64 for the actors"):
        assert part in problem
    assert "add 15 nodes of 8 GPUs" in problem


@pytest.mark.parametrize(
    ("device", "settings", "gpus"),
    [
        pytest.param("cuda", {"path": ""}, 0, id="no-reward-model"),
        pytest.param("cuda", {"num_workers": 3}, 3, id="one-each"),
        pytest.param("cuda", {"num_workers": 5, "num_gpus": 0.4}, 3, id="two-share-one"),
        pytest.param("cuda", {"num_workers": 3, "num_gpus": 0.6}, 3, id="shares-that-do-not-fit"),
        pytest.param("cuda", {"device": "cpu"}, 0, id="beside-gpus-on-the-cpu"),
        pytest.param("cpu", {"num_workers": 2}, 0, id="follows-the-trainer"),
        pytest.param("cpu", {"num_workers": 2, "device": "cuda"}, 2, id="alone-on-gpus"),
    ],
)
def test_gpus_of_the_reward_model_are_counted(device: str, settings: dict[str, object], gpus: int) -> None:
    cfg = make_config(4, 1, 4)
    for key, value in ({"path": "scorer"} | settings).items():
        setattr(cfg.reward.model, key, value)
    others = 8 if device == "cuda" else 0
    assert count_gpus(cfg, device) == others + gpus
    assert found(cfg, [node(others + gpus)], device) == []
    if gpus:
        [problem] = found(cfg, [node(others + gpus - 1)], device)
        assert f"asked for {others + gpus} GPUs" in problem and f"{gpus} for the reward model" in problem


def test_colocated_roles_ask_for_each_gpu_once() -> None:
    cfg = make_config(4, 1, 4)
    cfg.trainer.colocate = "time"
    assert found(cfg, [node(4)]) == []
    [problem] = found(cfg, [node(3)])
    assert "asked for 4 GPUs" in problem and "4 for actors and engines together" in problem
    assert "`trainer.colocate`" in problem


KEY = "actor.ulysses_sequence_parallel_size"
NEVER = {
    "no-node-holds-a-sequence-group": (
        (make_config(1, 1, 8, 8), [node(4)] * 4),
        [f"the 8 ranks that share a sequence (`{KEY}`)", "of 4 nodes has 4", "lower"],
    ),
    "no-node-holds-an-engine": (
        (make_config(4, 8, 4), [node(4)] * 12),
        ["the 8 GPUs of an engine (`rollout.vllm.tensor_parallel_size`)", "lower that key to 4 or less"],
    ),
    "groups-do-not-divide-the-nodes": (
        (make_config(1, 1, 16, 4), [node(6)] * 3),
        ["room for 3 times that", "not 4", "set `actor.num_workers` to 12", "add 1 node of 6 GPUs", "3 nodes of 6"],
    ),
    "engines-do-not-divide-the-nodes": (
        (make_config(5, 4, 4), [node(6)] * 4),
        ["room for 4 times that", "set `rollout.num_engines` to 4", "add 1 node of 6 GPUs"],
    ),
    "cpus-are-short": (
        (make_config(1, 1, 4), [replace(node(5), cpus=3.0)]),
        ["1 GPUs and 1 CPUs of one node", "room for 3 times", "set `actor.num_workers` to 3"],
    ),
    "no-node-has-the-label": (
        (make_config(2, 1, 2, rollout={"pool": "h200"}), [node(4, pool="h100"), node(4, pool="h100", zone="b")]),
        ["`rollout.node_labels` (pool=h200)", "of the 2 nodes", "are pool=h100 (2), zone=b (1)", "--labels=pool=h200"],
    ),
    "too-few-of-the-label": (
        (make_config(2, 4, 2, actor={"pool": "a"}, rollout={"pool": "b"}), [node(8, pool="a"), node(4, pool="b")]),
        ["has room for 1 times that", "with pool=b (`rollout.node_labels`), 1 node of 4 GPUs", "add 1 node of 4"],
    ),
}


@pytest.mark.parametrize(("asked", "parts"), NEVER.values(), ids=NEVER)
def test_what_can_never_fit_is_said_with_the_remedy(asked: tuple[Config, list[Node]], parts: list[str]) -> None:
    problem, *_ = found(*asked)  # which leaves less to the others
    for part in parts:
        assert part in problem


def test_labels_are_kept_to_also_where_other_nodes_have_room() -> None:
    """A pool that any node will do for leaves the labelled ones to those that need them."""
    nodes = [node(4, pool="a"), node(4, pool="b")]
    assert found(make_config(1, 4, 4, rollout={"pool": "a"}), nodes) == []
    assert found(make_config(1, 4, 4, rollout={"pool": "a"}, actor={"pool": "b"}), nodes) == []
    assert found(make_config(1, 4, 4, rollout={"pool": "a"}, actor={"pool": "a"}), nodes) != []


def test_nodes_are_filled_one_after_the_other_with_large_pieces_first() -> None:
    assert found(make_config(2, 4, 8, 8, rollout={"pool": "a"}), [node(8, pool="a"), node(8, pool="a")]) == []
    assert found(make_config(4, 4, 10), [node(6)] * 5) == []


def test_what_is_asked_there_and_fits_is_told_pool_by_pool() -> None:
    busy = replace(node(8, pool="b"), free_gpus=2.0)
    cfg = make_config(2, 4, 16, 8, rollout={"pool": "b"})
    assert lines(pools(cfg, "cuda"), [node(8, pool="a"), node(8, pool="a"), busy]) == [
        "placement: the run needs 24 GPUs; 18 of 24 are free, on 3 nodes of 8 GPUs",
        "  engines: 2 x 4 GPUs, each on one node, of 1 node with pool=b (`rollout.node_labels`): 0 fit now, all once "
        "other jobs have ended",
        "  actor ranks: 2 x 8 GPUs, each on one node: all fit",
    ]
    assert lines(pools(cfg, "cuda"), [node(8, pool="b")])[1:] == [
        "  engines: 2 x 4 GPUs, each on one node, of 1 node with pool=b (`rollout.node_labels`): all fit",
        "  actor ranks: 2 x 8 GPUs, each on one node: 0 fit",
    ]


def test_one_node_takes_one_line_and_a_run_on_cpus_none() -> None:
    cfg = make_config(4, 1, 4)
    assert lines(pools(cfg, "cuda"), [node(8)]) == [
        "placement: the run needs 8 GPUs; 8 of 8 are free, on 1 node of 8 GPUs"
    ]
    assert lines(pools(cfg, "cpu"), [node(0)]) == []
    cfg.rollout.node_labels = {"pool": "a"}
    assert found(cfg, [node(0, pool="a")], "cpu") == []
    [problem] = found(cfg, [node(0)], "cpu")
    assert "`rollout.node_labels` (pool=a)" in problem and "they have no labels" in problem


def test_neighbours_are_on_one_node_as_far_as_there_is_room() -> None:
    assert in_order(dict(enumerate("baba")), 1) == [1, 3, 0, 2]
    assert in_order(dict(enumerate("aabbbbba")), 4) == [2, 3, 4, 5, 0, 1, 7, 6], "whole groups first"
    assert in_order(dict(enumerate("bbba")), 8) == [3, 0, 1, 2], "a group that is larger than nodes"
