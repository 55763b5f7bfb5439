"""Runs of verl and TRL become experiment files, and no field is passed over."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dapo.config.elsewhere import TRL, VERL, said_of
from dapo.config.names import elsewhere
from dapo.tools.translate import trl, verl
from dapo.tools.translate.__main__ import main
from dapo.tools.translate.outcome import INSTEAD, REFUSED, SAME, TRANSLATED, UNACCOUNTED, Run, translate
from dapo.tools.translate.shell import Script, unknown
from dapo.tools.translate.sources import Source, read

HERE = Path(__file__).parent


def of(source: Source) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """The file's keys, the kind of outcome of each field that is given, and what a run would refuse."""
    text, lines, problems = source.translated()
    tree = OmegaConf.create(text)

    def flat(values: Any, prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in values.items():
            inner = isinstance(value, dict) and prefix + key != "logging.wandb"
            found |= flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
        return found

    return flat(OmegaConf.to_container(tree)), {one.field: one.outcome.kind for one in lines if one.given}, problems


def test_a_script_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NNODES", raising=False)
    sets, kinds, problems = of(
        read([str(HERE / "verl_dapo.sh"), "MODEL_PATH=/m/tiny", "actor_rollout_ref.rollout.n=8"])
    )
    assert os.listdir() == []  # nothing of it was executed
    expected = {
        "data.train_files": ["/data/math.parquet"],
        "data.val_files": ["/data/a.parquet", "/data/b.parquet"],
        "data.max_response_length": 8192,
        "data.gen_batch_size": 1536,
        "model.path": "/m/tiny",
        "rollout.n": 8,  # "$@" comes last
        "rollout.num_engines": 8,
        "rollout.vllm.tensor_parallel_size": 2,
        "rollout.vllm.disable_cascade_attn": True,
        "actor.num_workers": 16,
        "actor.max_tokens_per_gpu": 10240,
        "actor.offload": "phase",
        "actor.optim.lr_warmup_steps": 20,
        "actor.optim.weight_decay": 0.01,  # verl's own
        "algorithm.kl.loss_coeff": 0.001,
        "reward.functions": [{"path": "math"}],
        "logging.wandb": {"project": "DAPO", "name": "verl"},
        "trainer.colocate": "time",
        "trainer.total_steps": 200,
        "trainer.output_dir": "/ckpts/tiny",
    }
    assert {key: sets[key] for key in expected} == expected
    assert [name for name, kind in kinds.items() if kind == UNACCOUNTED] == []
    assert [name for name, kind in kinds.items() if kind == REFUSED] == ["trainer.experiment_name"]
    assert kinds["data.return_raw_chat"] == kinds["actor_rollout_ref.rollout.name"] == INSTEAD
    assert len(kinds) == 43 and [line.partition("`")[2].partition("`")[0] for line in problems] == ["model.path"]


def test_a_script_of_trl() -> None:
    sets, kinds, _ = of(read([str(HERE / "trl_grpo.py"), "num_processes=4"]))
    expected = {
        "data.train_files": ["trl-lib/DeepMath-103K"],
        "data.train_batch_size": 32,
        "data.max_response_length": 2048,
        "actor.ppo_mini_batch_size": 16,
        "actor.num_workers": 4,
        "actor.optim.lr_scheduler": "linear",
        "algorithm.clip_ratio_high": 0.28,
        "algorithm.kl.loss_coeff": 0.04,
        "algorithm.loss_agg_mode": "seq-mean-token-sum-norm",
        "algorithm.rollout_correction.mode": "truncate",
        "filter_groups.enable": False,
        "model.lora.rank": 16,
        "model.lora.target_modules": ["all-linear"],
        "reward.overlong_buffer.len": 256,
        "reward.overlong_buffer.penalty_factor": 0.25,
        "trainer.total_steps": 200,
        "trainer.output_dir": "outputs//models/Qwen2.5-0.5B",
    }
    assert {key: sets[key] for key in expected} == expected
    assert [one["name"] for one in sets["reward.functions"]] == ["right", "think_format_reward"]
    assert {*kinds.values()} == {TRANSLATED, INSTEAD, SAME}


def test_a_command_line_of_trl_reads_its_yaml(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("model_name_or_path: /m\ndataset_name: d\nlearning_rate: 1e-5\nbeta: 0.1\n")
    words = (
        f"accelerate launch -m trl.scripts.grpo --config {tmp_path}/grpo.yaml --beta 0.0 --reward_funcs accuracy_reward"
    )
    sets, kinds, _ = of(read([*words.split(), "think_format_reward", "--use_peft", "--new_in_trl", "3"]))
    assert (sets["model.path"], sets["actor.optim.lr"], sets["algorithm.kl.loss_coeff"]) == ("/m", 1e-5, 0.0)
    assert [one["path"] for one in sets["reward.functions"]] == [*trl.OF_TRL.values()][:1] + [
        trl.OF_TRL["think_format_reward"]
    ]
    assert [name for name, kind in kinds.items() if kind == UNACCOUNTED] == ["new_in_trl"]


def test_what_is_unaccounted_for_cannot_be_overlooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "experiment/mine.yaml"
    monkeypatch.setattr(sys, "argv", ["translate", "--out", str(out), str(HERE / "verl_resolved.yaml")])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    name = "actor_rollout_ref.actor.new_in_verl"
    assert ended.value.code == 1 and shown.err == f"dapo: unaccounted for: {name}\n"
    assert shown.out.startswith(f"unaccounted: 1\n  {name}=1: ")
    assert "trainer.device=npu: dapo computes on cuda or cpu" in shown.out
    assert f"--config-dir {tmp_path} +experiment=mine" in shown.out
    command = [sys.executable, "-m", "dapo.main_ppo", "--config-dir", str(tmp_path), "+experiment=mine", "--cfg", "job"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    tree = OmegaConf.create(done.stdout)
    assert done.returncode == 0 and tree.algorithm.advantage.function == "rloo", done.stderr
    assert (tree.algorithm.kl.reward_coeff, tree.algorithm.kl.estimator) == (0.01, "k1")
    assert tree.actor.optim.lr_scheduler == "cosine_with_min_lr" and tree.trainer.total_steps == 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('A=1 B=2; echo $A "${B}" ${C:-3} ${D:="4 5"} "$D"', ["echo", "1", "2", "3", "4", "5", "4 5"]),
        ("n=$((2 * (3 + 1024) / 2)); echo $n $((n % 5 + 2**3))", ["echo", "1027", "10"]),
        ("a=(x 'y z'); a+=(w); echo \"${a[@]}\" ${#a[@]} ${a[1]}", ["echo", "x", "y z", "w", "3", "y", "z"]),
        ("p=/a/b.c; echo ${p##*/} ${p%.*} ${p//a/A} ${p^^}", ["echo", "b.c", "/a/b", "/A/b.c", "/A/B.C"]),
        ('if [[ $X == 1 ]]; then a=1; elif [ -z "$X" ]; then a=2; else a=3; fi; echo $a', ["echo", "3"]),
        ("X=1\nif [ $X -gt 0 ]; then\n a=1\nelse\n a=2\nfi\necho $a", ["echo", "1"]),
        ("echo a \\\n  'b # c' # d \\\n e", ["echo", "a", "b # c"]),
        ('echo "$(rm -rf /)" `b` $NOWHERE', ["echo", unknown("$(rm -rf /)"), unknown("`b`"), unknown("$NOWHERE")]),
        ("for i in 1 2; do echo $i; done", ["echo", "1"]),
        ("run a=b 2>&1 | tee log", ["run", "a=b"]),
        ('echo "a\\"b" \'["c","d"]\' $@ $1', ["echo", 'a"b', '["c","d"]', "one", "two", "one"]),
    ],
)
def test_words_of_a_shell_script(text: str, words: list[str]) -> None:
    assert Script({}, ["one", "two"]).read(text).commands[0] == words


@pytest.mark.parametrize(
    ("fields", "key", "value"),
    [
        pytest.param(
            {"actor_rollout_ref.actor.policy_loss.loss_mode": "geo_mean"}, "algorithm.gmpo.high", 0.2, id="gmpo"
        ),
        pytest.param({"algorithm.adv_estimator": "reinforce_plus_plus_baseline"}, "algorithm.advantage.whiten", True),
        pytest.param({"actor_rollout_ref.actor.kl_loss_type": "mse"}, "algorithm.kl.estimator", None, id="no-kl"),
        pytest.param({"actor_rollout_ref.rollout.val_kwargs.n": 8}, "eval.temperature", 0.0, id="greedy"),
        pytest.param({"trainer.resume_mode": "disable"}, "checkpoint.resume", "never"),
        pytest.param({"data.train_files": "x/gsm8k/train.parquet"}, "reward.functions", [{"path": "gsm8k"}]),
        pytest.param({"actor_rollout_ref.hybrid_engine": False}, "trainer.colocate", "none", id="apart"),
        pytest.param({"actor_rollout_ref.rollout.dtype": "fp16"}, "model.dtype", "float16"),
    ],
)
def test_values_of_verl_that_are_converted(fields: dict[str, Any], key: str, value: Any) -> None:
    sets, lines = translate(Run("verl", fields, verl.DEFAULTS), verl.RULES)
    assert sets.get(key) == value and {one.outcome.kind for one in lines if one.given} <= {TRANSLATED, INSTEAD, SAME}


@pytest.mark.parametrize(
    ("fields", "key", "value"),
    [
        ({"scale_rewards": "batch"}, "algorithm.advantage.whiten", True),
        ({"importance_sampling_level": "sequence"}, "algorithm.policy_loss", "gspo"),
        ({"generation_batch_size": 64}, "data.train_batch_size", 8),
        ({"epsilon": 0.1}, "algorithm.clip_ratio_high", 0.1),
        ({"use_vllm": True, "vllm_mode": "server"}, "trainer.colocate", "none"),
        ({"use_vllm": True}, "algorithm.rollout_correction.mode", "mask"),
        ({"max_steps": 10, "num_iterations": 2}, "trainer.total_steps", 5),
        ({"warmup_ratio": 0.1, "max_steps": 50}, "actor.optim.lr_warmup_steps", 5),
    ],
)
def test_values_of_trl_that_are_converted(fields: dict[str, Any], key: str, value: Any) -> None:
    sets, lines = translate(Run("TRL", fields, trl.DEFAULTS), trl.RULES)
    assert sets.get(key) == value and {one.outcome.kind for one in lines if one.given} <= {TRANSLATED, INSTEAD, SAME}


def test_batches_that_are_no_whole_groups_are_refused() -> None:
    fields = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    _, lines = translate(Run("TRL", fields, trl.DEFAULTS), trl.RULES)
    assert {one.outcome.kind for one in lines if one.field in fields} == {REFUSED}


def test_each_name_in_the_tables_has_one_outcome() -> None:
    """A name of several keys needs a rule, or it would be unaccounted for."""
    lost = []
    for name, there in elsewhere().items():
        rules, words = (verl.RULES, VERL) if there[0][0] == "verl" else (trl.RULES, TRL)
        ruled = any(re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*"), name) for pattern in rules)
        if len({key for _, key in there}) > 1 and not ruled and not said_of(name, words):
            lost.append(name)
    assert lost == []


def test_every_default_of_the_others_is_accounted_for() -> None:
    for system, values, rules in ("verl", verl.DEFAULTS, verl.RULES), ("TRL", trl.DEFAULTS, trl.RULES):
        sets, lines = translate(Run(system, {}, values), rules)
        assert [one.field for one in lines if one.outcome.kind == UNACCOUNTED] == []
        assert sets["filter_groups.enable"] is False and sets["reward.overlong_buffer.enable"] is False
