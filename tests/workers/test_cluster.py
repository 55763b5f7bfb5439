"""What each role asks of Ray, and the error when the cluster cannot give it."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from dapo.config.schema import Config
from tests.support.placed_roles import gpus_of_roles
from workers import cluster
from workers.cluster import Placement, check_gpus, engine_args, reward_model_gpus


def make_config(engines: int, tensor_parallel: int, actors: int) -> Config:
    cfg = Config()
    cfg.rollout.num_engines, cfg.actor.num_workers = engines, actors
    cfg.rollout.vllm = {"tensor_parallel_size": tensor_parallel}
    return cfg


@pytest.mark.parametrize(
    ("engines", "tensor_parallel", "actors", "available"),
    [
        pytest.param(16, 4, 64, 128, id="the published fleet"),
        pytest.param(4, 1, 4, 8, id="one node"),
    ],
)
def test_enough_gpus(engines, tensor_parallel, actors, available):
    check_gpus(make_config(engines, tensor_parallel, actors), available)
    with pytest.raises(ValueError):
        check_gpus(make_config(engines, tensor_parallel, actors), available - 1)


def test_too_few_gpus_names_what_was_asked_what_is_there_and_the_pools():
    with pytest.raises(ValueError) as error:
        check_gpus(make_config(16, 4, 64), 8)
    for part in ("asked for 128 GPUs", "has 8", "64 for rollout", "`rollout.num_engines` 16 x 4", "64 for the actors"):
        assert part in str(error.value)


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
def test_gpus_of_the_reward_model_are_counted(device, settings, gpus):
    cfg = make_config(4, 1, 4)
    for key, value in ({"path": "scorer"} | settings).items():
        setattr(cfg.reward.model, key, value)
    others = 8 if device == "cuda" else 0
    assert reward_model_gpus(cfg, device) == gpus
    check_gpus(cfg, others + gpus, device)
    if gpus:
        with pytest.raises(ValueError, match=f"asked for {others + gpus} GPUs .*{gpus} for the reward model"):
            check_gpus(cfg, others + gpus - 1, device)


def colocated(gpus: int) -> Config:
    cfg = make_config(gpus, 1, gpus)
    cfg.trainer.colocate = True
    return cfg


def test_colocated_roles_ask_for_each_gpu_once():
    check_gpus(colocated(4), 4)
    with pytest.raises(ValueError, match=r"asked for 4 GPUs .*4 for actors and engines together .*`trainer.colocate`"):
        check_gpus(colocated(4), 3)


class FakeGroup:
    """A placement group whose bundles lie on these nodes; where they are none yet, on `later` after a wait of more than
    `PLACED_S`."""

    def __init__(self, bundles, nodes, later):
        self.bundles, self.nodes, self.later = bundles, nodes, later

    def wait(self, timeout_seconds):
        if timeout_seconds > cluster.PLACED_S:
            self.nodes = self.nodes and self.later
        return all(self.nodes)


@pytest.fixture
def groups(monkeypatch):
    """Placement groups on one node `a`, in the order in which they are made."""
    made = []

    def make(bundles, strategy):
        made.append(FakeGroup(bundles, ["a"] * len(bundles), []))
        return made[-1]

    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"GPU": 16})
    monkeypatch.setattr(cluster, "placement_group", make)
    monkeypatch.setattr(cluster, "remove_placement_group", made.remove)
    monkeypatch.setattr(
        cluster, "placement_group_table", lambda group: {"bundles_to_node_id": dict(enumerate(group.nodes))}
    )
    return made


def bundles_of(options):
    return [each["scheduling_strategy"].placement_group_bundle_index for each in options]


def test_neighbouring_ranks_are_on_one_node_also_on_another_one_later(groups):
    """Ray may deal bundles out to nodes in any order."""
    placement = Placement(make_config(2, 1, 4), "cuda")
    groups[0].nodes = list("baba")
    assert bundles_of(placement.actors()) == [1, 3, 0, 2]
    groups[0].nodes = list("bcbc")
    assert bundles_of(placement.actors()) == [0, 2, 1, 3]


def test_an_engine_and_all_ranks_have_a_group_of_their_own(groups):
    """Or an engine that finds no place on another node would hold up the ranks, which come first."""
    placement = Placement(make_config(2, 4, 3), "cuda")
    ranks, first, second = groups
    assert first.bundles == second.bundles == [{"GPU": 4, "CPU": 1}] and ranks.bundles == [{"GPU": 1, "CPU": 1}] * 3
    found = [each["scheduling_strategy"].placement_group for each in (*placement.rollout(), *placement.actors())]
    assert found == [first, second, ranks, ranks, ranks] and bundles_of(placement.rollout()) == [0, 0]
    placement.release_engine(0)
    assert groups == [ranks, second]
    placement.release_engine(0)


def test_colocated_engines_share_the_bundles_of_the_ranks(groups):
    placement = Placement(colocated(3), "cuda")
    [ranks] = groups
    assert bundles_of(placement.rollout()) == bundles_of(placement.actors()) == [0, 1, 2]
    placement.release_engine(0)
    assert groups == [ranks]


@pytest.mark.parametrize("later", [list("abb"), ["a", "", ""]], ids=["a node joins", "none joins"])
def test_ranks_whose_node_is_gone_wait_for_another_one(groups, later):
    said = []
    placement = Placement(make_config(1, 1, 3), "cuda", warn=said.append)
    groups[0].nodes, groups[0].later = ["a", "", ""], later
    if all(later):
        assert len(placement.actors()) == 3
    else:
        with pytest.raises(RuntimeError, match=r"for 900 s \(`actor.start_timeout_s`\) .* no 2 GPUs .* add a node"):
            placement.actors()
    [line] = said
    assert "a node is gone, and the others have no 2 GPUs" in line and "900 s (`actor.start_timeout_s`)" in line


@pytest.mark.ray
def test_colocated_roles_see_the_same_gpu():
    """Ray deals out GPUs that are not there as it does real ones."""
    cfg = colocated(2)
    cfg.reward.model.path, cfg.reward.model.num_gpus = "scorer", 1.0
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:  # this one's Ray has no GPU
        gpus = process.submit(gpus_of_roles, cfg, num_gpus=3).result(timeout=300)
    assert gpus["engines"] == gpus["actors"]
    assert sorted(gpus["actors"] + gpus["scorer"]) == [["0"], ["1"], ["2"]]


def test_engine_arguments_of_a_person_win():
    cfg = make_config(1, 1, 1)
    cfg.rollout.vllm |= {"max_num_seqs": 7, "enforce_eager": False}
    args = engine_args(cfg, "cpu")
    assert args["max_num_seqs"] == 7 and args["enforce_eager"] is False
    assert args["enable_chunked_prefill"] is False
    assert args["max_model_len"] == cfg.data.max_prompt_length + cfg.data.max_response_length
    assert "enforce_eager" not in engine_args(make_config(1, 1, 1), "cuda")


def test_an_engine_of_several_gpus_does_not_take_rays_executor():
    """vLLM's own choice inside a placement group, which ends at "bundle cannot have more than 1 GPU"."""
    assert engine_args(make_config(16, 4, 64), "cuda")["distributed_executor_backend"] == "mp"
    assert "distributed_executor_backend" not in engine_args(make_config(1, 1, 1), "cuda")
    cfg = make_config(1, 4, 4)
    cfg.rollout.vllm["distributed_executor_backend"] = "external"
    assert engine_args(cfg, "cuda")["distributed_executor_backend"] == "external"


def test_cpu_roles_reserve_nothing_and_set_thread_counts():
    cfg = make_config(2, 1, 3)
    cfg.actor.cpu_threads, cfg.reward.model.cpu_threads, cfg.reward.model.num_workers = 5, 3, 2
    placement = Placement(cfg, "cpu")
    assert [each["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] for each in placement.reward_model()] == ["3", "3"]
    assert len(placement.rollout()) == 2 and len(placement.actors()) == 3
    for options in (*placement.rollout(), *placement.actors(), *placement.reward_model(), placement.rewards()):
        assert options["num_cpus"] == 0 and "num_gpus" not in options
    assert {each["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] for each in placement.actors()} == {"5"}
