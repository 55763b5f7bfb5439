"""What follows from a configuration, and from the machine: device and network interface."""

import os

import pytest

from dapo.config.compose import compose
from dapo.derived import device_of
from dapo.interfaces import GLOO, gloo_towards


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
        pytest.param(None, "127.0.0.1", "lo", id="this_machine"),
        pytest.param("ib0", "127.0.0.1", "ib0", id="a_site_has_named_one"),
        pytest.param(None, "no.such.host.invalid", None, id="no_way_there"),
    ],
)
def test_gloo_uses_the_interface_that_reaches_the_others(named, address, expected, monkeypatch):
    monkeypatch.setenv(GLOO, named or "")  # what the test sets goes with it
    if named is None:
        monkeypatch.delenv(GLOO)
    gloo_towards(address)
    assert os.environ.get(GLOO) == expected
