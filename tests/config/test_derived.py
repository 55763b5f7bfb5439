"""What follows from a configuration, and from the machine: device and network interface."""

import os

import pytest

from dapo.config.compose import compose
from dapo.config.derived import device_of
from dapo.config.node_environment import GLOO, NCCL, NCCL_FAMILY, sockets_towards


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [("auto", "float32", "cpu"), ("auto", "bfloat16", "cuda"), ("cpu", "bfloat16", "cpu"), ("cuda", "float32", "cuda")],
)
def test_where_a_run_computes_does_not_depend_on_what_is_there(device, dtype, expected):
    """The tiny run works on a machine with GPUs, and one for GPUs is refused, not started, where there are none."""
    assert device_of(compose([f"trainer.device={device}", f"model.dtype={dtype}"], "dapo_tiny")) == expected


@pytest.mark.parametrize(
    ("named", "address", "expected"),
    [
        pytest.param({}, "127.0.0.1", {GLOO: "lo", NCCL: "=lo"}, id="this_machine"),
        pytest.param({GLOO: "ib0", NCCL: "ib"}, "127.0.0.1", {GLOO: "ib0", NCCL: "ib"}, id="a_site_has_named_both"),
        pytest.param({GLOO: "ib0"}, "127.0.0.1", {GLOO: "ib0", NCCL: "=lo"}, id="a_site_has_named_gloos"),
        pytest.param({NCCL_FAMILY: "AF_INET6"}, "127.0.0.1", {GLOO: "lo"}, id="nccl_looks_by_a_family"),
        pytest.param({}, "no.such.host.invalid", {}, id="no_way_there"),
    ],
)
def test_groups_use_the_interface_that_reaches_the_others(named, address, expected, monkeypatch):
    for name in (GLOO, NCCL, NCCL_FAMILY):
        monkeypatch.setenv(name, named.get(name, ""))  # what the test sets goes with it
        if name not in named:
            monkeypatch.delenv(name)
    sockets_towards(address)
    assert {name: os.environ[name] for name in (GLOO, NCCL) if name in os.environ} == expected
