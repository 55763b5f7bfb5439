"""launch/slurm where sites differ: containers, networks, what sbatch passes on."""

import re
from pathlib import Path

import pytest

from tests.support.batch import UNTIL_TERM, ended, start


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        pytest.param(
            "pyxis", "--container-mounts={here}:{here},{here}/scratch:{here}/scratch,/models:/models", id="pyxis"
        ),
        pytest.param("apptainer", "exec --nv --bind {here},{here}/scratch,/models", id="apptainer"),
    ],
)
def test_a_container_holds_nodes_driver_and_what_they_write(tmp_path: Path, runtime: str, expected: str) -> None:
    env = {"CONTAINER": "image.sqsh", "CONTAINER_RUNTIME": runtime, "CONTAINER_MOUNTS": "/models", "PYTHON": ""}
    here, output = tmp_path / "checkout", tmp_path / "shared/run"
    here.mkdir()
    plan = f"echo lead_s 600; echo output_dir {output}"
    said = ended(start(here, driver="echo trained", plan=plan, **env))
    assert "trained" in said, said
    record = (here / ("srun.options" if runtime == "pyxis" else "apptainer.log")).read_text()
    mounts = expected.format(here=here)
    mounted = f"{mounts},{output}:{output}\n" if runtime == "pyxis" else f"{mounts},{output} image.sqsh "
    assert record.count(mounts) == record.count(mounted) + 1, "the plan alone does not know where the run writes"
    assert record.count(mounted) >= 5, "the port, the nodes, the wait, the doctor and the driver"


def test_an_evaluation_writes_outside_of_the_checkout_too(tmp_path: Path) -> None:
    here, output = tmp_path / "checkout", tmp_path / "shared/evaluated"
    here.mkdir()
    plan = f'echo "asked $*" >&2; echo output_dir {output}'
    env = {"CONTAINER": "image.sqsh", "PYTHON": "", "script": "eval"}
    said = ended(start(here, driver="echo evaluated", plan=plan, **env))
    assert "\nevaluated\n" in said and "asked -m dapo.evaluate --job +experiment=dapo_qwen32b\n" in said, said
    assert (here / "srun.options").read_text().count(f",{output}:{output}\n") >= 4, "port, nodes, wait and driver"
    assert [*(output / "nodes/7.0").glob("*.log")], "where those of a run lie"


def test_an_evaluation_that_would_be_refused_starts_nothing(tmp_path: Path) -> None:
    job = start(tmp_path, driver="echo ran", plan="echo no such key >&2; exit 1", script="eval")
    said = ended(job)
    assert job.returncode == 1 and "no such key\n" in said and "see the message above" in said, said
    assert "ran" not in said.split() and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
@pytest.mark.parametrize("named", [True, False], ids=["HF_HOME", "where_it_is_by_default"])
def test_the_hubs_caches_are_in_the_container(tmp_path: Path, runtime: str, named: bool) -> None:
    here, home = tmp_path / "checkout", tmp_path / ("hf" if named else "huggingface")
    inside, other = here / "hub", tmp_path / "data sets"
    for folder in (here, home, inside, other):
        folder.mkdir()
    caches = {"HF_HOME": str(home)} if named else {"XDG_CACHE_HOME": str(tmp_path)}
    caches |= {"HF_HUB_CACHE": str(inside), "HF_DATASETS_CACHE": str(other)}
    env = {"CONTAINER": "image.sqsh", "CONTAINER_RUNTIME": runtime, "PYTHON": "", **caches}
    said = ended(start(here, driver="echo home $HF_HOME", **env))
    assert f"home {home}\n" in said, said
    record = (here / ("srun.options" if runtime == "pyxis" else "apptainer.log")).read_text()
    mounts = [here, here / "scratch", home, other]
    assert ",".join(f"{each}:{each}" if runtime == "pyxis" else str(each) for each in mounts) in record
    assert str(inside) not in record, "the checkout holds it"


def test_a_cache_that_is_not_there_is_not_mounted(tmp_path: Path) -> None:
    caches = {"HF_HOME": str(tmp_path / "absent"), "HF_HUB_CACHE": "relative"}
    said = ended(start(tmp_path, driver="echo trained", CONTAINER="image.sqsh", PYTHON="", **caches))
    options = (tmp_path / "srun.options").read_text()
    assert "trained" in said and "absent" not in options and "relative" not in options, said


def test_a_mount_may_have_another_name_in_the_container(tmp_path: Path) -> None:
    mounts = "/models,/lustre/data:/data,/raw:/raw:ro"
    said = ended(start(tmp_path, driver="echo trained", CONTAINER="image.sqsh", PYTHON="", CONTAINER_MOUNTS=mounts))
    assert "trained" in said, said
    options = (tmp_path / "srun.options").read_text()
    assert "scratch,/models:/models,/lustre/data:/data,/raw:/raw:ro\n" in options


def test_an_image_that_was_built_again_is_unpacked_again(tmp_path: Path) -> None:
    """A container that pyxis knows by its name outlives the job by default, and is taken in the image's place."""
    image, names = tmp_path / "image.sqsh", []
    for build in ("old", "newer"):
        image.write_text(build)
        (tmp_path / build).mkdir()
        assert "trained" in ended(start(tmp_path / build, driver="echo trained", CONTAINER=str(image), PYTHON=""))
        options = (tmp_path / build / "srun.options").read_text()
        names.append(set(re.findall(r"--container-name=(\S+)", options)))
    assert [len(each) for each in names] == [1, 1] and names[0] != names[1]


