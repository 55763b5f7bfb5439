"""The planner on GPUs that engines and actors share: memory of each, and the seconds of a switch."""

import pytest

from dapo.tools.plan.actor import ActorMemory
from dapo.tools.plan.engine import EngineMemory
from dapo.tools.plan.fit import changed, problems, room_for_actors
from dapo.tools.plan.report import report
from dapo.tools.plan.step import Step
from dapo.tools.plan.terms import size
from dapo.workers.rollout import CANARY
from tests.support.plan.plans import planned


def test_roles_that_take_turns_have_a_gpu_each_at_its_time():
    cfg, shape = planned(experiment="dapo_qwen7b_hybrid")
    memory, engine = ActorMemory(cfg, shape), EngineMemory(cfg, shape)
    assert problems(cfg, shape) == []
    whole, resting = (sum(t.amount for t in terms) for terms in (memory.resident(), memory.beside().terms[:-2]))
    assert whole - resting == pytest.approx(12 * shape.parameters / 8), "gradients, and the moments"
    assert room_for_actors(cfg, shape) == cfg.plan.gpu_memory_bytes - cfg.plan.engine_overhead_bytes
    told = report(cfg, shape)
    assert "8, in turn" in told and "while an engine has the GPU" in told and "in host memory meanwhile:" in told
    step, moved = Step(cfg, shape), 8 * shape.parameters / 8
    assert step.switch_s == pytest.approx(cfg.plan.switch_s + 2 * moved / cfg.plan.host_bandwidth)
    kept = changed(cfg, {"actor.offload": "none"})
    [problem] = problems(kept, shape)
    assert "an engine leaves" in problem and "actor.offload=phase" in problem
    assert engine.utilization * cfg.plan.gpu_memory_bytes + memory.beside().total <= cfg.plan.gpu_memory_bytes
    assert Step(*planned(experiment="dapo_qwen7b")).switch_s == 0.0


def test_what_a_rank_computes_beside_an_engine_that_is_awake_is_counted():
    cfg, shape = planned(experiment="dapo_qwen7b_hybrid")
    table = 2 * 152_064 * 3_584
    beside = ActorMemory(cfg, shape).beside()
    gathered, copies = [one.amount for one in beside.terms[-2:]]
    assert gathered == 2 * table and copies == 2 * table, "the engine's: a copy, and what it loads on its one GPU"
    memory = ActorMemory(changed(cfg, {"data.max_prompt_length": 16_384}), shape)
    compared = memory.beside()
    assert compared.name == "comparing log-probabilities with an engine"
    root, units, activations = [one.amount for one in compared.terms[-3:]]
    assert root == table + 2 * 3_584, "the head and the norm before it"
    assert units == 2 * table, "the embedding: where it arrives, and itself"
    assert activations == (16_384 + CANARY.max_tokens) * memory.activations.layer
    assert f"in phase `{beside.name}`" in report(cfg, shape) and size(beside.total) in report(cfg, shape)
    [problem] = problems(changed(cfg, {"rollout.vllm.gpu_memory_utilization": 0.85}), shape)
    assert f"leaves 12.00 GB of a GPU, and an actor rank needs {size(beside.total)}" in problem
    assert "(gathering weights); any of these makes it fit" in problem
    assert "rollout.vllm.gpu_memory_utilization=0.83" in problem


def test_engines_on_one_gpu_each_take_their_share_of_it():
    words = ("rollout.engines_per_gpu=2", "rollout.num_engines=2", "rollout.vllm.gpu_memory_utilization=0.25")
    (cfg, shape), (alone, _) = (planned(*given, experiment="dapo_qwen0.5b_1gpu") for given in (words, ()))
    assert problems(cfg, shape) == []
    assert room_for_actors(alone, shape) - room_for_actors(cfg, shape) == cfg.plan.engine_overhead_bytes
    told = report(cfg, shape)
    assert "both on the same 1, in turn" in told and "ENGINE (1 of 2, per GPU of 1, 2 on each)" in told
    assert "2 on each" not in report(alone, shape)
    small = {"rollout.vllm.gpu_memory_utilization": 0.46, "plan.gpu_memory_bytes": 40e9}
    [problem] = problems(changed(cfg, small), shape)
    assert problem.startswith("2 engines leave 3.20 GB of a GPU, and an actor rank needs")
    assert "rollout.engines_per_gpu=1 rollout.num_engines=1" in problem


def arriving(cfg, shape) -> float:
    """Parameters of the units after the root, each whole and as it arrives."""
    _, units = ActorMemory(cfg, shape)._arriving()
    return units.amount / 2


def test_a_tied_embedding_arrives_with_the_root_and_layers_may_be_larger():
    tied = planned("actor.reshard_after_forward=true", experiment="dapo_qwen0.5b_1gpu")
    assert arriving(*tied) == 151_936 * 896 + tied[1].layer_parameters
    cfg, shape = planned(experiment="dapo_qwen32b_hybrid")
    assert arriving(cfg, shape) == 2 * 152_064 * 5_120
    assert arriving(changed(cfg, {"actor.reshard_after_forward": False}), shape) == (64 + 2) * shape.layer_parameters


def test_engines_that_are_lent_gpus_shorten_generation_by_the_rule_of_a_run():
    lend = ("trainer.colocate=lend", "actor.offload=phase", "rollout.vllm.gpu_memory_utilization=0.74")
    (cfg, shape), (alone, _) = planned(*lend, experiment="dapo_qwen7b"), planned(experiment="dapo_qwen7b")
    step, engine = Step(cfg, shape), EngineMemory(cfg, shape)
    assert problems(cfg, shape) == []
    gain_s = step.lending_s(engine)
    assert gain_s > 0
    cheap = Step(changed(cfg, {"plan.switch_s": 0.0}), shape).lending_s(engine)
    assert cheap == pytest.approx(gain_s + cfg.plan.switch_s * 3 / 4), "waking is shared, sleeping is not"
    assert Step(changed(cfg, {"plan.switch_s": 1e5}), shape).lending_s(engine) == 0.0
    assert Step(alone, shape).lending_s(engine) == 0.0
    told = report(cfg, shape)
    assert "more on the ranks' when that pays" in told and "engines on the ranks' GPUs save" in told
    assert "slots of the weight sync (broadcast, ipc)" in told
