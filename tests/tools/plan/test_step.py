"""One step of the planner: tokens, FLOPs, communication and packing by hand, and what it says divides badly."""

import pytest

from dapo.algorithm.packing import pack
from dapo.config.derived import optimizer_steps
from dapo.tools.plan.engine import EngineMemory
from dapo.tools.plan.fit import changed, hints
from dapo.tools.plan.report import report
from dapo.tools.plan.step import Step, mean_tokens, response_lengths
from tests.support.plan.plans import planned

ALONE = "actor.ulysses_sequence_parallel_size=1"


def test_lengths_have_the_mean_that_is_assumed():
    cfg, _ = planned("plan.mean_response_tokens=9000")
    lengths = response_lengths(cfg, 4096)
    assert sum(lengths) / 4096 == pytest.approx(9000, rel=0.01)
    assert max(lengths) <= 20480 and lengths == response_lengths(cfg, 4096)


def test_flops_of_a_step():
    cfg, shape = planned()
    step = Step(cfg, shape)
    tokens = 8192 * (256 + 6826)
    assert step.trained_tokens == tokens and optimizer_steps(step.cfg) == 16
    assert step.forward_flops == pytest.approx(tokens * 2 * 32.0e9, rel=0.12)  # the rest is attention
    again = step.recomputed[0]
    assert again == pytest.approx(1 - 64 * 5120 * 27648 / 31_985_000_000, abs=1e-3)  # all but `down`
    assert 3 + again < step.update_flops / step.forward_flops < 4.5
    none = Step(changed(cfg, {"model.gradient_checkpointing": "none"}), shape)
    selective = Step(changed(cfg, {"model.gradient_checkpointing": "selective"}), shape)
    assert none.update_flops < selective.update_flops < step.update_flops
    assert step.mfu < step.cfg.plan.hfu


def test_frozen_weights_have_no_gradient_to_compute():
    cfg, shape = planned("model.gradient_checkpointing=none")
    full, lora = Step(cfg, shape), Step(changed(cfg, {"model.lora.rank": 16}), shape)
    assert lora.forward_flops == full.forward_flops
    lengths = [mean_tokens(cfg)[0] + response for response in full.responses]
    attention = sum(map(shape.attention_flops, lengths)) * full.sequences / len(lengths)
    assert full.update_flops - lora.update_flops == pytest.approx(full.forward_flops - attention, rel=1e-6)
    assert "matrices x (1 + 1 + 0.02 again) + attention x (1 + 2.5 + 0 again)" in report(lora.cfg, shape)
    assert "matrices x (1 + 2 + 0.02 again) + attention x (1 + 2.5 + 0 again)" in report(cfg, shape)
    assert lora.mfu < cfg.plan.hfu


def test_communication_of_an_update_by_hand():
    step = Step(*planned())
    assert step.bandwidth == 300e9, "eight adapters bring a node more than its GPUs hand on"
    gathered, summed = step.traffic
    assert gathered == pytest.approx(63 / 64 * 2 * 32_763_876_352) and summed == 2 * gathered
    assert step.passes["backward"][1] == pytest.approx(16 * step.packing.micro_batches * 3 * gathered / 300e9)
    within = Step(*planned("actor.fsdp_size=8", experiment="dapo_qwen32b"))
    assert within.bandwidth == 300e9 and within.traffic[0] == pytest.approx(7 / 8 * 2 * 32_763_876_352)
    kept = Step(*planned("actor.reshard_after_forward=false", experiment="dapo_qwen7b"))
    assert kept.rounds == optimizer_steps(kept.cfg)


@pytest.mark.parametrize(("shards", "adapters"), [(64, 8), (16, 8), (20, 4), (10, 2), (13, 1)])
def test_a_group_beyond_a_node_receives_by_the_adapters_that_it_has_in_each(shards, adapters):
    cfg, shape = planned("plan.network_bandwidth=12.5e9")
    step = Step(changed(cfg, {"actor.num_workers": shards}), shape)
    assert step.bandwidth == 12.5e9 * adapters


def test_what_gathers_more_often_and_computes_less_is_faster_on_a_network_of_400g():
    cfg, shape = planned(experiment="dapo_qwen32b_hybrid")
    other = changed(cfg, {"model.gradient_checkpointing": "selective", "actor.max_tokens_per_gpu": 8192})
    assert Step(other, shape).update_s < Step(cfg, shape).update_s
    assert not any("network" in line for line in hints(other, shape))


