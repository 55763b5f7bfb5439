"""The benchmark of the weight sync: its command line, and a run with real actors and engines."""

import subprocess
import sys

import pytest

from dapo.bench import sync as bench_sync


def test_options_become_a_configuration_that_the_checks_accept(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    options = bench_sync.parse(["--ranks", "2", "--engines", "2", "--colocate", "--bucket-mib", "3"])
    cfg = bench_sync.to_config(options, str(tmp_path))
    assert (cfg.actor.num_workers, cfg.rollout.num_engines, cfg.weight_sync.bucket_bytes) == (2, 2, 3 << 20)
    with pytest.raises(ValueError, match="`rollout.num_engines`"):
        bench_sync.to_config(bench_sync.parse(["--ranks", "2", "--colocate"]), str(tmp_path))


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(400)
def test_it_runs():
    command = "-m dapo.bench.sync --shape 1m --ranks 1 --colocate --turns 1 --syncs 1 --transports broadcast ipc"
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("1M parameters, 4 MB in float32")
    assert [line.split()[0] for line in lines[-2:]] == ["broadcast", "ipc"]
