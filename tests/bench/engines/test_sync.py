"""The benchmark of the weight sync: its command line becomes a configuration that the checks accept."""

from pathlib import Path

import pytest

from dapo.bench.__main__ import parse
from dapo.bench.engines.sync import to_config


def test_options_become_a_configuration_that_the_checks_accept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = parse(["sync", "--ranks", "2", "--engines", "2", "--colocate", "--bucket-mib", "3"])
    cfg = to_config(options, str(tmp_path))
    assert (cfg.actor.num_workers, cfg.rollout.num_engines, cfg.weight_sync.bucket_bytes) == (2, 2, 3 << 20)
    with pytest.raises(ValueError, match="`rollout.num_engines`"):
        to_config(parse(["sync", "--ranks", "2", "--colocate"]), str(tmp_path))
