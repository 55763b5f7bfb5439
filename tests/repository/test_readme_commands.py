"""Every command that a README names is run by a test at its smallest size, and its arguments are accepted."""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from dapo.ablation import __main__ as ablation
from dapo.compare import __main__ as compare
from dapo.config.compose import compose
from dapo.inspect import __main__ as inspect
from dapo.replay import __main__ as replay
from dapo.simulate import __main__ as simulate

ROOT = Path(__file__).resolve().parents[2]
READMES = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "*README.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
)
STARTS = (
    "python -m dapo",
    "bash ",
    "pytest ",
    "sbatch ",
    "scancel ",
    "ray ",
    "kubectl ",
    "python launch/",
    "docker ",
    ".venv/bin/",
    ".ci/",
)
HAND = "by hand: "
RUNTIME_ENV = "tests/launch/test_launch.py::test_runtime_env_is_one_that_ray_takes_and_leaves_our_code_in"
REPLAY = "tests/replay/test_again.py::"
TIMELINE = "tests/inspect/test_timeline.py::test_the_terminal_and_the_page_show_the_slowest_step_first"
RAY_UP = "tests/launch/test_ray.py::test_a_cluster_comes_up_under_a_private_token_and_goes"
CLOUD = "tests/launch/test_ray.py::test_the_cloud_is_one_that_rays_launcher_takes"
KUBERAY = "tests/launch/test_kubernetes.py::test_the_readme_asks_for_what_the_manifests_make"
SLURM = "tests/launch/test_slurm.py::test_a_job_ends_as_its_driver_does"
OWN_LOSS = "tests/end_to_end/test_own_loss.py::test_the_example_of_the_readme_trains"
TURNS = "tests/end_to_end/test_turns_of_functions.py::test_two_turns_train"
UPDATES = "tests/bench/training/test_actor.py"
LOGPROBS = f"{UPDATES}::test_time_of_log_probabilities"

