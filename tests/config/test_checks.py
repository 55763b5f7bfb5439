"""Bad configuration: every problem is named with key, value and remedy before anything starts."""

import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf

from dapo.config.compose import checked_overrides, compose, known_keys
from dapo.config.schema import Config

FILTER = "filter_groups"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        pytest.param(
            ["actor.optim.lr_scheduler=constant", "actor.optim.lr_warmup_steps=10"],
            ["actor.optim.lr_scheduler", "constant", "actor.optim.lr_warmup_steps", "10", "constant_with_warmup"],
            id="a warm-up that would not take place",
        ),
        pytest.param(
            ["actor.ppo_mini_batch_size=6"],
            ["actor.ppo_mini_batch_size", "6", "data.train_batch_size", "16", "next divisor below is 4"],
            id="mini-batch does not divide",
        ),
        pytest.param(["data.train_batch_size=-5"], ["`data.train_batch_size` (-5)"], id="negative batch"),
        pytest.param(
            ["rollout.vllm.max_model_len=24k"],
            ["`rollout.vllm.max_model_len` (24k) must be a whole number"],
            id="window with a unit",
        ),
        pytest.param(
            ["rollout.vllm.tensor_parallel_size=0", "trainer.colocate=time"],
            ["`rollout.vllm.tensor_parallel_size` (0) must be a whole number, at least 1"],
            id="engines without GPUs",
        ),
        pytest.param(
            ["rollout.vllm.tensor_parallel_size=null"],
            ["`rollout.vllm.tensor_parallel_size` (None) must be a whole number, at least 1"],
            id="engines of no size",
        ),
        pytest.param(
            ["rollout.vllm.gpu_memory_utilization=90"],
            ["`rollout.vllm.gpu_memory_utilization` (90) must be a share"],
            id="per cent",
        ),
        pytest.param(
            ["model.path=/no/such/model"], ["model.path", "/no/such/model", "does not exist"], id="model path missing"
        ),
        pytest.param(
            ["model.path=pkg://dapo.tiny/bsae"],
            ["model.path", "did you mean pkg://dapo.tiny/base"],
            id="model misspelt",
        ),
        pytest.param(["algorithm.loss_agg_mode=tokenmean"], ["loss_agg_mode", "token-mean"], id="unknown mode"),
        pytest.param(["rollout.n=1"], ["rollout.n", "at least 2"], id="groups of one"),
        pytest.param([f"{FILTER}.min_scored=1"], [f"`{FILTER}.min_scored` (1)", "at least 2"], id="one verdict"),
        pytest.param([f"{FILTER}.min_scored=17"], [f"`{FILTER}.min_scored` (17)", "`rollout.n` (16)"], id="verdicts"),
        pytest.param(  # by which verl means never
            ["checkpoint.every=-1", "eval.every=-1"],
            [
                "`eval.every` (-1) must be 0 or more; 0: none on the way\n"
                "`checkpoint.every` (-1) must be 0 or more; 0: only the last"
            ],
            id="never",
        ),
        pytest.param(
            ["checkpoint.every_s=-1", "checkpoint.keep=-1", "trainer.max_hours=-1"],
            [
                "`trainer.max_hours` (-1.0) must be 0 or more; 0: none",
                "`checkpoint.every_s` (-1.0) must be 0 or more; 0: none",
                "`checkpoint.keep` (-1) must be 0 or more; 0: all",
            ],
            id="no bound",
        ),
        pytest.param([f"{FILTER}.max_staleness=-1"], [f"`{FILTER}.max_staleness` (-1)", "0 or more"], id="staleness"),
        pytest.param([f"{FILTER}.max_staleness=1"], ["older policies", "truncate or mask"], id="stale, uncorrected"),
        pytest.param([f"{FILTER}.admission=fifo"], ["(fifo)", "draw_order, completion"], id="admission"),
        pytest.param([f"{FILTER}.on_budget=stop"], ["(stop)", "fail, train_partial"], id="on budget"),
        pytest.param(["rollout.temperature=0"], ["rollout.temperature", "greater than 0"], id="greedy training"),
        pytest.param(["rollout.top_p=0.9"], ["rollout.top_p", "must be 1.0"], id="cut distribution"),
        pytest.param(["rollout.top_k=-2"], ["`rollout.top_k` (-2)", "-1 or 0", "at least 1"], id="top_k below -1"),
        pytest.param(["eval.top_k=-2"], ["`eval.top_k` (-2)", "-1 or 0", "at least 1"], id="top_k below -1, held out"),
        pytest.param(["rollout.top_k=20"], ["`rollout.top_k` (20)", "must be -1"], id="distribution cut by top_k"),
        pytest.param(["data.train_files=[]"], ["data.train_files", "at least one file"], id="no training data"),
        pytest.param(
            ["data.max_contradictory=1.5"],
            ["data.max_contradictory", "a share of the distinct prompts, 0 to 1"],
            id="share above 1",
        ),
        pytest.param(["rollout.top_p=1.5"], ["`rollout.top_p` (1.5)", "at most 1; 1.0 keeps"], id="top_p above 1"),
        pytest.param(["actor.max_tokens_per_gpu=100"], ["actor.max_tokens_per_gpu", "64 + 128 = 192"], id="no room"),
        pytest.param(["rollout.vllm.max_model_len=100"], ["rollout.vllm.max_model_len", "192"], id="window too short"),
        pytest.param(
            ["rollout.vllm.logprobs_mode=raw"], ["rollout.vllm.logprobs_mode", "dapo itself"], id="own argument"
        ),
        pytest.param(
            ["rollout.vllm.data_parallel_size=2"], ["rollout.vllm.data_parallel_size", "rollout.num_engines"], id="dp"
        ),
        pytest.param(
            ["eval.temperature=0"], ["`eval.n` (4) must be 1 with `eval.temperature` (0)", "eval.n=1"], id="greedy"
        ),
        pytest.param(
            ["trainer.seed=4294967296"], ["`trainer.seed` (4294967296) must be from 0 to 4294967295"], id="large seed"
        ),
        pytest.param(
            ["rollout.vllm.nnodes=2"],
            ["rollout.vllm.nnodes", "dapo itself", "would wait for others"],
            id="engine's nodes",
        ),
        pytest.param(
            ["rollout.vllm.tokenizer=x/y"], ["rollout.vllm.tokenizer", "dapo itself", "model.path"], id="tokenizer"
        ),
        pytest.param(["trainer.output_dir=''"], ["`trainer.output_dir` () must be a directory"], id="no directory"),
        pytest.param(["trainer.device=tpu"], ["trainer.device", "tpu", "auto, cpu, cuda"], id="unknown device"),
        pytest.param(
            ["data.gen_batch_size=1", "filter_groups.max_num_gen_batches=2"],
            ["filter_groups.max_num_gen_batches", "2 draws", "train_batch_size"],
            id="budget below a batch",
        ),
    ],
)
def test_bad_values_are_named(overrides, parts):
    with pytest.raises(ValueError) as error:
        compose(overrides, "dapo_tiny")
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [["eval.temperature=0", "eval.n=1"], ["eval.temperature=0", "data.val_files=[]"], ["trainer.seed=4294967295"]],
)
def test_greedy_answers_and_large_seeds_that_make_sense(overrides):
    assert isinstance(compose(overrides, "dapo_tiny"), Config)


