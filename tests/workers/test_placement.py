"""What each role asks of Ray, and the error when the cluster cannot give it."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from ray._private.accelerators import NvidiaGPUAcceleratorManager

from dapo.workers import placement
from dapo.workers.placement import Placement
from dapo.workers.placing import joining
from dapo.workers.placing.fit import Node
from tests.support.placed_roles import make_config


class FakeGroup:
    """A placement group whose bundles lie on these nodes; where they are none yet, on `later` after waits of more than
    `PLACED_S` in all. now: the time, which goes by in waits alone."""

    now = 0.0

    def __init__(self, bundles, labels, nodes, later):
        self.bundles, self.labels, self.nodes, self.later = bundles, labels, nodes, later

    def wait(self, timeout_seconds):
        if not all(self.nodes):
            FakeGroup.now += timeout_seconds
            self.nodes = self.later if FakeGroup.now > placement.PLACED_S else self.nodes
        return all(self.nodes)


@pytest.fixture
def groups(monkeypatch):
    """Placement groups on node `a` of two, in the order in which they are made."""
    made = []

    def make(bundles, strategy, bundle_label_selector):
        made.append(FakeGroup(bundles, bundle_label_selector, ["a"] * len(bundles), []))
        return made[-1]

    monkeypatch.setattr(FakeGroup, "now", 0.0)
    monkeypatch.setattr(placement, "time", SimpleNamespace(monotonic=lambda: FakeGroup.now))
    monkeypatch.setattr(placement, "nodes", lambda: [Node(16, 32.0, 12.0, 32.0, {"pool": "a"})] * 2)
    monkeypatch.setattr(placement, "placement_group", make)
    monkeypatch.setattr(placement, "remove_placement_group", made.remove)
    monkeypatch.setattr(
        placement, "placement_group_table", lambda group: {"bundles_to_node_id": dict(enumerate(group.nodes))}
    )
    return made


def bundles_of(options):
    return [each["scheduling_strategy"].placement_group_bundle_index for each in options]


def test_ranks_that_share_a_sequence_share_a_bundle_and_neighbours_a_node(groups):
    """Ray may deal bundles out to nodes in any order, and in another one later."""
    placed = Placement(make_config(2, 1, 4), "cuda")
    groups[0].nodes = list("baba")
    assert bundles_of(placed.actors()) == [1, 3, 0, 2]
    groups[0].nodes = list("bcbc")
    assert bundles_of(placed.actors()) == [0, 2, 1, 3]
    groups.clear()
    cfg = make_config(1, 1, 12, 2)
    cfg.actor.fsdp_size = 4
    placed = Placement(cfg, "cuda")
    assert groups[0].bundles == [{"GPU": 2, "CPU": 2}] * 6
    groups[0].nodes = list("bababa")
    assert bundles_of(placed.actors()) == [1, 1, 3, 3, 0, 0, 2, 2, 5, 5, 4, 4]
    cfg.actor.fsdp_size = 1
    assert bundles_of(placed.actors()) == [1, 1, 3, 3, 5, 5, 0, 0, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("device", "key", "refused", "taken", "says"),
    [
        ("cpu", "quantization", "fp8_per_tensor", "fp8_per_channel", "on a CPU .* take fp8_per_ch"),
        ("cpu", "pipeline_parallel_size", 2, 1, "must be 1 on a CPU"),
        ("cuda", "dtype", "float32", "bfloat16", "use bfloat16 or float16"),
    ],
)
def test_what_the_device_has_no_kernels_for_is_refused(groups, device, key, refused, taken, says):
    def place(value):
        cfg = make_config(1, 1, 1)
        if key == "dtype":
            cfg.model.dtype = value
        else:
            cfg.rollout.vllm[key] = value
        return Placement(cfg, device)

    with pytest.raises(ValueError, match=rf"{key}` \({refused}\) .*{says}"):
        place(refused)
    assert len(place(taken).rollout()) == 1


def test_labels_go_to_ray_for_each_bundle_and_without_gpus_for_each_process(groups):
    cfg = make_config(2, 1, 3)
    cfg.rollout.node_labels, cfg.actor.node_labels = {"pool": "a"}, {}
    Placement(cfg, "cuda")
    assert [group.labels for group in groups] == [[{"pool": "a"}], [{"pool": "a"}], None]
    placed = Placement(cfg, "cpu")
    assert [each["label_selector"] for each in placed.rollout()] == [{"pool": "a"}] * 2
    assert "label_selector" not in placed.actors()[0] and len(groups) == 3
    cfg.rollout.node_labels = {"pool": "b"}
    for device in ("cuda", "cpu"):
        with pytest.raises(ValueError, match=r"`rollout.node_labels` \(pool=b\).*labels are pool=a \(2\)"):
            Placement(cfg, device)


def test_what_is_asked_is_told_before_it_is_waited_for_or_refused(groups):
    told = []
    Placement(make_config(5, 1, 20), "cuda", say=told.append, warn=told.append)
    assert told[0] == "placement: the run needs 25 GPUs; 24 of 32 are free, on 2 nodes of 16 GPUs"
    assert "4 fit now, all once other jobs have ended" in told[2]
    assert "waiting up to 900 s (`actor.start_timeout_s`)" in told[3]
    made = len(groups)
    told.clear()
    with pytest.raises(ValueError, match=r"asked for 40 GPUs but the Ray cluster has 32.*add 1 node of 16 GPUs"):
        Placement(make_config(8, 1, 32), "cuda", say=told.append)
    assert told and len(groups) == made, "nothing is asked of Ray"


def test_nodes_that_are_still_to_join_are_asked_for_and_waited_for(groups, monkeypatch):
    cfg, told, asked, here = make_config(1, 1, 32), [], [], [Node(16, 32.0, 16.0, 32.0, {"pool": "a"})]
    cfg.actor.node_labels = {"pool": "a"}
    monkeypatch.setattr(
        joining,
        "request_resources",
        lambda bundles, bundle_label_selectors=(): asked.append((bundles, bundle_label_selectors)),
    )
    monkeypatch.setattr(joining, "POLL_S", 0.01)
    for later, timeout_s in ((here * 3, 60.0), (here * 2, 0.05)):
        answers = iter([here, here])
        monkeypatch.setattr(placement, "nodes", lambda answers=answers, later=later: next(answers, later))
        cfg.trainer.nodes_timeout_s = timeout_s
        with nullcontext() if len(later) == 3 else pytest.raises(ValueError, match="the Ray cluster has 32"):
            Placement(cfg, "cuda", warn=told.append)
    assert asked == [([{"GPU": 1, "CPU": 1}] * 33, [{"pool": "a"}] * 32 + [{}]), ([], ())] * 2
    assert "1 node of 16 GPUs, is too small; waiting up to 60 s (`trainer.nodes_timeout_s`)" in told[0]


def test_a_wait_that_is_given_up_ends_at_once(groups, monkeypatch):
    monkeypatch.setattr(joining, "request_resources", lambda **what: None)
    cfg = make_config(8, 1, 32)
    cfg.trainer.nodes_timeout_s = 3600.0
    with pytest.raises(ValueError, match="asked for 40 GPUs"):
        Placement(cfg, "cuda", given_up=lambda: True)
    with pytest.raises(RuntimeError, match="could not place"):
        Placement(make_config(1, 1, 20), "cuda", given_up=lambda: True)
    groups.clear()
    placed = Placement(make_config(1, 1, 3), "cuda", warn=lambda line: placed.give_up())
    groups[0].nodes, groups[0].later = ["a", "", ""], ["a", "", ""]  # a node is gone
    before = FakeGroup.now
    with pytest.raises(RuntimeError, match="add a node"):
        placed.actors()
    assert FakeGroup.now - before == placement.PLACED_S


def test_an_engine_and_all_ranks_have_a_group_of_their_own(groups):
    """Or an engine that finds no place on another node would hold up the ranks, which come first."""
    placed = Placement(make_config(2, 4, 3), "cuda")
    first, second, ranks = groups  # the larger bundles come first
    assert first.bundles == second.bundles == [{"GPU": 4, "CPU": 1}] and ranks.bundles == [{"GPU": 1, "CPU": 1}] * 3
    found = [each["scheduling_strategy"].placement_group for each in (*placed.rollout(), *placed.actors())]
    assert found == [first, second, ranks, ranks, ranks] and bundles_of(placed.rollout()) == [0, 0]
    placed.release_engine(0)
    assert groups == [second, ranks]
    placed.release_engine(0)


def test_each_process_sees_its_own_gpus_also_where_its_node_lets_ray_show_all(groups, monkeypatch):
    """A rank takes the first GPU that it sees: with that variable all ranks of a node would compute on one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    NvidiaGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["3"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    placed = Placement(make_config(1, 1, 2), "cuda")
    for options in (*placed.rollout(), *placed.actors()):
        with monkeypatch.context() as process:
            for name, value in options["runtime_env"]["env_vars"].items():
                process.setenv(name, value)
            NvidiaGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["3"])
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
            process.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")