# Beginning of a command: the test that runs it, or who does. The first that fits counts.
RUN_BY = {
    r"bash launch/quickstart\.sh": "tests/launch/test_install.py::test_quickstart_starts_the_main_job_from_any_folder",
    r"bash launch/test\.sh": "tests/launch/test_install.py::test_test_command_ends_with_pytest_and_hides_no_failure",
    r"bash launch/install\.sh": "tests/launch/test_install.py::test_install_is_idempotent_and_follows_the_lock",
    r"\.ci/run": "tests/launch/test_launch.py::test_shellcheck_finds_nothing",
    r"sbatch (--\S+ )*launch/slurm/train\.sbatch": SLURM,
    r"sbatch launch/slurm/eval\.sbatch": SLURM,
    r"scancel ": "tests/launch/test_slurm.py::test_a_signal_saves_and_queues_the_job_again",
    r"ray job submit .*runtime_env\.yaml": RUNTIME_ENV,
    r"bash launch/ray_(up|down)\.sh": RAY_UP,
    r"ray (up|exec|attach|down)( --tmux)? launch/cloud\.yaml": CLOUD,
    r"ray (up|start|start --labels)$|ray job (stop|logs)\b|docker (stop|logs)\b": HAND
    + "a program of others, named in passing",
    r"ray get-auth-token": HAND + "writes to the home folder",
    r"kubectl create secret": HAND + "needs Kubernetes",
    r"kubectl (get|logs|port-forward|exec|cp) ": KUBERAY,
    r"kubectl ": "tests/launch/test_kubernetes.py::test_what_kustomize_makes_of_it",
    r"python launch/fetch\.py": "tests/launch/test_fetch.py::test_a_model_and_its_data_come_whole_and_are_named",
    r"docker compose ": "tests/launch/test_docker.py::test_compose_starts_ray_with_options_that_it_has",
    r"docker (build|run) ": HAND + "needs Docker, which test machines have not",
    r"\.venv/bin/pip install ": HAND + "installs packages for a GPU",
    r"python -m dapo\.main_ppo .*--(rollout|train)-only": REPLAY + "test_one_half_generates_and_the_other_trains_on_it",
    r"python -m dapo\.main_ppo .*soft_gate\b": OWN_LOSS,
    r"python -m dapo\.main_ppo .*rollout\.function\b": TURNS,
    r"python -m dapo\.main_ppo .*tool_tiny\b": "tests/end_to_end/test_tool.py::test_a_short_run",
    r"python -m dapo\.main_ppo .*_1gpu\b": "tests/gpu/test_program.py::test_a_few_steps_of_dapo_tiny_1gpu",
    r"python -m dapo\.main_ppo\b": "tests/end_to_end/test_program.py::test_three_steps_report_evaluate_and_save",
    r"python -m dapo\.config\b": "tests/config/test_compose.py::test_the_reference_of_all_keys_is_current",
    r"python -m dapo\.evaluate\b": "tests/evaluate/test_command.py::test_a_checkpoint_is_evaluated_without_actors",
    r"python -m dapo\.doctor\b": "tests/doctor/test_command.py::test_a_healthy_machine_has_nothing",
    r"python -m dapo\.plan\b": "tests/plan/test_plan.py::test_refusal_ends_with_1_and_one_message_and_needs_no_worker",
    r"python -m dapo\.plot\b": "tests/test_plot.py::test_a_picture_is_written",
    r"python -m dapo\.rewards\.selfcheck\b": "tests/rewards/test_selfcheck.py::test_question_and_answer",
    r"python -m dapo\.simulate .*--table curricula\b": "tests/simulate/test_curricula.py::test_the_smallest_table",
    r"python -m dapo\.simulate .*--table\b": "tests/simulate/test_command.py::test_the_smallest_run_of_a_table",
    r"python -m dapo\.simulate\b": "tests/simulate/test_command.py::test_the_smallest_run_prints_its_table",
    r"python -m dapo\.ablation\b": "tests/ablation/test_ablation.py::test_rungs_on_one_engine",
    r"python -m dapo\.bench[. ]rewards\b": "tests/bench/test_rewards.py::test_a_short_run_prints_a_table",
    r"python -m dapo\.bench[. ]code\b": "tests/bench/test_code.py::test_a_short_run_prints_a_table",
    r"python -m dapo\.bench[. ](actor )?(logprobs|actor)\b": LOGPROBS,
    r"python -m dapo\.bench[. ](actor )?device\b": f"{UPDATES}::test_the_part_for_a_gpu_runs_on_a_cpu",
    r"python -m dapo\.bench[. ](actor )?update\b": "tests/bench/test_commands.py::test_update",
    r"python -m dapo\.bench[. ]cycle\b": "tests/bench/test_commands.py::test_cycle",
    r"python -m dapo\.bench[. ]host\b": "tests/bench/test_commands.py::test_host",
    r"python -m dapo\.bench[. ]sync\b": "tests/bench/test_commands.py::test_sync",
    r"python -m dapo\.bench[. ]decode\b": "tests/bench/test_commands.py::test_decode",
    r"python -m dapo\.bench[. ]overlap\b": "tests/bench/test_commands.py::test_overlap",
    r"python -m dapo\.bench[. ]lend\b": "tests/bench/test_commands.py::test_lend",
    r"python -m dapo\.bench[. ]save\b": "tests/bench/test_commands.py::test_save",
    r"python -m dapo\.bench[. ]driver\b": "tests/bench/test_commands.py::test_driver",
    r"python -m dapo\.bench[. ]store\b": "tests/bench/test_commands.py::test_store",
    r"python -m dapo\.store\b": "tests/store/test_schema.py::test_the_reference_is_current",
    r"python -m dapo\.inspect .*--html\b": "tests/inspect/test_page.py::test_the_command_in_a_fresh_process",
    r"python -m dapo\.inspect .*findings$": "tests/inspect/test_page.py::test_a_page_of_200_steps_is_small",
    r"python -m dapo\.inspect .*timeline\b": TIMELINE,
    r"python -m dapo\.inspect\b": "tests/inspect/test_command.py::test_which_step_was_slowest_and_why",
    r"python -m dapo\.compare\b": "tests/compare/test_command.py::test_curves_over_steps_tokens_and_seconds",
    r"python -m dapo\.replay\b": REPLAY + "test_a_step_comes_out_equal_to_the_bit_by_way_of_the_one_before_it",
    r"python -m dapo\.bench( (COMMAND|step|both|short|long).*)?$": "tests/bench/test_commands.py::test_step",
}
# What reads the arguments of a program, where that needs no more than the arguments.
PARSERS = {
    "python -m dapo.simulate ": lambda words: simulate.parser().parse_args(words),
    "python -m dapo.ablation ": ablation.parse,
    "python -m dapo.inspect ": lambda words: inspect.parser().parse_args(words),
    "python -m dapo.replay ": lambda words: replay.parser().parse_intermixed_args(
        ["1" if word == "N" else word for word in words]
    ),
    "python -m dapo.compare ": lambda words: compare.parser().parse_args(words),
}


