"""The interface of process groups is that by which this process reaches the others."""

import os

import pytest

from dapo.interfaces import GLOO, gloo_towards


@pytest.mark.parametrize(
    ("named", "address", "expected"),
    [
        pytest.param(None, "127.0.0.1", "lo", id="this_machine"),
        pytest.param("ib0", "127.0.0.1", "ib0", id="a_site_has_named_one"),
        pytest.param(None, "no.such.host.invalid", None, id="no_way_there"),
    ],
)
def test_gloo_uses_the_interface_that_reaches_the_others(
    named: str | None, address: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GLOO, named or "")  # what the test sets goes with it
    if named is None:
        monkeypatch.delenv(GLOO)
    gloo_towards(address)
    assert os.environ.get(GLOO) == expected
