"""launch/ray_up.sh, ray_down.sh and cloud.yaml: with a stand-in for ssh that makes each machine a home folder here."""

import json
import os
import re
import resource
import socket
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.support.batch import REAL, ROOT, fake

RUN = ["+experiment=dapo_qwen7b", "data.val_files=[/a b.parquet]"]
SSH = """
while [[ $1 == -o ]]; do shift 2; done
[[ $1 != "${UNREACHABLE:-}" ]] || exit 255
mkdir -p "$HOMES/${SHARED:-$1}"
echo "$*" >>"$HOMES/arguments"
[[ -z ${NODE_ENV:-} ]] || unset $NODE_ENV  # nothing of this environment gets there
ulimit -Sn 256
HOME=$HOMES/${SHARED:-$1} MACHINE=$1 SSH_CONNECTION="10.0.0.9 5 ${REACHED:-10.0.0.1} 22" exec bash -c "${*:2}"
"""
PYTHON = r"""
[[ $* != *socket* ]] || exec "$REAL_PYTHON" "$@"  # which has nothing to do with Ray
echo "token ${RAY_AUTH_TOKEN:-of the file}" >>"$HOME/tokens"
case "$*" in
  *ray.scripts*)
    printf '%s\n' "${HF_HOME:-}" "${HF_TOKEN:-}" >"$HOME/variables"
    ulimit -Sn >"$HOME/files"; echo "$*" >"$HOME/starting"; mv "$HOME/starting" "$HOME/started"
    echo "no GPU driver"; [[ -z ${FAILS:-} ]] || exit 1
    while true; do sleep 0.05; done ;;
  *dapo.doctor*)
    printf '%s\n' "$RAY_ADDRESS" "$@" >"$HOME/examined"; echo "${HF_TOKEN:-}" >"$HOME/doctors"; exit "${FAULT:-0}" ;;
  *) for home in "$HOMES"/*/; do until [[ -e $home/started ]]; do sleep 0.05; done; done  # those asked for join first
    [[ $(<"$RAY_AUTH_TOKEN_PATH") =~ ^[0-9a-f]{64}$ ]] && echo "${ALIVE:-2}" ;;
esac
"""


@pytest.fixture
def run(tmp_path: Path):
    fake(tmp_path, "fake/ssh", SSH)
    fake(tmp_path, "fake/hostname", '[[ $1 == -I ]] && echo "fd00::7 10.0.0.7 172.17.0.1 " || echo "$MACHINE"')
    fake(tmp_path, "check out/.venv/bin/python", PYTHON)

    def script(name: str, *machines: str, **env: str) -> subprocess.CompletedProcess[str]:
        base = {"PATH": f"{tmp_path}/fake:/usr/bin:/bin", "HOMES": f"{tmp_path}/homes", "DIR": f"{tmp_path}/check out"}
        base |= {"REAL_PYTHON": REAL, "TMPDIR": str(tmp_path / "tmp")}
        (tmp_path / "tmp").mkdir(exist_ok=True)
        return subprocess.run(
            ["bash", str(ROOT / f"launch/{name}.sh"), *machines],
            env={**base, "READY_S": "1", **env},
            capture_output=True,
            text=True,
            timeout=120,
        )

    yield script
    script("ray_down", "a", "b")


def own(home: Path, machine: str = "") -> Path:
    """Where a machine keeps what is started there."""
    return home / ".dapo-ray" / (machine or home.name)


def alive(home: Path, machine: str = "") -> bool:
    try:
        state = Path(f"/proc/{(own(home, machine) / 'pid').read_text().strip()}/status").read_text()
    except OSError:
        return False
    return not re.search(r"^State:\tZ", state, re.MULTILINE)