@dataclass(frozen=True)
class Command:
    text: str
    readme: str  # where it stands first

    def __str__(self) -> str:
        return self.text


def commands_of(readme: str) -> list[str]:
    """Lines of code blocks, joined where they end with a backslash, and `spans` of text; comments are left out."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines()]
    text = re.sub(r"^```.*?^```", "", readme, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    parts = [part.split("  #")[0].split(" # ")[0].strip() for line in lines for part in line.split(" && ")]
    return [part for part in parts if part.startswith(STARTS)]


def all_commands() -> list[Command]:
    found: dict[str, str] = {}
    for path in READMES:
        for text in commands_of(path.read_text()):
            found.setdefault(text, str(path.relative_to(ROOT)))
    return [Command(text, readme) for text, readme in found.items()]


COMMANDS = all_commands()
is_command = pytest.mark.parametrize("command", COMMANDS, ids=str)


@is_command
def test_a_test_runs_it(command: Command) -> None:
    if command.text.startswith("pytest "):
        files = [word for word in command.text.split() if word.startswith("tests/")]
        assert files and all((ROOT / file.partition("::")[0]).exists() for file in files), command.readme
        return
    fitting = [node for beginning, node in RUN_BY.items() if re.match(beginning, command.text)]
    assert fitting, f"no test in RUN_BY runs `{command}`, which {command.readme} names"


@pytest.mark.parametrize("node", sorted({node for node in RUN_BY.values() if not node.startswith(HAND)}))
def test_that_test_is_there(node: str) -> None:
    file, _, name = node.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def overrides_of(command: str) -> list[str]:
    """Hydra's arguments, wherever in a command they stand; a placeholder (NAME, …) is none."""
    words = [word for word in shlex.split(command) if re.match(r"\+?\+?[a-z][\w.]*=", word)]
    return [word for word in words if word != "key=value" and not re.search(r"=[A-Z.]+$", word)]


@pytest.mark.parametrize("command", [each for each in COMMANDS if overrides_of(each.text)], ids=str)
def test_its_configuration_composes(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text("def compute_score(*_):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    overrides = overrides_of(command.text)
    if not any(word.startswith("+experiment=") for word in overrides):
        overrides = ["+experiment=dapo_tiny", *overrides]
    compose(overrides)


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.text.startswith(tuple(PARSERS))], ids=str)
def test_its_options_are_known(command: Command) -> None:
    program = next(program for program in PARSERS if command.text.startswith(program))
    words = shlex.split(command.text.removeprefix(program))
    if "--help" not in words:
        PARSERS[program](words)


@pytest.mark.parametrize(
    ("readme", "found"),
    [
        pytest.param("a\n```bash\nbash a.sh x  # why\nls\n```\n", ["bash a.sh x"], id="block"),
        pytest.param("```\nray job submit \\\n  -- a\n```\n", ["ray job submit -- a"], id="continued"),
        pytest.param(
            "run `python -m dapo.plan\n+experiment=a` or `x`", ["python -m dapo.plan +experiment=a"], id="span"
        ),
        pytest.param("`docker build . && docker run x`", ["docker build .", "docker run x"], id="two"),
    ],
)
def test_commands_are_found(readme: str, found: list[str]) -> None:
    assert commands_of(readme) == found


def test_a_command_that_nothing_runs_fails() -> None:
    with pytest.raises(AssertionError, match="no test in RUN_BY runs `python -m dapo.frobnicate`"):
        test_a_test_runs_it(Command("python -m dapo.frobnicate", "README.md"))


def test_the_environment_is_entered_before_its_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("source .venv/bin/activate ") < text.index("python -m dapo."), "the quickstart leaves that to you"
