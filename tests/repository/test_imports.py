"""Who may import whom: each file's own imports and, in fresh processes, what they load."""

import ast
import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from dapo.config.compose import compose
from dapo.sampling.draws import BufferState
from dapo.state.checkpoint import CheckpointStore
from dapo.state.driver_state import DriverState
from dapo.state.run_dir import claim_output_dir
from tests.support.source import tree

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("dapo", "workers") for path in (ROOT / folder).rglob("*.py"))
ROLES = (
    "dapo.workers.rollout",
    "dapo.workers.trajectories",
    "dapo.workers.reward",
    "dapo.workers.reward_model",
    "dapo.workers.judge",
    "dapo.workers.actor",
    "dapo.workers.weight_sync",
)
PARTS = tuple(f"dapo.workers.{part}" for part in ("judging", "placing", "scoring", "training", "turns", "weights"))
# The rooms of dapo/, from the ground up: a room imports rooms of lower floors only.
FLOORS = (
    ("types", "config", "ground", "answers", "advantage", "tiny", "smollm2"),
    ("loss", "pools", "sandbox"),
    ("algorithm",),
    ("data", "report"),
    ("rewards", "sampling", "turns"),
    ("trainer", "state", "evaluation"),
    ("driver", "results"),
    ("tools",),
    ("main_ppo", "api"),
)
ASKS = (
    ("dapo.main_ppo", "doctor"),
    ("dapo.tools.doctor", "plan"),
    ("dapo.tools.scale", "simulate"),
)  # a tool asked by something else
ON_RAY = ("dapo.tools.doctor.nodes", "dapo.tools.doctor.parity")  # parts of the doctor
COMPOSED = ("dapo.driver.run", "dapo.driver.fleet", "dapo.tools.bench", "dapo.tools.leave", *ON_RAY)
FLOOR = {f"dapo.{room}": number for number, rooms in enumerate(FLOORS) for room in rooms}
TENSORS = (
    "dapo.advantage",
    "dapo.loss",
    "dapo.algorithm.objective",
    "dapo.algorithm.batch",
    "dapo.algorithm.schedule",
    "dapo.algorithm.own.calls",
    "dapo.algorithm.own.soft_gate",
    "dapo.report.sinks.events",
    "dapo.tiny",
    "dapo.tools.doctor.network",
    "dapo.tools.doctor.software",
)
COMPUTE = {"ray", "vllm", "dapo.workers"}
HEAVY = {"torch", "transformers", "datasets", *COMPUTE}


def module_name(path: Path, root: Path = ROOT) -> str:
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    return f"dapo.{name}" if within(name, "workers") else name


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def driver_side(module: str) -> bool:
    return within(module, "dapo") and not within(module, "dapo.workers")


def room(module: str) -> str:
    return ".".join(module.split(".")[:2]) if driver_side(module) else ""


def floor(module: str) -> int:
    return FLOOR.get(room(module), len(FLOORS))


def tool(module: str) -> str:
    return module.split(".")[2] if module.startswith("dapo.tools.") else ""


def imports_of(source: str) -> set[str]:
    """Every module that the source imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def violations(name: str, source: str) -> list[str]:
    """What the file's own imports break, each with the rule."""
    imported = imports_of(source)
    ours = {module for module in imported if within(module, "dapo")}
    rules = {
        "nothing runs up": {
            module
            for module in ours
            if (there := room(module)) not in ("", "dapo", room(name))
            and FLOOR.get(there, 99) >= FLOOR.get(room(name), 99)
        },
        "nothing imports a tool": {
            module
            for module in ours
            if tool(module) not in ("", tool(name))
            and not any(within(name, who) and tool(module) == asked for who, asked in ASKS)
        },
        f"only {', '.join(COMPOSED)} know Ray, vLLM and workers": driver_side(name)
        and not within(name, *COMPOSED)
        and {module for module in imported if within(module, *COMPUTE)},
        "torch only where tensors are": driver_side(name)
        and not within(name, *TENSORS, "dapo.tools.bench")
        and {module for module in imported if within(module, "torch")},
        "roles do not import each other": name in ROLES
        and {module for module in ours if within(module, *ROLES) and not within(module, name)},
        "a part imports neither a role nor another part": within(name, *PARTS)
        and {
            module
            for module in ours
            if within(module, *ROLES, *(part for part in PARTS if not within(name, part)), "dapo.workers.cluster")
        },
        "workers do not know their conductor": within(name, "dapo.workers")
        and {module for module in ours if within(module, "dapo.driver", "dapo.main_ppo", "dapo.trainer")},
        "vLLM only in the engine's process": name
        not in (
            *(f"dapo.workers.engines.{part}" for part in ("worker", "extension", "scheduling")),
            "dapo.workers.judging.process",
            "dapo.workers.weights.receiver",
        )
        and {module for module in imported if within(module, "vllm")},
    }
    return [f"{rule}: {name} imports {', '.join(sorted(found))}" for rule, found in rules.items() if found]


