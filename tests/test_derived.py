"""What follows from a configuration."""

import pytest

from dapo.config.compose import compose
from dapo.derived import device_of


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [("auto", "float32", "cpu"), ("auto", "bfloat16", "cuda"), ("cpu", "bfloat16", "cpu"), ("cuda", "float32", "cuda")],
)
def test_where_a_run_computes_does_not_depend_on_what_is_there(device: str, dtype: str, expected: str) -> None:
    """The tiny run works on a machine with GPUs, and one for GPUs is refused, not started, where there are none."""
    assert device_of(compose([f"trainer.device={device}", f"model.dtype={dtype}"], "dapo_tiny")) == expected