def test_gradients_on_the_host_cost_time():
    cfg, shape = planned("actor.offload=host")
    host, none = Step(cfg, shape), Step(changed(cfg, {"actor.offload": "none"}), shape)
    later = 16 * (host.packing.micro_batches - 1)
    assert none.offload_s == 0 and host.offload_s == pytest.approx(
        later * 4 * 32_763_876_352 * (63 / 64 / 300e9 + 1 / 64 / 25e9)
    )
    assert host.update_s == pytest.approx(none.update_s + host.offload_s) and host.mfu < none.mfu
    assert "added up on the host" in report(cfg, shape)


# dapo/tools/bench/RESULTS.md, on one GPU: model, tokens of each of four micro-batches, seconds; second is worst.
MEASURED = [
    ("Qwen/Qwen2.5-0.5B", 4096, 1.46),
    ("Qwen/Qwen2.5-0.5B", 20480, 2.75),
    ("Qwen/Qwen2.5-1.5B", 4096, 1.35),
    ("Qwen/Qwen2.5-1.5B", 20480, 5.14),
    ("Qwen/Qwen2.5-7B", 4096, 2.70),
    ("Qwen/Qwen2.5-7B", 20480, 14.13),
]


@pytest.mark.parametrize(("model", "tokens", "seconds"), MEASURED, ids=lambda value: str(value).removeprefix("Qwen/"))
def test_updates_as_measured(model, tokens, seconds):
    prompt = tokens // 8
    cfg, shape = planned(
        *(f"model.path={model}", "model.gradient_checkpointing=full"),
        *(f"data.max_prompt_length={prompt}", f"data.max_response_length={tokens - prompt}"),
        *(f"plan.mean_prompt_tokens={prompt}", f"plan.mean_response_tokens={tokens - prompt}"),
        *("actor.num_workers=1", f"actor.max_tokens_per_gpu={tokens}", "reward.overlong_buffer.enable=false"),
        *("data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "rollout.n=4", "data.gen_batch_size=1"),
        experiment="dapo_qwen7b",
    )
    step = Step(cfg, shape)
    assert step.packing.micro_batches == 4 and list(step.extra_passes) == []
    assert 0.55 * seconds < step.update_s < 1.15 * seconds


def test_an_update_of_a_small_model_as_measured():
    """28.7 s on the H200, for a batch with responses of 2,048 tokens."""
    cfg, shape = planned("plan.mean_response_tokens=2048", experiment="dapo_qwen0.5b_1gpu")
    assert Step(cfg, shape).update_s == pytest.approx(28.7, rel=0.15)


def test_packing_is_the_actors_own():
    cfg, shape = planned("actor.ppo_mini_batch_size=4", "data.train_batch_size=4", ALONE)
    step, equal_at = Step(cfg, shape), shape.attention_equals_rest_tokens
    bins = [pack([256 + r for r in step.responses[k : k + 64]], 64, 22_528, equal_at) for k in range(0, 256, 64)]
    assert step.packing.micro_batches == round(sum(len(ranks[0]) for ranks in bins) / 4)


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        pytest.param(["actor.ppo_mini_batch_size=2", ALONE], "ranks wait for the heaviest", id="idle"),
        pytest.param(
            ["actor.max_tokens_per_gpu=2816", "plan.network_bandwidth=5e9"], "waits for the network", id="network"
        ),
        pytest.param(["rollout.vllm.gpu_memory_utilization=0.95"], "rollout.vllm.max_num_seqs=", id="sequences"),
        pytest.param(["rollout.num_engines=200"], "has places for", id="engines"),
    ],
)
def test_what_divides_badly(overrides, hint):
    cfg, shape = planned("plan.mean_response_tokens=4000", *overrides)
    found = [*hints(cfg, shape)]
    assert any(hint in line for line in found), found


def test_no_more_sequences_are_proposed_than_tokens_of_a_pass():
    """vLLM refuses `max_num_seqs` above `max_num_batched_tokens`, whose default is 2048."""
    cfg, shape = planned("rollout.n=128", "rollout.vllm.max_num_seqs=512", experiment="dapo_qwen0.5b_1gpu")
    (hint,) = [line for line in hints(cfg, shape) if "max_num_seqs=" in line]
    assert "rollout.vllm.max_num_seqs=2048 would use it" in hint


def test_an_engine_of_a_small_model_waits_for_its_host():
    cfg, shape = planned(experiment="dapo_qwen0.5b_1gpu")
    engine, step = EngineMemory(cfg, shape), Step(cfg, shape)
    assert step.token_s(engine, 1024) == pytest.approx(1024 * 44e-6)
    on_gpu = Step(*planned("plan.engine_sequence_s=0", experiment="dapo_qwen0.5b_1gpu"))
    assert on_gpu.token_s(engine, 1024) < step.token_s(engine, 1024) / 4
    assert on_gpu.token_s(engine, 1) == step.token_s(engine, 1) > cfg.plan.engine_step_s