def test_import_direction():
    assert [found for path in FILES for found in violations(module_name(path), path.read_text())] == []


def test_imports_inside_functions_and_by_name_are_seen():
    assert "only dapo.driver.run" in violations("dapo.trainer", "def f():\n    import ray")[0]
    assert "vLLM only in" in violations("dapo.workers.actor", "from vllm import AsyncLLM")[0]


def modules_in(*folders: str) -> list[str]:
    """Every module below these packages; a single file is itself."""
    return [module_name(path) for path in FILES if within(module_name(path), *folders)]


ALGORITHM = [
    *(m for m in modules_in("dapo") if m.count(".") == 1 and driver_side(m)),
    *(m for m in modules_in("dapo.algorithm", "dapo.driver") if m not in COMPOSED),
]
# name: modules that are loaded together in a fresh process; what must not come along.
LOADS = {
    "config": (modules_in("dapo.config", "dapo.types", "dapo.config.derived"), HEAVY),
    "entry": (["dapo.main_ppo"], HEAVY | {"pyarrow", "tensorboard", "dapo.driver.run"}),
    "algorithm": (ALGORITHM, COMPUTE | {"dapo.driver.run"}),
    "parts": (
        modules_in(
            *(
                "dapo.answers",
                "dapo.data",
                "dapo.sampling",
                "dapo.rewards",
                "dapo.state",
                "dapo.report",
                "dapo.report.store",
            ),
            *("dapo.evaluation", "dapo.results", "dapo.tools.replay", "dapo.ground"),
        ),
        HEAVY | {"dapo.driver.run", "tensorboard", "matplotlib"},
    ),
    "plan": (modules_in("dapo.tools.plan"), HEAVY | {"dapo.driver.run", "dapo.trainer"}),
    "simulate": (modules_in("dapo.tools.simulate"), HEAVY | {"dapo.driver.run", "dapo.trainer"}),
    "translate": (modules_in("dapo.tools.translate"), HEAVY | {"dapo.driver.run", "dapo.trainer"}),
    "compare": (modules_in("dapo.tools.compare"), HEAVY | {"dapo.driver.run", "dapo.trainer", "matplotlib"}),
    "doctor": (
        [m for m in modules_in("dapo.tools.doctor") if m not in ON_RAY],
        HEAVY | {"dapo.driver.run", "dapo.trainer"},
    ),
    "inspect": (modules_in("dapo.tools.inspect"), HEAVY | {"dapo.driver.run", "dapo.trainer", "dapo.config", "numpy"}),
    **{role: ([role], {"vllm", "dapo.driver.run", "dapo.trainer", *ROLES} - {role}) for role in ROLES},
}
MODELS = ("dapo.workers.reward_model", "dapo.workers.actor")
# What a name may load in any case and takes long: it is loaded once, and each name in a fork of its own.
BEFORE = (
    ([], ["inspect"]),
    (["hydra", "omegaconf"], ["config", "entry", "parts", "plan", "simulate", "translate", "compare", "doctor"]),
    (["torch", "transformers"], ["algorithm"]),
    (["ray"], [role for role in ROLES if role not in MODELS]),
    (["transformers.modeling_utils"], list(MODELS)),
)
PROGRAM = """
import importlib, json, os, sys
for before, names in json.loads(sys.argv[1]):
    for module in before:
        importlib.import_module(module)
    for name, modules in names.items():
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0, name
            continue
        for module in modules:
            importlib.import_module(module)
        print(json.dumps([name, *sys.modules]), flush=True)
        os._exit(0)
"""