def test_an_unknown_container_runtime_is_named(tmp_path: Path) -> None:
    job = start(tmp_path, driver="echo ran", CONTAINER="x", CONTAINER_RUNTIME="podman")
    assert "it can be pyxis or apptainer" in ended(job) and job.returncode == 1


@pytest.mark.parametrize("network", ["lo", "127.0", "127.0.0.1"])
def test_the_network_of_the_nodes_can_be_named(tmp_path: Path, network: str) -> None:
    """The first address of a node's own name need not be the way that others have to it."""
    said = ended(start(tmp_path, driver="echo at $RAY_ADDRESS", NODE_NETWORK=network))
    assert "\nat 127.0.0.1:" in said, said


@pytest.mark.parametrize("network", ["ib7", "127.0.0.11", "10.99.99", "12"])
def test_a_network_that_the_head_does_not_have_is_named(tmp_path: Path, network: str) -> None:
    job = start(tmp_path, driver="echo ran", NODE_NETWORK=network)
    said = ended(job)
    assert job.returncode == 1 and "ran" not in said.split()
    assert f"NODE_NETWORK ({network}) " in said and "lo 127.0.0.1" in said, said


def test_an_interface_without_an_address_is_no_network(tmp_path: Path) -> None:
    (tmp_path / "psutil.py").write_text("""
import socket, types
address = types.SimpleNamespace(family=socket.AF_INET, address="10.1.0.7")
net_if_addrs = lambda: {"eth0": [address], "ib0": []}
""")
    env = {"PYTHONPATH": str(tmp_path)}
    job = start(tmp_path, driver="echo ran", NODE_NETWORK="ib0", **env)
    assert "NODE_NETWORK (ib0) is no interface" in (said := ended(job))
    assert "eth0 10.1.0.7, ib0 without IPv4\n" in said and job.returncode == 1


@pytest.mark.parametrize(
    "own", [{"SLURM_EXPORT_ENV": "NONE"}, {"SLURM_TIME_FORMAT": "%d %b"}], ids=lambda own: min(own)
)
def test_a_persons_settings_of_slurm_change_nothing(tmp_path: Path, own: dict[str, str]) -> None:
    """Steps of `sbatch --export=NONE` would get no variable of the job's; squeue writes dates as it is told."""
    logs = "outputs/run/nodes/7.0/*.log"
    driver = f"until (($(cat {logs} | wc -l) == 2)); do sleep 0.05; done; cat {logs}"
    said = ended(start(tmp_path, driver=driver, node=f"echo by $RAY_AUTH_MODE; {UNTIL_TERM}", **own))
    assert said.count("by token\n") == 2, said


def test_the_doctor_looks_at_the_disk_that_ray_writes_to(tmp_path: Path) -> None:
    """It asks RAY_TMPDIR, on the nodes and, for what each run checks, beside the driver; /tmp may be small."""
    disk, logs = tmp_path / "disk", "outputs/run/nodes/7.0/*.log"
    driver = f"until (($(cat {logs} | wc -l) == 2)); do sleep 0.05; done; cat {logs}; echo driver on $RAY_TMPDIR"
    env = {"NODE_DISK": str(disk), "RAY_TMPDIR": "/elsewhere"}
    said = ended(start(tmp_path, driver=driver, node=f"echo node on $RAY_TMPDIR; {UNTIL_TERM}", **env))
    assert said.count(f"node on {disk}\n") == 2 and f"driver on {disk}\n" in said, said


def test_a_token_of_another_cluster_in_the_environment_is_not_taken(tmp_path: Path) -> None:
    """Ray takes RAY_AUTH_TOKEN before the file that RAY_AUTH_TOKEN_PATH names."""
    said = ended(start(tmp_path, driver="echo token ${RAY_AUTH_TOKEN:-of the file}", RAY_AUTH_TOKEN="0" * 64))
    assert "token of the file\n" in said, said


def test_python_may_be_a_name_in_the_path(tmp_path: Path) -> None:
    """A module or a conda environment that was loaded before sbatch has put it there."""
    (tmp_path / "there").mkdir()
    assert "trained" in ended(start(tmp_path / "there", driver="echo trained", PYTHON="python"))
    (tmp_path / "not").mkdir()
    said = ended(start(tmp_path / "not", driver="echo trained", PYTHON="python9"))
    assert "python9 does not exist" in said and "trained" not in said


def test_the_bash_of_older_systems_will_do(tmp_path: Path) -> None:
    """What bash 5 has brought is not there in the 4.4 of RHEL 8."""
    (tmp_path / "older").write_text("unset EPOCHSECONDS EPOCHREALTIME SRANDOM BASH_ARGV0")
    said = ended(start(tmp_path, driver="echo trained", BASH_ENV=str(tmp_path / "older")))
    assert "trained" in said and "unbound" not in said, said


def test_scratch_is_a_folder_that_all_nodes_see_at_many_sites(tmp_path: Path) -> None:
    """There SCRATCH is set to it for everyone; nodes that keep Ray's files in one folder take each other's."""
    here = tmp_path / "checkout"
    here.mkdir()
    said = ended(start(here, driver="echo trained", SCRATCH=str(tmp_path / "lustre")))
    assert "trained" in said and not (tmp_path / "lustre").exists(), said
