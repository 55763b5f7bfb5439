"""Planted faults: for each there is one line that names it, with a figure, a remedy and the node's name."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.config.compose import compose
from dapo.config.paths import resolve_path
from dapo.tools.doctor import checks, limits, machines, network, storage, subject
from dapo.tools.doctor.checks import CHECKS, check_machine, diagnose
from dapo.tools.doctor.machines import Silent, ThisMachine
from dapo.tools.doctor.network import Measured, bytes_of, judged, network_of
from dapo.tools.doctor.subject import FAULT, OK, WARNING, Finding, Subject
from tests.support.rewards.judge_server import KEY, judge_server

BASE = "pkg://dapo.tiny/base"
GB = 10**9
Plant = Callable[[Path, pytest.MonkeyPatch], list[str]]


def doctor(*overrides: str, only: str, nodes: Any = None) -> Finding:
    run = Subject(compose(overrides, "dapo_tiny", plan=True))
    [outcome] = diagnose(run, nodes or ThisMachine(), [check for check in CHECKS if check.name == only])
    return outcome.finding


def assert_says(found: Finding, level: str, parts: list[str]) -> None:
    text = f"{found.found}; {found.remedy}"
    assert found.level == level and [part for part in parts if part not in text] == [], found


def data(*rows: tuple[str, str]) -> Plant:
    """Sixteen sums, and these rows."""

    def plant(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
        questions = [*((f"{number}+1=", str(number + 1)) for number in range(16)), *rows]
        table = [
            {
                "data_source": "mine",
                "prompt": [{"role": "user", "content": asked}],
                "reward_model": {"ground_truth": truth},
            }
            for asked, truth in questions
        ]
        pq.write_table(pa.Table.from_pylist(table), folder / "data.parquet")
        return [f"data.train_files=[{folder / 'data.parquet'}]", "data.val_files=[]"]

    return plant


def model(change: Callable[[Path], None]) -> Plant:
    """A copy of the base model, changed."""

    def plant(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
        shutil.copytree(resolve_path(BASE), folder / "model")
        change(folder / "model")
        return [f"model.path={folder / 'model'}"]

    return plant


def cut_off(path: Path) -> None:
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-4])


def template(change: Callable[[str], str]) -> Plant:
    def rewrite(path: Path) -> None:
        file = path / "chat_template.jinja"
        file.write_text(change(file.read_text()))

    return model(rewrite)


def trained_on(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    train, _ = data()(folder, patch)
    return [train, train.replace("train", "val", 1)]


def without_vocabulary(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()


def other_tokenizer(path: Path) -> None:
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"vocab_size": 200}))


def other_model(path: Path) -> None:
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"vocab_size": 10}))


def arguments(*overrides: str) -> Plant:
    return lambda folder, patch: [*overrides]


def patched(module: Any, name: str, value: Any) -> Plant:
    def plant(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
        patch.setattr(module, name, value)
        return []

    return plant


def variables(**values: str) -> Plant:
    def plant(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
        for name, value in values.items():
            patch.setenv(name, value)
        return []

    return plant


def no_directory(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    (folder / "file").write_text("")
    return [f"trainer.output_dir={folder / 'file' / 'run'}"]


def limit(name: int, value: int) -> Plant:
    """A limit of the operating system."""
    own = resource.getrlimit
    return patched(limits.resource, "getrlimit", lambda kind: (value, value) if kind == name else own(kind))


def another_lock(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    lines = (subject.LOCKS[0] / "cpu.lock").read_text().replace("ray==2", "ray==1")
    (folder / "cpu.lock").write_text(lines)
    patch.setattr(subject, "LOCKS", (folder,))
    return []


def disk(total: int, free: int) -> Plant:
    usage = SimpleNamespace(total=total, free=free, used=total - free)
    return patched(limits.shutil, "disk_usage", lambda path: usage)


ON_GPUS = ("trainer.device=cuda", "model.dtype=bfloat16", "actor.num_workers=1", "rollout.num_engines=1")
NEVER_DELETED = ("checkpoint.keep=0", "checkpoint.every=1", "trainer.total_steps=100000000")
LONG = ("logging.max_store_bytes=0", "trainer.total_steps=100000000")
PLANTED = [
    ("packages", another_lock, FAULT, ["ray 2.", "lock: 1.", "pip install --no-deps -r docker/cpu.lock"]),
    ("GPUs", arguments("trainer.device=cuda", "model.dtype=bfloat16"), FAULT, ["no GPU", "trainer.device=cpu"]),
    ("open files", limit(resource.RLIMIT_NOFILE, 256), WARNING, ["256 open files", "ulimit -n"]),
    ("processes", limit(resource.RLIMIT_NPROC, 500), WARNING, ["`ulimit -u`"]),
    ("shared memory", disk(64 << 20, 64 << 20), WARNING, ["67.11 MB", "shm-size"]),
    ("temporary disk", disk(100 * GB, GB), WARNING, ["1.00 GB", "RAY_TMPDIR"]),
    ("settings", model(cut_off), FAULT, ["model.safetensors", "cut off"]),
    (
        "files",
        arguments("reward.functions=[{path: /no/such.py}]"),
        FAULT,
        ["functions[0].path` (/no/such.py)", "every node"],
    ),
    ("files", arguments("rollout.function.path=/no/such.py"), FAULT, ["`rollout.function.path` (/no/such.py)", "node"]),
    ("free disk", arguments(*NEVER_DELETED), FAULT, ["checkpoints 1.47 PB", "keep"]),
    ("free disk", arguments(*NEVER_DELETED, "trainer.only=rollout"), WARNING, ["checkpoints 0 B", "batches 12.90 TB"]),
    ("free disk", arguments(*LONG), WARNING, ["samples.sqlite 23.96 TB", "`logging.max_store_bytes`"]),
    ("disk speed", no_directory, FAULT, ["cannot be written to", "Not a directory"]),
    ("authentication", variables(RAY_ADDRESS="10.0.0.1:6379"), WARNING, ["RAY_AUTH_MODE", "get-auth-token"]),
    ("authentication", variables(RAY_AUTH_MODE="disabled"), WARNING, ["every user of this machine", "unset"]),
    ("authentication", variables(RAY_AUTH_MODE="token"), OK, ["asks for a token"]),
    (
        "all-reduce",
        patched(machines.sys, "executable", "/bin/false"),
        FAULT,
        ["2 ranks", "exit code 1", "SOCKET_IFNAME"],
    ),
    ("settings", arguments("reward.functions=[{path: /no/such.py}]"), FAULT, ["/no/such.py"]),
    ("data", model(lambda path: (path / "tokenizer.json").write_text("{")), FAULT, ["does not load"]),
    ("data", model(without_vocabulary), FAULT, ["makes no tokens of text", "download the model again"]),
    ("data", model(other_tokenizer), WARNING, ["264 tokens", "200 rows"]),
    ("data", model(other_model), FAULT, ["gives token", "is 10"]),
    (
        "data",
        model(lambda path: (path / "chat_template.jinja").unlink()),
        FAULT,
        ["no chat template", "chat_template.jinja"],
    ),
    ("data", template(lambda text: "{{ strftime_now('%d %b') }}" + text), WARNING, ["today's date"]),
    ("data", template(lambda text: "{{ messages[0]['role'] }}"), FAULT, ["leaves out what the user says"]),
    ("data", template(lambda text: "{{ messages[0]['content'] }}"), WARNING, ["add_generation_prompt"]),
    (
        "data",
        arguments("data.chat_template_kwargs={enable_thinkng: false}"),
        FAULT,
        ["enable_thinkng` (False)"],
    ),
    ("data", arguments("data.train_files=[/no/such.parquet]"), FAULT, ["data.train_files", "/no/such.parquet"]),
    ("data", data(("1+1=", "2"), ("2+1=", "3")), OK, ["18 rows, 2 duplicates"]),
    ("data", data(("1+1=", "3"), ("16+1=", "17")), OK, ["18 rows, ", "1 contradictory"]),
    ("data", data(*[(f"{number}+1=", "0") for number in range(3)]), FAULT, ["3 of 16", "contradict", "'0'"]),
    ("data", trained_on, WARNING, ["16 held-out"]),
    ("data", data(("7+7=", "None")), WARNING, ["16 of 17 reference", "'None'", "dapo.rewards.selfcheck"]),
    ("plan", arguments("plan.gpu_memory_bytes=1e9"), FAULT, ["1.00 GB", "need"]),
    ("plan", patched(limits.psutil, "virtual_memory", lambda: SimpleNamespace(total=2 * GB)), FAULT, ["2.00 GB"]),
]


@pytest.mark.parametrize(
    ("name", "plant", "level", "parts"), PLANTED, ids=[f"{row[0]}-{n}" for n, row in enumerate(PLANTED)]
)
def test_a_planted_fault_is_found(
    name: str, plant: Plant, level: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [f"trainer.output_dir={tmp_path / 'out'}", *plant(tmp_path, monkeypatch)]
    assert_says(doctor(*overrides, only=name), level, parts)


def test_an_output_directory_in_the_home_is_the_one_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    for name in ("free disk", "disk speed"):
        found = doctor("trainer.output_dir='~/run'", only=name)
        assert str(home) in found.found and str(here) not in found.found and found.level == OK


def test_a_run_on_gpus_needs_more_of_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little is a warning on CPUs, where the tiny run comes through, and a fault on GPUs."""
    disk(64 << 20, 64 << 20)(tmp_path, monkeypatch)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (2000, 2000))
    monkeypatch.setattr(limits, "_own_threads", lambda: 100)
    cfg = compose([f"trainer.output_dir={tmp_path / 'out'}"], "dapo_tiny")
    for gpus, level in ((False, WARNING), (True, FAULT)):
        asked = subject.question(cfg, joined=False, driver=True, gpus=gpus)
        for look in (limits.open_files, limits.processes, limits.shared_memory):
            assert look(asked).level == level, look.__name__