def loaded(names: list[str], root: Path) -> dict[str, set[str]]:
    """What a process that has none of ours has loaded after it has imported the modules of a name, by name."""
    groups = [(before, {name: LOADS[name][0] for name in group if name in names}) for before, group in BEFORE]
    stages = [(before, group) for before, group in groups if group]
    command = [sys.executable, "-c", PROGRAM, json.dumps(stages)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: set(modules) for name, *modules in map(json.loads, done.stdout.splitlines())}


@pytest.mark.nightly
def test_what_a_fresh_process_loads():
    found = loaded(list(LOADS), ROOT)
    assert all(modules and set(modules) <= found[name] for name, (modules, _) in LOADS.items())
    heavy = {name: sorted(found[name] & banned) for name, (_, banned) in LOADS.items()}
    assert {name: modules for name, modules in heavy.items() if modules} == {}


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run with nothing left to train."""
    folder = tmp_path_factory.mktemp("run") / "out"
    cfg = compose([f"trainer.output_dir={folder}"], experiment="dapo_tiny")

    async def write(store: CheckpointStore) -> None:
        async with store.writing(cfg.trainer.total_steps) as directory:
            (directory / "weights").write_text("all of them")
            buffer = BufferState(retry=[], draws={}, tokens={}, rate=[1.0, 1.0])
            DriverState(version=cfg.trainer.total_steps, buffer=buffer).write(directory)

    with claim_output_dir(cfg.trainer.output_dir, cfg.checkpoint.resume, asdict(cfg)) as run_dir:
        run_dir.begin()
        asyncio.run(write(run_dir.store))
    return folder


AT_EXIT = """
import atexit, runpy, sys
atexit.register(lambda: print("loaded", *sorted(set(sys.modules) & {heavy}), file=sys.stderr))
module = sys.argv[1]
del sys.argv[1]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""

TINY = ["dapo.main_ppo", "+experiment=dapo_tiny"]


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        pytest.param(["dapo.main_ppo", "--help"], 0, "dapo", id="help"),
        pytest.param([*TINY, "--cfg", "job"], 0, "train_batch_size", id="cfg"),
        pytest.param(["dapo.main_ppo", "+experiment=dapo_tiny", "rolout.n=8"], 1, "did you mean", id="unknown key"),
        pytest.param(["dapo.main_ppo", "+experiment=dapo_tiny", "rollout.n=1"], 1, "`rollout.n` (1)", id="bad value"),
        pytest.param(
            [*TINY, "data.train_files=[pyproject.toml]", "trainer.output_dir={run}/../data"],
            *(1, "is neither .parquet"),
            id="bad data",
        ),
        pytest.param(
            ["dapo.main_ppo", "+experiment=dapo_tiny", "trainer.output_dir={run}"], 0, "complete: ", id="complete"
        ),
        pytest.param(["dapo.tools.plan", "+experiment=dapo_qwen32b"], 0, "GB", id="plan"),
    ],
)
def test_an_answer_that_needs_no_worker_loads_nothing_heavy(command, code, says, complete_run):
    program = AT_EXIT.format(heavy=HEAVY | {"tensorboard"} | (set() if code else {"pyarrow"}))
    arguments = [part.format(run=complete_run) for part in command]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr.splitlines()[-1].split()) == (code, ["loaded"]), done.stderr
    assert says in done.stdout + done.stderr


def test_the_fork_server_is_a_clean_process():
    """Neither Ray nor torch nor a thread, which a fork would break."""
    program = (
        "import sys, threading; import dapo.rewards.calling.fork_server, dapo.rewards.math_verify; "
        "print(sorted({'ray', 'torch', 'transformers', 'asyncio'} & set(sys.modules)), threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "[] 1\n", done.stderr
