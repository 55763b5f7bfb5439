"""The doctor on three Ray nodes, of which one has an output directory and a model directory of its own."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.config.paths import resolve_path
from tests.support.nodes import Node

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(900)]

# A node whose mounts are its own: what lies in these directories on the others is not there.
HIDING = 'for folder in "$OUTPUT" "$MODEL"; do mount -t tmpfs none "$folder" || exit 1; done; exec "$@"'
APART = ("unshare", "--mount", "--propagation=private")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The output directory and the model's, which every node sees."""
    output, model = tmp_path / "out", tmp_path / "model"
    output.mkdir()
    shutil.copytree(resolve_path("pkg://dapo.tiny/base"), model)
    return output, model


@pytest.fixture
def nodes(ray_cluster: None, folders: tuple[Path, Path]) -> Iterator[list[Node]]:
    """One that shares everything with this one, and one that does not."""
    if subprocess.run([*APART, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    hidden = [f"OUTPUT={folders[0]}", f"MODEL={folders[1]}"]
    made = [Node(gpus=0), Node(gpus=0, within=(*APART, "env", *hidden, "sh", "-c", HIDING, "sh"))]
    yield made
    for node in made:
        node.stop()


def test_what_only_another_node_sees(nodes: list[Node], folders: tuple[Path, Path]) -> None:
    from tests.support.cluster import join_cluster

    own = [join_cluster(), f"trainer.output_dir={folders[0]}", f"model.path={folders[1]}"]
    command = [sys.executable, "-m", "dapo.doctor", "+experiment=dapo_tiny", *own, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    said = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    away = nodes[1].id[:6]
    assert said["Ray"]["found"].startswith("3 nodes at ")
    assert {name for name, check in said.items() if check["level"] == "fault"} == {"files", "shared directory"}, said
    for name in ("files", "shared directory"):
        assert "1 of 3 nodes" in said[name]["found"] and away in said[name]["found"], said[name]
        assert nodes[0].id[:6] not in said[name]["found"]
        assert "share" in said[name]["remedy"]
    assert said["clock"]["level"] == "ok" and "3 nodes" in said["clock"]["found"]
    assert said["all-reduce"]["level"] == "ok" and "gloo, 3 ranks on 3 machines" in said["all-reduce"]["found"]
    assert said["open files"]["found"].startswith("3 of 3 nodes (")
    assert not [*folders[0].iterdir()], "nothing stays behind"
