"""Where Ray puts roles: GPUs that are not there, which it deals out as it does real ones."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.support.placed_roles import gpus_of_roles, make_config, places_of_roles

pytestmark = [pytest.mark.ray, pytest.mark.nightly]


@pytest.fixture(scope="module")
def process():
    """Starts its own Ray for each call: this one's has no GPU."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield executor


def test_roles_see_the_gpus_that_they_share(process):
    time, lend = make_config(2, 2, 4), make_config(1, 2, 2)
    time.trainer.colocate, lend.trainer.colocate = "time", "lend"

    def gpus_of(cfg, count):
        cfg.reward.model.path, cfg.reward.model.num_gpus = "scorer", 1.0
        return process.submit(gpus_of_roles, cfg, num_gpus=count).result(timeout=300)

    gpus = gpus_of(time, 5)  # an engine of two GPUs owns those that Ray gave to two ranks
    assert gpus["owned"] == [sum(gpus["actors"][:2], []), sum(gpus["actors"][2:], [])]
    assert sorted(sum(gpus["owned"] + gpus["scorer"], [])) == list("01234") and gpus["engines"] == [[], []]
    gpus = gpus_of(lend, 5)
    assert gpus["owned"] == [[], sum(gpus["actors"], [])] and gpus["engines"][1] == []
    assert sorted(gpus["engines"][0] + sum(gpus["actors"] + gpus["scorer"], [])) == list("01234")


def test_on_real_nodes_ranks_lie_by_sequence_groups_and_pools_by_labels(process):
    """Four ranks one by one would fill a node of three, and the engine would take what is left there."""
    cfg = make_config(1, 1, 4, 2, actor={"pool": "train"}, rollout={"pool": "serve"})
    found = process.submit(places_of_roles, cfg).result(timeout=500)
    assert found["told"] == [
        "the Ray cluster, 2 nodes of 3 GPUs, is too small; waiting up to 300 s (`trainer.nodes_timeout_s`) for more",
        "placement: the run needs 5 GPUs; 8 of 8 are free, on 2 nodes of 3 GPUs, 1 node of 2 GPUs",
        "  actor ranks: 2 x 2 GPUs, each on one node, of 2 nodes with pool=train (`actor.node_labels`): all fit",
        "  engines: 1 x 1 GPUs, each on one node, of 1 node with pool=serve (`rollout.node_labels`): all fit",
    ]
    assert [node for node, _ in found["engines"]] == ["c"]
    for ranks, nodes in ((found["ranks"], "ab"), (found["ranks later"], "ad")):
        on = "".join(node for node, _ in ranks)
        assert on in (2 * nodes[0] + 2 * nodes[1], 2 * nodes[1] + 2 * nodes[0])
        assert len({(node, *gpus) for node, gpus in ranks}) == 4, "each has a GPU of its own"
