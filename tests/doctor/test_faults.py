"""Planted faults: for each there is one line that names it, with a figure and a remedy."""

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
from dapo.doctor import question
from dapo.doctor.checked import limits, software
from dapo.doctor.checks import CHECKS, diagnose
from dapo.doctor.finding import FAULT, OK, SKIPPED, WARNING, Finding
from dapo.doctor.machines import ThisMachine
from dapo.doctor.subject import Subject

BASE = "pkg://dapo.tiny/base"
GB = 10**9
Plant = Callable[[Path, pytest.MonkeyPatch], list[str]]


def doctor(*overrides: str, only: str) -> Finding:
    """What one check says, with those that it needs."""
    needed = {only}
    for check in reversed(CHECKS):
        needed |= set(check.needs) if check.name in needed else set()
    subject = Subject(compose(overrides, "dapo_tiny", plan=True))
    checks = [check for check in CHECKS if check.name in needed]
    return {outcome.name: outcome.finding for outcome in diagnose(subject, ThisMachine(), checks)}[only]


def row(question: str, truth: str) -> dict[str, Any]:
    return {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": truth, "style": "rule"},
    }


def data(*rows: tuple[str, str]) -> Callable[[Path, pytest.MonkeyPatch], list[str]]:
    """Sixteen sums, and these rows."""

    def plant(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
        sums = [(f"{number}+1=", str(number + 1)) for number in range(16)]
        pq.write_table(pa.Table.from_pylist([row(*each) for each in [*sums, *rows]]), folder / "data.parquet")
        return [f"data.train_files=[{folder / 'data.parquet'}]"]

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


def shard_missing(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model-2-of-2.safetensors"}}')


def template(change: Callable[[str], str]) -> Plant:
    def rewrite(path: Path) -> None:
        settings = json.loads((path / "tokenizer_config.json").read_text())
        file = path / "chat_template.jinja"
        text = file.read_text() if file.exists() else settings.pop("chat_template")
        file.write_text(change(text))
        (path / "tokenizer_config.json").write_text(json.dumps(settings))

    return model(rewrite)


def without_template(path: Path) -> None:
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").unlink(missing_ok=True)


def trained_on(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    [train] = data()(folder, patch)
    return [train, train.replace("train", "val", 1)]


def without_vocabulary(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()


def other_tokenizer(path: Path) -> None:
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"vocab_size": 200}))


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


def open_token(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    (folder / "token").write_text("0" * 64)
    (folder / "token").chmod(0o644)
    return variables(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(folder / "token"))(folder, patch)


def no_directory(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    (folder / "file").write_text("")
    return [f"trainer.output_dir={folder / 'file' / 'run'}"]


def limit(name: int, value: int) -> Plant:
    """A limit of the operating system, of this process and those that it starts."""

    def plant(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
        own = resource.getrlimit
        patch.setattr(limits.resource, "getrlimit", lambda kind: (value, value) if kind == name else own(kind))
        return []

    return plant


def another_lock(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    lines = (question.LOCKS[0] / "cpu.lock").read_text().replace("ray==2", "ray==1")
    (folder / "cpu.lock").write_text(lines)
    patch.setattr(question, "LOCKS", (folder,))
    return []


def small(total: int, free: int) -> Callable[[Any], SimpleNamespace]:
    return lambda path: SimpleNamespace(total=total, free=free, used=total - free)


def disk(total: int, free: int) -> Plant:
    return patched(limits.shutil, "disk_usage", small(total, free))


def expandable(name: str, *overrides: str) -> Plant:
    """A setting of torch's allocator that ranks inherit."""

    def plant(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
        patch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
        return [*overrides]

    return plant


def combined(*plants: Plant) -> Plant:
    return lambda folder, patch: [override for plant in plants for override in plant(folder, patch)]


ON_GPUS = ("trainer.device=cuda", "model.dtype=bfloat16", "actor.num_workers=1", "rollout.num_engines=1")
APART = (*ON_GPUS, "trainer.colocate=none")
TURNS, LENT = (*ON_GPUS, "trainer.colocate=time"), (*ON_GPUS, "trainer.colocate=lend")
NEVER_DELETED = arguments("checkpoint.keep=0", "checkpoint.every=1", "trainer.total_steps=100000000")
PLANTED = [
    ("python", patched(software.sys, "version_info", (3, 13, 1)), FAULT, ["3.13.1", "3.11 or 3.12"]),
    ("packages", another_lock, FAULT, ["ray 2.", "lock: 1.", "pip install --no-deps -r docker/cpu.lock"]),
    ("libraries", patched(software.ctypes, "CDLL", lambda name: open("/no/such")), FAULT, ["libnuma", "apt-get"]),
    ("libraries", patched(question, "_version", lambda name: "0.32.0"), FAULT, ["docker/gpu.lock", "Dockerfile.cpu"]),
    ("GPUs", arguments("trainer.device=cuda", "model.dtype=bfloat16"), FAULT, ["no GPU", "trainer.device=cpu"]),
    ("allocator", expandable("PYTORCH_CUDA_ALLOC_CONF", *TURNS), FAULT, ["CUDA_ALLOC_CONF", "ipc", "every node"]),
    ("allocator", expandable("PYTORCH_ALLOC_CONF", *LENT), FAULT, ["PYTORCH_ALLOC_CONF (max", "ipc", "leave"]),
    ("allocator", expandable("PYTORCH_ALLOC_CONF", *APART), OK, ["no memory is shared"]),
    ("allocator", expandable("PYTORCH_ALLOC_CONF", *TURNS, "trainer.only=rollout"), OK, ["no memory is shared"]),
    ("allocator", expandable("PYTORCH_ALLOC_CONF"), OK, ["no memory is shared"]),
    ("allocator", arguments(*TURNS), OK, ["expandable segments are off"]),
    ("open files", limit(resource.RLIMIT_NOFILE, 256), FAULT, ["256 open files", "ulimit -n"]),
    ("open files", limit(resource.RLIMIT_NOFILE, 1024), WARNING, ["1024 open files", "ulimit -n"]),
    ("processes", limit(resource.RLIMIT_NPROC, 500), FAULT, ["of 500", "`ulimit -u`"]),
    ("shared memory", disk(64 << 20, 64 << 20), WARNING, ["67.11 MB", "shm-size"]),
    ("temporary disk", disk(100 * GB, GB // 4), FAULT, ["250.00 MB", "RAY_TMPDIR"]),
    ("temporary disk", disk(20 * GB, GB), WARNING, ["1.00 GB", "RAY_TMPDIR"]),
    ("temporary disk", disk(100 * GB, 4 * GB), WARNING, ["95%", "RAY_TMPDIR"]),
    ("model", model(cut_off), FAULT, ["model.safetensors", "cut off"]),
    ("model", model(shard_missing), FAULT, ["model-2-of-2.safetensors is missing"]),
    ("model", arguments("model.path=no-such-owner/no-such-model"), FAULT, ["HF_HUB_OFFLINE", "hf download"]),
    ("files", arguments("reward.functions=[{path: /no/such.py}]"), FAULT, ["functions[0].path` (/no/such.py)", "node"]),
    ("files", arguments("rollout.function.path=/no/such.py"), FAULT, ["`rollout.function.path` (/no/such.py)", "node"]),
    ("free disk", NEVER_DELETED, FAULT, ["100000002 checkpoints of 14.73 MB need 1.47 PB", "keep"]),
    ("free disk", combined(NEVER_DELETED, arguments("trainer.only=rollout")), OK, ["writes no weights"]),
    ("disk speed", no_directory, FAULT, ["cannot be written to", "Not a directory"]),
    ("authentication", open_token, FAULT, ["mode 644", "chmod 600"]),
    ("authentication", variables(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH="/no/such"), FAULT, ["/no/such", "umask"]),
    ("authentication", variables(RAY_ADDRESS="10.0.0.1:6379"), WARNING, ["RAY_AUTH_MODE", "get-auth-token"]),
    ("authentication", variables(RAY_AUTH_MODE="disabled"), WARNING, ["every user of this machine", "unset"]),
    ("authentication", variables(), OK, ["on loopback", "this run's own"]),
    ("authentication", variables(RAY_AUTH_MODE="token"), OK, ["on loopback", "this run's own"]),
    ("all-reduce", variables(GLOO_SOCKET_IFNAME="none0"), FAULT, ["none0", "GLOO_SOCKET_IFNAME"]),
    ("settings", arguments("reward.functions=[{path: /no/such.py}]"), FAULT, ["/no/such.py"]),
    ("tokenizer", model(lambda path: (path / "tokenizer.json").write_text("{")), FAULT, ["does not load"]),
    ("tokenizer", model(without_vocabulary), FAULT, ["makes no tokens of text", "download the model again"]),
    ("tokenizer", model(other_tokenizer), FAULT, ["264 tokens", "200 rows"]),
    ("chat template", model(without_template), FAULT, ["no chat template", "chat_template.jinja"]),
    ("chat template", template(lambda text: "{{ strftime_now('%d %b') }}" + text), WARNING, ["today's date"]),
    ("chat template", template(lambda text: "{{ messages[0]['role'] }}"), FAULT, ["leaves out what the user says"]),
    ("chat template", template(lambda text: "{{ messages[0]['content'] }}"), WARNING, ["add_generation_prompt"]),
    (
        "chat template",
        arguments("data.chat_template_kwargs={enable_thinkng: false}"),
        FAULT,
        ["`data.chat_template_kwargs.enable_thinkng` (False)", "leave it out"],
    ),
    ("prompts", arguments("data.train_files=[/no/such.parquet]"), FAULT, ["data.train_files", "/no/such.parquet"]),
    ("prompts", data(("1+1=", "2"), ("2+1=", "3")), WARNING, ["16 prompts of 18 rows", "2 rows repeat"]),
    ("prompts", data(("1+1=", "3")), WARNING, ["1 prompts have ground truths that disagree"]),
    ("prompts", data(*[(f"{number}+1=", "0") for number in range(3)]), FAULT, ["3 of 16", "contradict", "'0'"]),
    ("held-out", trained_on, WARNING, ["16 held-out"]),
    ("verifier", data(("7+7=", "None")), FAULT, ["16 of 17 reference", "'None'", "dapo.rewards.selfcheck"]),
    ("plan", arguments("plan.gpu_memory_bytes=1e9"), FAULT, ["1.00 GB", "need"]),
    ("plan", patched(limits.psutil, "virtual_memory", lambda: SimpleNamespace(total=2 * GB)), FAULT, ["2.00 GB"]),
]  # fmt: skip
IDS = [f"{one[0]}-{number}" for number, one in enumerate(PLANTED)]


@pytest.mark.parametrize(("name", "plant", "level", "parts"), PLANTED, ids=IDS)
def test_a_planted_fault_is_found(
    name: str, plant: Plant, level: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [f"trainer.output_dir={tmp_path / 'out'}", *plant(tmp_path, monkeypatch)]
    found = doctor(*overrides, only=name)
    assert found.level == level, found
    text = f"{found.found}; {found.remedy}"
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize("name", ["free disk", "disk speed"])
def test_an_output_directory_in_the_home_is_the_one_of_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    found = doctor("trainer.output_dir='~/run'", only=name)
    assert str(home) in found.found and str(here) not in found.found and found.level == OK


def test_what_needs_a_faulty_check_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cause is one fault."""
    subject = Subject(compose(model(cut_off)(tmp_path, monkeypatch), "dapo_tiny", plan=True))
    names = ("model", "tokenizer", "chat template", "prompts", "verifier", "plan")
    checks = [check for check in CHECKS if check.name in names]
    levels = [outcome.finding.level for outcome in diagnose(subject, ThisMachine(), checks)]
    assert levels == [FAULT, SKIPPED, SKIPPED, SKIPPED, SKIPPED, OK]


def test_a_run_on_gpus_needs_more_of_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little is a warning on CPUs, where the tiny run comes through, and a fault on GPUs."""
    monkeypatch.setattr(limits.shutil, "disk_usage", small(64 << 20, 64 << 20))
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (2000, 2000))
    monkeypatch.setattr(limits, "_own_threads", lambda: 100)
    cfg = compose([f"trainer.output_dir={tmp_path / 'out'}"], "dapo_tiny")
    for gpus, level in ((False, WARNING), (True, FAULT)):
        asked = question.question(cfg, joined=False, driver=True, gpus=gpus)
        for look in (limits.open_files, limits.processes, limits.shared_memory):
            assert look(asked).level == level, look.__name__


def test_ray_raises_the_limit_of_open_files_of_a_driver_and_not_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (1024, 1 << 20))
    cfg = compose([], "dapo_tiny")
    for driver, level in ((True, OK), (False, FAULT)):
        asked = question.question(cfg, joined=True, driver=driver, gpus=True)
        assert limits.open_files(asked).level == level