def test_engines_own_the_gpus_of_neighbouring_ranks_also_on_other_nodes_later(groups):
    """Bundle 0 has the ranks 0 and 1 at first, and 4 and 5 when its node is another one."""
    cfg = make_config(3, 2, 6)
    cfg.trainer.colocate = "time"
    placed = Placement(cfg, "cuda")
    [ranks] = groups
    assert ranks.bundles == [{"GPU": 2, "CPU": 4}] * 3
    assert bundles_of(placed.rollout()) == [0, 1, 2] and bundles_of(placed.actors()) == [0, 0, 1, 1, 2, 2]
    assert {each["num_gpus"] for each in placed.rollout()} == {0} and placed.actors()[0]["num_gpus"] == 1
    assert [placed.ranks_of_engine(number) for number in range(3)] == [[0, 1], [2, 3], [4, 5]]
    groups[0].nodes = list("bab")
    assert [placed.ranks_of_engine(number) for number in range(3)] == [[2, 3], [0, 1], [4, 5]]
    assert Placement(cfg, "cpu").ranks_of_engine(0) == []
    groups.clear()
    cfg = make_config(4, 2, 8, 4)  # ranks that share a sequence, and smaller engines
    cfg.trainer.colocate, cfg.actor.fsdp_size = "time", 1
    placed = Placement(cfg, "cuda")
    assert groups[0].bundles == [{"GPU": 4, "CPU": 8}] * 2 and bundles_of(placed.rollout()) == [0, 0, 1, 1]
    assert [placed.ranks_of_engine(number) for number in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    groups.clear()
    cfg = make_config(6, 1, 2)  # three engines on the GPU of each rank
    cfg.trainer.colocate, cfg.rollout.engines_per_gpu = "time", 3
    placed = Placement(cfg, "cuda")
    assert groups[0].bundles == [{"GPU": 1, "CPU": 4}] * 2 and bundles_of(placed.rollout()) == [0, 0, 0, 1, 1, 1]
    assert [placed.ranks_of_engine(number) for number in range(6)] == [[0], [0], [0], [1], [1], [1]]
    cfg.actor.ulysses_sequence_parallel_size = 2
    groups.clear()
    placed = Placement(cfg, "cuda")
    assert groups[0].bundles == [{"GPU": 2, "CPU": 8}] and bundles_of(placed.rollout()) == [0] * 6
    assert [placed.ranks_of_engine(number) for number in range(6)] == [[0], [0], [0], [1], [1], [1]]


def test_engines_that_are_lent_gpus_have_those_of_ranks_beside_engines_with_their_own(groups):
    cfg = make_config(2, 2, 4)
    cfg.trainer.colocate, cfg.rollout.node_labels = "lend", {"pool": "a"}
    placed = Placement(cfg, "cuda")
    assert sorted(group.bundles[0]["GPU"] for group in groups) == [2, 2, 2] and len(groups) == 3
    [ranks] = [group for group in groups if len(group.bundles) == 2]
    options = placed.rollout()
    assert [each["num_gpus"] for each in options] == [2, 2, 0, 0] and placed.actors()[0]["num_gpus"] == 1
    assert [each["scheduling_strategy"].placement_group is ranks for each in options] == [False, False, True, True]
    assert bundles_of(options)[2:] == [0, 1]
    assert [placed.ranks_of_engine(number) for number in range(5)] == [[], [], [0, 1], [2, 3], []], "one that joins"
    placed.release_engine(2)
    assert len(groups) == 3, "the ranks keep theirs"
    assert len(Placement(cfg, "cpu").rollout()) == 4


@pytest.mark.parametrize("later", [list("abb"), ["a", "", ""]], ids=["a node joins", "none joins"])
def test_ranks_whose_node_is_gone_wait_for_another_one(groups, later):
    said = []
    placed = Placement(make_config(1, 1, 3), "cuda", warn=said.append)
    groups[0].nodes, groups[0].later = ["a", "", ""], later
    if all(later):
        assert len(placed.actors()) == 3
    else:
        with pytest.raises(RuntimeError, match=r"for 900 s \(`actor.start_timeout_s`\) .* no 2 GPUs .* add a node"):
            placed.actors()
    [line] = said
    assert "a node is gone, and the others have no 2 GPUs" in line and "900 s (`actor.start_timeout_s`)" in line


def test_cpu_roles_reserve_nothing_and_set_thread_counts():
    cfg = make_config(2, 1, 3)
    cfg.actor.cpu_threads, cfg.reward.model.cpu_threads, cfg.reward.model.num_workers = 5, 3, 2
    placed = Placement(cfg, "cpu")
    assert [each["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] for each in placed.reward_model()] == ["3", "3"]
    assert len(placed.rollout()) == 2 and len(placed.actors()) == 3
    for options in (*placed.rollout(), *placed.actors(), *placed.reward_model(), placed.rewards()):
        assert options["num_cpus"] == 0 and "num_gpus" not in options
    assert {each["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] for each in placed.actors()} == {"5"}
    for each in (*placed.rollout(), *placed.actors(), *placed.reward_model()):  # or threads that wait take the cores
        assert int(each["runtime_env"]["env_vars"]["GOMP_SPINCOUNT"]) <= 1000
