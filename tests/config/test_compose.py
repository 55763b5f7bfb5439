"""The command line, what it makes of an experiment, and the experiments of config/experiment."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dapo.config import compose as module
from dapo.config import names
from dapo.config.__main__ import reference
from dapo.config.checks import doubts
from dapo.config.compose import checked_overrides, compose, experiments
from dapo.config.names import hint
from dapo.config.plan import PlannedConfig
from dapo.config.schema import Config
from dapo.state.run_dir import HEADER, claim_output_dir

ROOT = Path(__file__).resolve().parents[2]
TINY = "+experiment=dapo_tiny"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["trainer.seed=7", "trainer.seed=8", "model.path='a b'"], id="values"),
        pytest.param(["data.train_files=[a,b]", "data.val_files={one: [a], two: [b]}"], id="lists and mappings"),
        pytest.param(["trainer={seed: 3, total_steps: 4}", "+trainer.seed=5"], id="a section"),
        pytest.param(["rollout.vllm.max_num_seqs=8", "rollout.vllm={enforce_eager: true}"], id="open keys"),
        pytest.param(["reward.functions=[{path: math, weight: 2}]", "model.dtype=bfloat16"], id="items"),
        pytest.param(["trainer.output_dir=${oc.env:HOME}/a", "trainer.total_steps=${trainer.seed}"], id="references"),
        pytest.param(["rollout.vllm.x=1", "~rollout.vllm.x", "trainer.seed=3"], id="removed"),
    ],
)
def test_values_in_a_copy_of_an_experiment_make_the_tree_that_hydra_makes(arguments):
    asked = checked_overrides([TINY, *arguments])
    found, wanted = module._composed(asked), module._by_hydra(asked)
    assert found == wanted and OmegaConf.to_yaml(found) == OmegaConf.to_yaml(wanted)
    assert OmegaConf.is_struct(found) and OmegaConf.is_struct(wanted)


def test_a_copy_of_an_experiment_is_whole_whatever_was_done_to_the_one_before():
    first, again = (module._composed([TINY]) for _ in range(2))
    first.trainer.seed += 1
    assert module._composed([TINY]) == again == module._by_hydra([TINY])


@pytest.mark.parametrize(
    ("given", "for_hydra"),
    [
        ("--help", "--help"),
        ("-c job -p trainer", "-c job -p trainer"),
        ("--multirun trainer.seed=1,2", "--multirun trainer.seed=1,2"),
        ("--config-dir mine +experiment=own", "--config-dir mine +experiment=own"),
        ("--config-d=mine hydra.run.dir=.", "--config-d=mine hydra.run.dir=."),
        ("actor.optim.lr=${actor.optim.eps}", "actor.optim.lr=${actor.optim.eps}"),
        (f"{TINY} --cfg job trainer.seed=7", f"{TINY} trainer.seed=7 --cfg job"),
        (f"{TINY} --help trainer.seed=7", f"{TINY} trainer.seed=7 --help"),
        ("--resolve trainer.seed=7 -c job rollout.n=4", "--resolve trainer.seed=7 rollout.n=4 -c job"),
        (f"-m {TINY} --info", f"-m {TINY} --info"),
        (f"{TINY} +rollout.n=4 ~rollout.vllm.max_num_seqs", f"{TINY} rollout.n=4 ~rollout.vllm.max_num_seqs"),
        ("rollout.vllm.block_size=32", "++rollout.vllm.block_size=32"),
    ],
)
def test_what_is_right_goes_to_hydra(given: str, for_hydra: str) -> None:
    """Hydra's argparse takes overrides at one place alone: before or between flags, not after them."""
    assert checked_overrides(given.split()) == for_hydra.split()


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("data.train_files=a.parquet", "data.train_files=[a.parquet]"),
        ("reward.functions='my reward.py'", "reward.functions=[{path: 'my reward.py'}]"),
        ("reward.functions=[math, own/e.py]", 'reward.functions=[{path: "math"}, {path: "own/e.py"}]'),
        ("logging.wandb=true", "++logging.wandb={project: dapo}"),
        ("logging.mlflow=false", "++logging.mlflow={}"),
        ("+actor.lr=1e-6", "actor.optim.lr=1e-6"),
        ("experiment=dapo_tiny", "+experiment=dapo_tiny"),
        ("ablation/grpo", "+experiment=ablation/grpo"),
    ],
)
def test_what_can_only_mean_one_thing_is_taken_as_that(
    given: str, taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert checked_overrides([given]) == [taken]
    named = taken.startswith("+experiment")
    assert bool(caplog.messages) != named
    caplog.clear()
    assert checked_overrides([taken]) == [taken] and not caplog.messages


def test_one_held_out_file_is_taken_as_a_list() -> None:
    assert compose(["data.val_files=a.parquet"], "dapo_tiny").data.val_files == ["a.parquet"]


def test_keys_of_open_sections_are_added_and_removed() -> None:
    assert compose([], "dapo_tiny").rollout.vllm["max_num_seqs"] == 256
    vllm = compose(["~rollout.vllm.max_num_seqs", "rollout.vllm.block_size=32"], "dapo_tiny").rollout.vllm
    assert vllm["block_size"] == 32 and "max_num_seqs" not in vllm
    for given in ("rollout.function.kwargs.attempts=3", "rollout.function.kwargs={attempts: 3}"):
        cfg = compose(["rollout.function.path=retry", given], "dapo_tiny")
        assert cfg.rollout.function.kwargs == {"attempts": 3}
    assert compose(["reward.judge.values={yes: 1, no: 0.0}"], "dapo_tiny").reward.judge.values == {"yes": 1, "no": 0}


def test_without_vllm_its_arguments_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names.importlib.util, "find_spec", lambda name: None)
    names.engine_arguments.cache_clear()
    try:
        given = ["rollout.vllm.xyzzy=1", "rollout.vllm.enforce_eager=maybe"]
        assert compose(given, "dapo_tiny").rollout.vllm == {"max_num_seqs": 256, "xyzzy": 1, "enforce_eager": "maybe"}
        assert hint("max_num_seqs") == "config/README.md lists all keys"
    finally:
        names.engine_arguments.cache_clear()


