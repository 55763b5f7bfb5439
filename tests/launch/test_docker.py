"""docker/ and .github/: what can be told of images, compose files and workflows without a container."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = [ROOT / "docker/Dockerfile", ROOT / "docker/Dockerfile.cpu"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_pinned_unprivileged_watched_and_a_change_of_code_reinstalls_no_package(path: Path) -> None:
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = [tuple(line.split(" ", 1)) for line in text.splitlines() if line.strip()]
    last = dict(found)
    assert re.search(r":\d+\.\d+\.\d+-", last["FROM"]), "an exact version"
    assert last["USER"].isdigit() and int(last["USER"]) >= 1000
    assert last["ENTRYPOINT"] == '["python", "-m", "dapo.main_ppo"]' and "HEALTHCHECK" in last
    assert "COPY docker/alive.py /opt/alive.py" in text
    packages = next(i for i, (_, rest) in enumerate(found) if re.search(r"install --no-deps -r|--packages", rest))
    sources = next(i for i, (_, rest) in enumerate(found) if rest.endswith("dapo . .") or "target=/src" in rest)
    copies = {i: re.sub(r"--\S+ ", "", rest).split() for i, (name, rest) in enumerate(found) if name == "COPY"}
    assert packages < sources
    for i, (*copied, _) in copies.items():
        assert all((ROOT / name).exists() for name in copied)
        assert i > packages or not re.search(r"dapo/|config|workers|(^| )\.( |$)", " ".join(copied))


def test_the_gpu_image_has_what_nccl_opens_for_rdma() -> None:
    installed = re.search(r"apt-get install([^&]+)", DOCKERFILES[0].read_text())
    assert installed and {"libibverbs1", "ibverbs-providers"} <= set(installed[1].split())


def test_a_container_is_alive_while_its_raylet_is(tmp_path: Path) -> None:
    source = (ROOT / "docker/alive.py").read_text()
    name = shutil.copy("/bin/sleep", tmp_path / "raylet")
    with subprocess.Popen([name, "60"]) as node:
        assert subprocess.run([sys.executable, "-c", source], timeout=60).returncode == 0
        node.kill()
    source = source.replace('"raylet"', '"no-such-process"')
    assert subprocess.run([sys.executable, "-c", source], timeout=60).returncode == 1


def test_compose_publishes_no_port_holds_no_secret_and_starts_ray_with_options_that_it_has() -> None:
    from ray.scripts.scripts import start

    document, gpu = (
        yaml.safe_load((ROOT / "docker" / f"{name}.yaml").read_text()) for name in ("compose", "compose.gpu")
    )
    for service in (*document["services"].values(), *gpu["services"].values()):
        assert "ports" not in service
    assert document["secrets"] == {"ray_token": {"environment": "RAY_TOKEN"}}
    assert set(gpu["services"]) <= set(document["services"])
    known = {option for parameter in start.params for option in parameter.opts}
    for service in document["services"].values():
        assert service["environment"]["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in service["environment"]
        assert service["environment"]["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"
        assert "RAY_ADDRESS" not in service["environment"], "ray start --head refuses to start with it"
        assert any(volume.startswith("outputs:") for volume in service["volumes"]), "all nodes see the run's directory"
    for name in ("head", "worker"):
        command = document["services"][name]["entrypoint"]
        options = {word.partition("=")[0] for word in command if word.startswith("--")}
        assert command[:2] == ["ray", "start"] and options <= known
    assert document["services"]["worker"]["healthcheck"]["test"] == ["CMD", "python", "/opt/alive.py"]


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name)
def test_a_workflow_reads_only_and_ends(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 360 for job in workflow["jobs"].values())
    for script in re.findall(r"bash (\S+\.sh)|run: (\.ci/run)", path.read_text()):
        assert (ROOT / (script[0] or script[1])).exists()