def test_ray_raises_the_limit_of_open_files_of_a_driver_and_not_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (1024, 1 << 20))
    cfg = compose([], "dapo_tiny")
    for driver, level in ((True, OK), (False, FAULT)):
        asked = subject.question(cfg, joined=True, driver=driver, gpus=True)
        assert limits.open_files(asked).level == level


class OtherNodes(ThisMachine):
    """Three nodes: the second does what is planted."""

    names = ["a", "b", "c"]

    def __init__(self, planted: Callable[..., Any]) -> None:
        self._planted = planted

    def ask(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        return self._planted(call, *args) if name == "b" else call(*args)

    def ask_all(self, call: Callable[..., Any], *args: Any) -> dict[str, Any]:
        return {name: self.ask(name, call, *args) for name in self.names}

    def gpus(self) -> int:
        return 0

    def having_gpus(self) -> int:
        return 0

    def all_reduce(self, device: str) -> list[Any]:
        return [Measured(0.1), Silent("connection refused"), Measured(0.1)]


def of_its_owner_alone(call: Any, folder: str, name: str) -> Any:
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    return call(folder, name)


DISK = "shared directory"
ACROSS = [
    ("clock", lambda call, *args: call(*args) + 90, FAULT, ["+90.0", "at b", "chrony"]),
    ("clock", lambda call, *args: call(*args) + 0.5, OK, ["3 nodes"]),
    (DISK, lambda *_: Silent("gone"), FAULT, ["1 of 3 nodes: b"]),
    (DISK, of_its_owner_alone, OK, ["the same on 3 nodes"]),
    ("packages", lambda *_: Silent("no answer within 120 s"), FAULT, ["1 of 3 nodes (b)", "120 s"]),
    ("all-reduce", lambda *_: None, FAULT, ["gloo, 3 ranks", "connection refused", "GLOO_SOCKET_IFNAME"]),
]


@pytest.mark.parametrize(("name", "planted", "level", "parts"), ACROSS, ids=[f"{row[0]}-{row[2]}" for row in ACROSS])
def test_what_is_wrong_on_another_node_is_told_with_its_name(
    name: str, planted: Any, level: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SEEN_S", 0.2)
    found = doctor(f"trainer.output_dir={tmp_path / 'out'}", only=name, nodes=OtherNodes(planted))
    assert_says(found, level, parts)
    assert not (tmp_path / "out").exists(), "nothing stays behind"


@pytest.mark.parametrize(
    ("overrides", "gpus", "level", "parts"),
    [
        ([], 8, OK, ["needs 8 GPUs; 8 of 8 are free, on 1 node of 8 GPUs"]),
        ([], 4, FAULT, ["asked for 8 GPUs", "has 4", "add 1 node of 4 GPUs"]),
        (["--rollout-only", "rollout.num_engines=8"], 8, OK, ["needs 8 GPUs; 8 of 8 are free"]),
        (["rollout.node_labels={pool: a}"], 8, FAULT, ["`rollout.node_labels` (pool=a)", "no labels"]),
    ],
    ids=["enough", "too-few", "half-a-run", "labels"],
)
def test_gpus_that_are_asked_for_are_compared_with_what_is_there(
    overrides: list[str], gpus: int, level: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThisMachine, "gpus", lambda self: gpus)
    run = Subject(compose(["+experiment=dapo_qwen7b", "trainer.device=cuda", *overrides], plan=True))
    assert_says(checks.placement(run, ThisMachine()), level, parts)


GIB = 1 << 30
OTHERS, ALONE = 16, 8  # GPUs of the cluster, where the node has eight


@pytest.mark.parametrize(
    ("lacks", "cluster_gpus", "level", "parts"),
    [
        pytest.param("library", OTHERS, FAULT, ["libibverbs.so.1 cannot be", "ibverbs-providers", "TCP"], id="library"),
        pytest.param("library", ALONE, OK, ["no GPUs on two nodes"], id="library, one node"),
        pytest.param("files", OTHERS, FAULT, ["no {files}", "--device", "launch/kubernetes/rdma"], id="files"),
        pytest.param("locked", OTHERS, FAULT, ["8.39 MB", "ulimit -l unlimited", "LimitMEMLOCK=infinity"], id="locked"),
        pytest.param("locked, but for IPC_LOCK", OTHERS, OK, ["mlx5_0"], id="a capability"),
        pytest.param("nothing", OTHERS, OK, ["mlx5_0, mlx5_1"], id="well"),
        pytest.param("devices", OTHERS, OK, ["no RDMA device"], id="no devices"),
        pytest.param("library, and is told to do without", OTHERS, OK, ["no RDMA device"], id="not wanted"),
        pytest.param("library and GPUs", OTHERS, OK, ["no GPUs on two nodes"], id="a head"),
    ],
)
def test_what_rdma_between_nodes_needs(
    lacks: str, cluster_gpus: int, level: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, files, status = tmp_path / "sys", tmp_path / "dev", tmp_path / "status"
    for folder in () if "devices" in lacks else (devices / "mlx5_0", devices / "mlx5_1"):
        folder.mkdir(parents=True)
    if "files" not in lacks:
        files.mkdir()
    status.write_text(f"Name:\tx\nCapBnd:\t4000\nCapEff:\t{4000 if 'IPC_LOCK' in lacks else 0:016}\n")
    for name, value in {"DEVICES": devices, "FILES": files, "STATUS": status}.items():
        monkeypatch.setattr(network, name, value)
    monkeypatch.setattr(network, "seen_gpus", lambda: [] if "GPUs" in lacks else [None] * 8)
    monkeypatch.setattr(network.ctypes, "CDLL", lambda name: open(tmp_path / name) if "library" in lacks else None)
    locked = 8 << 20 if "locked" in lacks else 64 * GIB
    limit(resource.RLIMIT_MEMLOCK, locked)(tmp_path, monkeypatch)
    if "told" in lacks:
        monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    asked = subject.question(compose([], "dapo_tiny"), joined=True, driver=False, gpus=True, cluster_gpus=cluster_gpus)
    assert_says(network.rdma(asked), level, [part.format(files=files) for part in parts])


@pytest.mark.parametrize(
    ("gigabytes", "using", "devices", "machines", "level", "parts"),
    [
        pytest.param(3, "Socket", (), 16, FAULT, ["by Socket", "400.00 GB/s", "network_bandwidth"], id="TCP"),
        pytest.param(100, "IB", ("mlx5_0",), 16, WARNING, ["100.00 GB/s by IB"], id="slow"),
        pytest.param(350, "IB", ("mlx5_0",), 16, OK, ["350.00 GB/s by IB"], id="well"),
        pytest.param(350, "Socket", ("mlx5_0",), 16, FAULT, ["TCP beside mlx5_0"], id="shunned"),
        pytest.param(5.5, "Socket", ("mlx5_0",), 1, OK, ["128 ranks on 1 machine"], id="one machine"),
    ],
)
def test_a_network_is_judged_by_what_all_gpus_of_a_node_carry(
    gigabytes: float, using: str, devices: tuple[str, ...], machines: int, level: str, parts: list[str]
) -> None:
    world = 128
    seconds = 2 * (world - 1) / world * bytes_of("cuda") / (gigabytes * GB)
    assert_says(judged([Measured(seconds, using, devices)] * world, "cuda", machines, 50e9), level, parts)


def test_nccls_log_names_the_network_that_it_uses() -> None:
    log = "n:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\nn:1:2 [0] NCCL INFO Using network {}\nn:1:2 INFO end\n"
    assert [network_of(log.format(name)) for name in ("Socket", "AWS Libfabric")] == ["Socket", "AWS Libfabric"]
    assert network_of("") == ""


JUDGED = "reward.functions=[{path: math}, {path: judge}]"
JUDGES = ["reward.judge.model=m", "reward.judge.prompt='{ground_truth}|{response}'"]


@pytest.mark.parametrize(
    ("options", "level", "parts"),
    [
        pytest.param({}, OK, ["answers", "a right sum 1"], id="well"),
        pytest.param({"always": "500"}, WARNING, ["answered 500"], id="busy"),
        pytest.param({"always": "no score"}, WARNING, ["has no score"], id="no score"),
        pytest.param({"always": "silent"}, FAULT, ["no answer within 0.5 s", "reward.remote.call_t"], id="late"),
        pytest.param({"key": KEY}, FAULT, ["answered 401", "reward.judge.key_variable"], id="without the key"),
    ],
)
def test_a_judge_with_an_address_is_asked(options: dict[str, str], level: str, parts: list[str]) -> None:
    with judge_server(**options) as server:
        given = [f"reward.judge.url={server.url}", *JUDGES, "reward.remote.call_timeout_s=0.5"]
        assert_says(doctor(JUDGED, *given, only="judge"), level, parts)
        asked = sum(server.seen.values())
        assert asked == (0 if "key" in options else 1)
        for others in (["reward.functions=[{path: math}]"], [JUDGED, "reward.judge.key_variable=NO_SUCH_ONE"]):
            found = doctor(*given, *others, only="judge")
            assert found == Finding(OK, "no judge with an address of its own is asked")
        assert sum(server.seen.values()) == asked


def test_nobody_at_the_address_of_a_source_ends_the_run_before_a_worker_starts() -> None:
    source = "data.sources=[{name: a, files: [b.jsonl], functions: [{path: judge}]}]"
    cfg = compose(["data.train_files=[]", source, "reward.judge.url=http://127.0.0.1:1/v1", *JUDGES], "dapo_tiny")
    with pytest.raises(
        ValueError, match=r"(?s)judge: the judge at http://127.0.0.1:1/v1 .*ConnectError.*preflight=false"
    ):
        check_machine(cfg, lambda line: None)