def test_a_cluster_comes_up_under_a_private_token_and_goes(run, tmp_path: Path) -> None:
    """Under a shell's limit of open files, and a token of another cluster in the machines' environment."""
    up = run("ray_up", "a", "b", "--", *RUN, RAY_AUTH_TOKEN="0" * 64)
    assert up.returncode == 0, up.stderr
    assert up.stdout.startswith("2 nodes at 10.0.0.1:20379") and " RAY_AUTH_TOKEN= " in up.stdout
    assert r"-m dapo.main_ppo +experiment=dapo_qwen7b data.val_files=\[/a\ b.parquet\]" in up.stdout
    assert "ray_down.sh a b\n" in up.stdout and rf"  cd {tmp_path}/check\ out && " in up.stdout
    a, b = tmp_path / "homes/a", tmp_path / "homes/b"
    head, worker = ((home / "started").read_text() for home in (a, b))
    assert "--head --node-ip-address=10.0.0.1 --port=20379 --dashboard-host=127.0.0.1" in head
    assert "--address=10.0.0.1:20379" in worker and "--head" not in worker
    sessions = tmp_path / "tmp" / f"dapo-{os.getuid()}"
    assert all(f"--temp-dir={sessions}/ray" in line for line in (head, worker))
    assert sessions.stat().st_mode & 0o777 == 0o700
    tokens = {(own(home) / "token").read_text().strip() for home in (a, b)}
    assert len(tokens) == 1 and not tokens & set((tmp_path / "homes/arguments").read_text().split())
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65536)
    for home in (a, b):
        assert alive(home) and int((home / "files").read_text()) == files
        assert set((home / "tokens").read_text().splitlines()) == {"token of the file"}
        assert own(home).stat().st_mode & 0o077 == 0 == (own(home) / "token").stat().st_mode & 0o077
    examined = (a / "examined").read_text()
    assert examined.splitlines() == ["10.0.0.1:20379", "-m", "dapo.doctor", *RUN] and not (b / "examined").exists()
    again = run("ray_up", "a")
    assert again.returncode == 1 and "runs there already" in again.stderr
    assert alive(a) and (own(a) / "token").read_text().strip() in tokens, "a refusal leaves the cluster alone"
    down = run("ray_down", "a", "b")
    assert down.returncode == 0 and not alive(a) and not alive(b)
    assert not (own(a) / "token").exists() and not (own(b) / "token").exists()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        pytest.param({"ALIVE": "1"}, "1 of 2 nodes joined 10.0.0.1:20379 within 1 s", id="deadline"),
        pytest.param({"FAILS": "1", "ALIVE": "0"}, "the head, a, ended", id="head_ends"),
        pytest.param({"UNREACHABLE": "b"}, "b cannot be used", id="unreachable"),
        pytest.param({"FAULT": "1"}, "the doctor's faults stand above; DOCTOR=0", id="doctor"),
        pytest.param({"DIR": "/nowhere"}, "/nowhere/.venv/bin/python does not exist", id="no_environment"),
        pytest.param({"NODE_ENV": "DIR HF_HOMME"}, "NODE_ENV names HF_HOMME, which is no variable", id="no_variable"),
        pytest.param({"NODE_ENV": "a[$(touch${IFS}x)]"}, "which is no variable", id="no_name_of_a_variable"),
    ],
)
def test_what_does_not_come_up_leaves_nothing_behind(run, tmp_path: Path, env: dict[str, str], said: str) -> None:
    up = run("ray_up", "a", "b", "--", *RUN, **env)
    assert up.returncode == 1 and said in up.stderr, up.stderr
    assert not list((tmp_path / "homes").glob("*/.dapo-ray/*/token"))
    assert not any(alive(tmp_path / "homes" / name) for name in "ab")


def test_a_folder_of_somebody_else_takes_no_sessions(run, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / f"dapo-{os.getuid()}").symlink_to(tmp_path)
    up = run("ray_up", "a", "b", "--", *RUN)
    assert up.returncode == 1 and "is no folder of yours; remove it" in up.stderr and "RAY_TMPDIR" in up.stderr


def test_named_variables_reach_nodes_doctor_and_run_and_no_command_line(run, tmp_path: Path) -> None:
    given = {"HF_HOME": "/shared/h f", "HF_TOKEN": "a'$(b)\n\"c"}
    up = run("ray_up", "a", "b", "--", *RUN, NODE_ENV="HF_HOME HF_TOKEN", **given)
    assert up.returncode == 0, up.stderr
    for name in "ab":
        home = tmp_path / "homes" / name
        assert (home / "variables").read_text() == "".join(f"{value}\n" for value in given.values())
        assert own(home).joinpath("env").stat().st_mode & 0o077 == 0
        assert re.fullmatch("[0-9a-f]{64}\n", (own(home) / "token").read_text())
    assert (tmp_path / "homes/a/doctors").read_text() == given["HF_TOKEN"] + "\n"
    told = (tmp_path / "homes/arguments").read_text() + up.stdout
    assert "$(b)" not in told and "/shared/h" not in told
    printed = "".join(re.findall(r"^  cd .* && \. (~/.*/env) && ", up.stdout, re.MULTILINE)).replace("~", "$HOME")
    shell = f'. {printed}; printf "%s\\n" "$HF_HOME" "$HF_TOKEN"'
    env = {"HOME": f"{tmp_path}/homes/a", "MACHINE": "a", "PATH": f"{tmp_path}/fake:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", shell], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "".join(f"{value}\n" for value in given.values())
    assert run("ray_down", "a", "b").returncode == 0
    assert not list((tmp_path / "homes").glob("*/.dapo-ray/*/env"))