def test_a_clip_range_the_other_way_round_is_doubted() -> None:
    [line] = doubts(compose(["algorithm.clip_ratio_low=0.3", "algorithm.clip_ratio_high=0.2"], "dapo_tiny"))
    assert "`algorithm.clip_ratio_low` (0.3) is above `algorithm.clip_ratio_high` (0.2)" in line
    assert [*doubts(compose(["algorithm.clip_ratio_high=0.2"], "dapo_tiny"))] == []


def test_staleness_that_nothing_corrects_for_is_doubted() -> None:
    stale = "filter_groups.max_staleness=2"
    [line] = doubts(compose([stale], "dapo_tiny"))
    assert "`filter_groups.max_staleness` (2)" in line and "`algorithm.rollout_correction.mode`" in line
    for remedy in ("algorithm.rollout_correction.mode=truncate", "algorithm.score_centering=20"):
        assert [*doubts(compose([stale, remedy], "dapo_tiny"))] == []


def test_the_planners_assumptions_are_no_part_of_a_run(tmp_path: Path) -> None:
    cfg = compose([], "dapo_tiny")
    assert type(cfg) is Config and "plan" not in dataclasses.asdict(cfg)
    planned = compose(["plan.matrix_share=0.4"], "dapo_tiny", plan=True)
    assert isinstance(planned, PlannedConfig) and planned.plan.matrix_share == 0.4
    claim_output_dir(str(tmp_path), "auto", dataclasses.asdict(planned)).release()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with claim_output_dir(str(tmp_path), "auto", dataclasses.asdict(cfg)) as run:
        run.begin()
    now = (tmp_path / "config.yaml").read_text()
    assert now.startswith(HEADER) and "\nplan:" not in now


def test_the_reference_of_all_keys_is_current() -> None:
    written = (ROOT / "config" / "README.md").read_text()
    assert reference() == written, "run `python -m dapo.config > config/README.md`"
    assert all(f"| `{name}` |" in written for name in experiments() if "/" not in name)
    assert "| `rollout.n` | `16` | responses per prompt, at least 2 |" in written