def test_all_problems_come_at_once():
    with pytest.raises(ValueError) as error:
        compose(["rollout.n=1", "trainer.device=tpu"], "dapo_tiny")
    assert len(str(error.value).splitlines()) == 2


def test_without_experiment_the_missing_values_are_named():
    with pytest.raises(ValueError, match="model.path"):
        compose([])


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        pytest.param("+experiment=dapo_tinny", "did you mean `dapo_tiny`", id="experiment"),
        pytest.param("data.trian_files=[x]", "did you mean `data.train_files`", id="key"),
        pytest.param("+data.trian_files=[x]", "did you mean `data.train_files`", id="added key"),
        pytest.param("rolout.n=8", "did you mean `rollout.n`", id="section"),
        pytest.param("clip_ratio_high=0.3", "did you mean `algorithm.clip_ratio_high`", id="section left out"),
        pytest.param("lr=1e-4", "did you mean `actor.optim.lr`", id="deep key"),
    ],
)
def test_unknown_names_get_the_nearest(argument, hint):
    with pytest.raises(ValueError) as error:
        checked_overrides([argument])
    assert hint in str(error.value)


def test_known_names_pass():
    checked_overrides(["+experiment=dapo_tiny", "+rollout.vllm.foo.bar=1", "--cfg", "job"])
    assert checked_overrides(["rollout.vllm.max_num_seqs=3"]) == ["++rollout.vllm.max_num_seqs=3"]
    checked_overrides(["hydra.run.dir=.", "reward.functions=[]", "data={shuffle: false}"])


def test_every_key_of_the_tree_is_known():
    def leaves(tree: Any, prefix: str = "") -> list[str]:
        found = []
        for key, value in tree.items():
            found += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
        return found

    tree = OmegaConf.to_container(OmegaConf.structured(Config))
    assert set(leaves(tree)) <= set(known_keys())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["+experiment=dapo_tinny"], "unknown experiment `dapo_tinny`", id="experiment"),
        pytest.param(["+experiment=dapo_tiny", "rollout.n=many"], "`rollout.n` (many) must be", id="wrong type"),
        pytest.param(["+experiment=dapo_tiny", "~trainer.seed"], "`~trainer.seed` would remove a key", id="removed"),
        pytest.param(["+experiment=dapo_tiny", "rollout.n=1"], "`rollout.n` (1)", id="validation"),
    ],
)
def test_the_program_ends_with_one_message(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "dapo.main_ppo", *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert message in done.stderr
    assert done.stderr.startswith("dapo: ") and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