def test_machines_may_share_their_home_and_a_port_be_in_use(run, tmp_path: Path) -> None:
    """Ray's client takes 10001, used or not, and a head that finds it taken, by the Ray of somebody else, ends."""
    with socket.socket() as other:
        other.bind(("", 0))
        taken = other.getsockname()[1]
        up = run("ray_up", "a", "b", SHARED="home", PORT=str(taken - 1), DOCTOR="0", FAULT="1")
    assert up.returncode == 0 and "the doctor has looked at nothing" in up.stdout, up.stderr
    home = tmp_path / "homes/home"
    client = Path(f"/proc/{(own(home, 'a') / 'pid').read_text().strip()}/cmdline").read_text()
    assert taken < int(re.findall(r"--ray-client-server-port=(\d+)", client)[0]) < taken + 50
    assert alive(home, "a") and alive(home, "b")
    assert (own(home, "a") / "pid").read_text() != (own(home, "b") / "pid").read_text()
    assert run("ray_down", "b", SHARED="home").returncode == 0
    assert alive(home, "a") and (own(home, "a") / "token").exists() and not alive(home, "b")
    assert run("ray_down", "a", SHARED="home").returncode == 0 and not alive(home, "a")


@pytest.mark.parametrize("reached", ["127.0.1.1", "2001:db8::1"], ids=["its own name", "IPv6"])
def test_the_heads_address_is_one_that_other_nodes_reach(run, tmp_path: Path, reached: str) -> None:
    assert run("ray_up", "a", "b", "--", *RUN, REACHED=reached, DOCTOR="0", FAULT="1").returncode == 0
    assert "--address=10.0.0.7:20379" in (tmp_path / "homes/b/started").read_text()
    assert not (tmp_path / "homes/a/examined").exists(), "it is switched off"


def test_the_number_of_a_process_that_is_gone_may_be_anothers(run, tmp_path: Path) -> None:
    """A machine that starts again gives numbers out anew, and leaves the file where it is."""
    folder = tmp_path / "homes/a/.dapo-ray/a"
    folder.mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        try:
            for script in ("ray_down", "ray_up"):
                (folder / "pid").write_text(f"{other.pid}\n")
                done = run(script, "a", ALIVE="1")
                assert done.returncode == 0 and other.poll() is None, done.stderr
        finally:
            other.kill()


def test_the_cloud_is_one_that_rays_launcher_takes() -> None:
    import ray
    from ray.scripts.scripts import start

    cloud = yaml.safe_load((ROOT / "launch/cloud.yaml").read_text())
    jsonschema.validate(cloud, json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text()))
    assert cloud["head_node_type"] in cloud["available_node_types"]
    assert cloud["available_node_types"]["gpu"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    known = {option for parameter in start.params for option in parameter.opts}
    for command in (cloud["head_start_ray_commands"][-1], cloud["worker_start_ray_commands"][-1]):
        assert "RAY_AUTH_MODE=token" in command and set(re.findall(r"--[\w-]+", command)) <= known
    assert "python -m dapo.leave --watch aws" in cloud["worker_start_ray_commands"][-2]
    assert any("docker/gpu.lock" in command for command in cloud["setup_commands"])
    assert "/home/ubuntu/.ray/auth_token" in cloud["file_mounts"]


def test_the_clouds_gpu_nodes_have_the_adapters_that_nccl_needs() -> None:
    """32 of EFA, each at a place of its own, as AWS' documentation has it for p5.48xlarge."""
    cloud = yaml.safe_load((ROOT / "launch/cloud.yaml").read_text())
    gpu = cloud["available_node_types"]["gpu"]["node_config"]
    assert gpu["InstanceType"] == "p5.48xlarge" and gpu["Placement"]["GroupName"]
    first, *others = gpu["NetworkInterfaces"]
    assert (first["NetworkCardIndex"], first["DeviceIndex"], first["InterfaceType"]) == (0, 0, "interface")
    places = [(one["NetworkCardIndex"], one["DeviceIndex"]) for one in others]
    assert places == [(0, 1), *((card, 0) for card in range(1, 32))]
    assert {one["InterfaceType"] for one in others} == {"efa-only"}
    assert not {"SubnetIds", "SecurityGroupIds"} & set(gpu), "Ray's launcher takes them from the interfaces alone"
    assert all(one["SubnetId"] and one["Groups"] for one in gpu["NetworkInterfaces"]), "and asks each for them"
    assert cloud["provider"]["use_internal_ips"], "EC2 gives several interfaces no public address"
    assert "ofi-nccl" in cloud["worker_start_ray_commands"][-1]