@pytest.mark.parametrize(
    ("arguments", "code", "shown", "told"),
    [
        pytest.param(["--help"], 0, "[EXPERIMENT] [KEY=VALUE ...]", "", id="help"),
        pytest.param(["+experiment=dapo_tinny"], 1, "", "dapo: unknown experiment `dapo_tinny`", id="before Hydra"),
        pytest.param([TINY, "rollout.n=1"], 1, "", "dapo: `rollout.n` (1)", id="by Hydra"),
        pytest.param([TINY, "--cfg", "job", "trainer.seed=77"], 0, "  seed: 77\n", "", id="behind a flag"),
        pytest.param([TINY, "rollout.n=1", "--cfg", "job"], 0, "  'n': 1\n", "refuse it: `rollout.n` (1)", id="shown"),
    ],
)
def test_the_program_answers_with_one_message(arguments: list[str], code: int, shown: str, told: str) -> None:
    """What would be refused is printed all the same: whoever asks for it may look for what is wrong."""
    command = [sys.executable, "-m", "dapo.main_ppo", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == code and shown in done.stdout, done.stderr
    assert told in done.stderr and len(done.stderr.splitlines()) == bool(told)


def test_files_of_a_persons_own_are_not_checked_when_they_are_shown() -> None:
    module.check_shown(["--config-dir", "/tmp", "--cfg", "job"])
    with pytest.raises(ValueError, match=r"no value for `data.train_files\[0\]`, `model.path`; give one"):
        module.check_shown(["--cfg", "job"])


@pytest.mark.parametrize(("given", "offload"), [("true", "host"), ("false", "none")])
def test_what_was_a_switch_once_still_reads_as_such(given: str, offload: str) -> None:
    assert compose([f"actor.offload={given}"], "dapo_qwen0.5b_1gpu").actor.offload == offload


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_composes_and_validates(name):
    assert compose([], name).trainer.output_dir.endswith(f"outputs/{name}")


OWN_LOSS = "algorithm.policy_loss=dapo/algorithm/own/soft_gate.py:soft_gate"
MANY = "actor.optim.lr_scheduler=constant actor.optim.lr_warmup_steps=0 algorithm.loss_agg_mode=seq-mean-token-mean"


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ("trainer.total_steps=2 trainer.max_hours=1 eval.n=2 checkpoint.keep=1 rollout.vllm.max_num_seqs=8", ""),
        (f"{OWN_LOSS} actor.optim.lr=0.00001", "-lr_1e-5-policy_loss_soft_gate"),
        (f"actor.optim.lr=1e-5 {OWN_LOSS}", "-lr_1e-5-policy_loss_soft_gate"),
        ("rollout.function.path=retry trainer.seed=3", "-function.path_retry-seed_3"),
        ("trainer.seed=1 rollout.n=8 checkpoint.accept_changes=[rollout]", "-seed_1"),
        ("reward.functions=[{path:a/math},{path:'odd:name.py',weight:.5}]", "-functions_math+odd_name.py_0.5"),
        ("rollout.n=8 trainer.output_dir=outputs/dapo_tiny", ""),
        (f"{OWN_LOSS} rollout.n=8 rollout.temperature=0.9 algorithm.clip_ratio_low=0.1 {MANY}", None),
    ],
)
def test_a_run_without_a_directory_has_one_named_by_what_makes_it_another_run(given: str, added: str | None) -> None:
    found = compose(given.split(), "dapo_tiny").trainer.output_dir
    if added is None:
        assert (
            re.fullmatch(r"outputs/dapo_tiny-lr_scheduler_constant-[\w.+-]{80,112}-[0-9a-f]{8}", found)
            and len(found) < 150
        )
    else:
        assert found == f"outputs/dapo_tiny{added}"
        assert compose([f"trainer.output_dir={found}"], "dapo_tiny").trainer.output_dir == found, "Hydra takes it"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dapo_tiny", ("token-mean", True, 0.28, True)),
        ("grpo_tiny", ("seq-mean-token-mean", True, 0.2, False)),
        ("dr_grpo_tiny", ("seq-mean-token-sum-norm", False, 0.2, False)),
    ],
)
def test_the_objectives_of_the_tiny_experiments(name, settings):
    cfg = compose([], name)
    found = (cfg.algorithm.loss_agg_mode, cfg.algorithm.advantage.normalize_by_std, cfg.algorithm.clip_ratio_high)
    assert (*found, cfg.filter_groups.enable) == settings


def test_qwen32b_has_the_published_numbers():
    cfg = compose([], "dapo_qwen32b")
    assert (cfg.data.train_batch_size, cfg.rollout.n, cfg.actor.ppo_mini_batch_size) == (512, 16, 32)
    assert (cfg.data.max_prompt_length, cfg.data.max_response_length) == (2048, 20480)
    assert (cfg.reward.overlong_buffer.len, cfg.reward.overlong_buffer.penalty_factor) == (4096, 1.0)
    assert cfg.rollout.num_engines * cfg.rollout.vllm["tensor_parallel_size"] + cfg.actor.num_workers == 128
