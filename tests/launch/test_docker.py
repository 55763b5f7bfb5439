"""docker/ and .github/: what can be told of images, compose files and workflows without a container."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from workers.cluster import GIB

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = [ROOT / "docker/Dockerfile", ROOT / "docker/Dockerfile.cpu"]
is_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def instructions(path: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, the rest) in order, continued lines joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


@is_dockerfile
def test_an_image_is_pinned_unprivileged_watched_and_takes_arguments(path: Path) -> None:
    found = instructions(path)
    names = [name for name, _ in found]
    (base,) = [rest for name, rest in found if name == "FROM"]
    assert re.search(r":\d+\.\d+\.\d+-", base), "an exact version"
    assert dict(found)["USER"].isdigit() and int(dict(found)["USER"]) >= 1000
    assert dict(found)["ENTRYPOINT"] == '["python", "-m", "dapo.main_ppo"]' and "HEALTHCHECK" in names


@is_dockerfile
def test_a_change_of_code_reinstalls_no_package(path: Path) -> None:
    found = [f"{name} {rest}" for name, rest in instructions(path)]
    packages = next(
        i
        for i, line in enumerate(found)
        if "gpu.lock &&" in line or "pip install --no-deps -r" in line or "--packages" in line
    )
    sources = next(i for i, line in enumerate(found) if line.endswith("dapo . .") or "target=/src" in line)
    assert packages < sources
    assert not [
        line
        for line in found[:packages]
        if line.startswith("COPY") and re.search(r"dapo/|config|workers", line.split("--chown=dapo:dapo")[-1])
    ]


@is_dockerfile
def test_what_is_copied_is_there(path: Path) -> None:
    for name, rest in instructions(path):
        if name == "COPY":
            *sources, _ = [word for word in rest.split() if not word.startswith("--")]
            assert all((ROOT / source).exists() for source in sources)


def test_a_container_is_alive_while_its_raylet_is(tmp_path: Path) -> None:
    def alive() -> int:
        return subprocess.run([sys.executable, ROOT / "docker/alive.py"], timeout=60).returncode

    name = shutil.copy("/bin/sleep", tmp_path / "raylet")
    node = subprocess.Popen([name, "60"])
    try:
        assert alive() == 0
    finally:
        node.kill()
        node.wait()
    source = (ROOT / "docker/alive.py").read_text().replace('"raylet"', '"no-such-process"')
    assert subprocess.run([sys.executable, "-c", source], timeout=60).returncode == 1


def compose(*names: str) -> list[dict]:
    return [yaml.safe_load((ROOT / "docker" / name).read_text()) for name in names]


def test_compose_publishes_no_port_and_holds_no_secret() -> None:
    for document in compose("compose.yaml", "compose.gpu.yaml"):
        assert all("ports" not in service for service in document["services"].values())
    (document, gpu) = compose("compose.yaml", "compose.gpu.yaml")
    assert document["secrets"] == {"ray_token": {"environment": "RAY_TOKEN"}}
    assert set(gpu["services"]) <= set(document["services"])
    for service in document["services"].values():
        assert service["environment"]["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in service["environment"]
        assert service["environment"]["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"
        assert "RAY_ADDRESS" not in service["environment"], "ray start --head refuses to start with it"
        assert any(volume.startswith("outputs:") for volume in service["volumes"]), "all nodes see the run's directory"


def test_without_gpus_rays_object_store_fits_in_shared_memory() -> None:
    texts = [(ROOT / name).read_text() for name in ("docker/Dockerfile.cpu", "launch/README.md", "docker/compose.yaml")]
    workflow = (ROOT / ".github/workflows/images.yml").read_text()
    found = re.findall(r"(?:shm-size=|shm_size: )(\d+)g", "".join([*texts, workflow]))
    assert len(found) >= 5 and all(int(size) << 30 > 8 * GIB for size in found), "or the doctor warns in each run"


@pytest.mark.parametrize("name", ["README.md", "launch/README.md", "docker/Dockerfile"])
def test_a_container_keeps_what_it_downloads_or_downloads_nothing(name: str) -> None:
    runs = re.findall(r"docker run --gpus(?:.*\\\n)*.*", (ROOT / name).read_text())
    assert runs
    for run in runs:
        assert '--user "$(id -u)"' in run, "the folders of the machine are this user's"
        kept = "-e HF_TOKEN -e HF_HOME=/hf" in run and '-v "$HOME/.cache/huggingface:/hf"' in run
        assert kept != ("-e HF_HUB_OFFLINE=1" in run and "-v /models:/models:ro" in run)


def test_a_worker_is_healthy_by_its_own_raylet_and_is_not_built_beside_gpus() -> None:
    (document, gpu) = compose("compose.yaml", "compose.gpu.yaml")
    assert document["services"]["worker"]["healthcheck"]["test"] == ["CMD", "python", "/opt/alive.py"]
    assert all("COPY docker/alive.py /opt/alive.py" in path.read_text() for path in DOCKERFILES)
    assert gpu["services"]["worker"] == {"profiles": ["none"]}


@pytest.mark.parametrize("service", ["head", "worker"])
def test_compose_starts_ray_with_options_that_it_has(service: str) -> None:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    (document,) = compose("compose.yaml")
    command = document["services"][service]["entrypoint"]
    options = {word.partition("=")[0] for word in command if word.startswith("--")}
    assert command[:2] == ["ray", "start"] and options <= known


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name)
def test_a_workflow_reads_only_and_ends(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 360 for job in workflow["jobs"].values())
    for script in re.findall(r"bash (\S+\.sh)|run: (\.ci/run)", path.read_text()):
        assert (ROOT / (script[0] or script[1])).exists()
