"""One step of the planner: tokens, FLOPs, communication and packing by hand, and what it says divides badly."""

from pathlib import Path

import pytest

from dapo.algorithm.packing import pack
from dapo.config.derived import optimizer_steps
from dapo.tools.plan.engine import EngineMemory
from dapo.tools.plan.fit import changed, hints, levers, problems, words
from dapo.tools.plan.report import report
from dapo.tools.plan.step import Step, mean_tokens, response_lengths
from tests.support.plan.plans import GPUS, benched, mfu_table, planned

ROOT = Path(__file__).resolve().parents[3]
ALONE = "actor.ulysses_sequence_parallel_size=1"
APART = ("actor.num_workers=64", "rollout.num_engines=16")  # on different nodes
WORK = ("matrices", "attention", "elementwise", "head", "FSDP", "AdamW", "waiting for the host")


def test_lengths_have_the_mean_that_is_assumed():
    cfg, shape = planned("plan.mean_response_tokens=9000")
    lengths = Step(cfg, shape).responses
    assert sum(lengths) / len(lengths) == pytest.approx(9000, rel=0.01)
    assert max(lengths) <= 20480 and lengths == response_lengths(20480, 9000, 0.7, len(lengths))


def test_flops_of_a_step():
    cfg, shape = planned()
    step = Step(cfg, shape)
    tokens = 8192 * (256 + 6826)
    assert step.trained_tokens == tokens and optimizer_steps(step.cfg) == 16
    assert step.forward_flops == pytest.approx(tokens * 2 * 32.0e9, rel=0.12)  # the rest is attention
    again = step.epoch.backward.layers - 2
    assert again == pytest.approx(1 - 64 * 5120 * 27648 / 31_206_000_000, abs=1e-3)  # all but `down`
    assert 3 + again < step.update_flops / step.forward_flops < 4.5
    none = Step(changed(cfg, {"model.gradient_checkpointing": "none"}), shape)
    selective = Step(changed(cfg, {"model.gradient_checkpointing": "selective"}), shape)
    assert none.update_flops < selective.update_flops < step.update_flops
    assert step.mfu < step.cfg.plan.matrix_share


def test_frozen_weights_have_no_gradient_to_compute():
    cfg, shape = planned("model.gradient_checkpointing=none")
    full, lora = Step(cfg, shape), Step(changed(cfg, {"model.lora.rank": 16}), shape)
    assert lora.forward_flops == full.forward_flops
    lengths = [mean_tokens(cfg)[0] + response for response in full.responses]
    attention = sum(map(shape.attention_flops, lengths)) * full.sequences / len(lengths)
    assert full.update_flops - lora.update_flops == pytest.approx(full.forward_flops - attention, rel=1e-6)
    assert "matrices x (1 + 1.00) + head x (1 + 2) + attention x (1 + 2.5)" in report(lora.cfg, shape)
    assert "matrices x (1 + 2.00) + head x (1 + 3) + attention x (1 + 2.5)" in report(cfg, shape)
    assert lora.mfu < cfg.plan.matrix_share


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


def test_gradients_on_the_host_cost_time():
    cfg, shape = planned("actor.offload=host")
    host, none = Step(cfg, shape), Step(changed(cfg, {"actor.offload": "none"}), shape)
    later = 16 * (host.packing.micro_batches - 1)
    assert none.offload_s == 0 and host.offload_s == pytest.approx(
        later * 4 * 32_763_876_352 * (63 / 64 / 300e9 + 1 / 64 / 25e9)
    )
    adam_s = 16 * 36 * 32_763_876_352 / 64 / 25e9
    assert host.passes["optimizer"] == (pytest.approx(adam_s), 0.0) and host.mfu < none.mfu
    assert host.update_s - none.update_s == pytest.approx(host.offload_s + adam_s, rel=0.01)
    assert "added up on the host" in report(cfg, shape)


# dapo/tools/bench/RESULTS.md, on one GPU: model, GPU, tokens of each of four micro-batches, seconds of an update, and
# the share by which the plan differs.
MEASURED = [
    ("0.5B", "H100", 4096, 1.46, 0.21),
    ("0.5B", "H100", 20480, 2.75, 0.14),
    ("1.5B", "H100", 4096, 1.35, 0.02),
    ("1.5B", "H100", 20480, 5.14, 0.03),
    ("7B", "H200", 4096, 2.70, 0.11),
    ("7B", "H200", 20480, 14.13, 0.01),
]


@pytest.mark.parametrize(("model", "gpu", "tokens", "seconds", "within"), MEASURED)
def test_updates_as_measured(model, gpu, tokens, seconds, within):
    step = benched(model, tokens, gpu)
    assert step.packing.micro_batches == 4 and list(step.extra_passes) == []
    assert step.update_s == pytest.approx(seconds, rel=within)
    assert sum(sum(kinds.values()) for kinds in step.work.values()) == pytest.approx(step.update_s)


@pytest.mark.parametrize(("gpu", "seconds", "within"), [("H100", 34.5, 0.18), ("H200", 28.7, 0.02)])
def test_an_update_of_a_small_model_as_measured(gpu, seconds, within):
    """All responses had 2,048 tokens, and the old log-probabilities of all were computed."""
    then = ("model.gradient_checkpointing=full", "actor.max_tokens_per_gpu=16384", "algorithm.entropy_top_share=0.5")
    lengths = ("plan.mean_response_tokens=2048", "plan.length_sigma=0.001")
    step = Step(*planned(*then, *lengths, *GPUS[gpu], experiment="dapo_qwen0.5b_1gpu"))
    assert step.extra_passes == {"old log-probabilities": 1.0}
    assert step.update_s == pytest.approx(seconds, rel=within)


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ((), 1 - 1 / 16),
        (("algorithm.rollout_correction.use_rollout_logprobs=true",), 0),
        (("actor.ppo_mini_batch_size=512",), 0),
        (("actor.ppo_mini_batch_size=512", "actor.ppo_epochs=2"), 0),
        (("actor.ppo_epochs=2",), 1 - 1 / 16),
        (("algorithm.entropy_top_share=0.2",), 1),
    ],
)
def test_old_log_probabilities_are_computed_for_all_but_the_first_optimizer_step(overrides, share):
    step = Step(*planned(*overrides))
    assert step.extra_passes.get("old log-probabilities", 0) == share
    if share:
        forward = step.work["forward"]["attention"] / step.cfg.actor.ppo_epochs
        assert step.work["old log-probabilities"]["attention"] == pytest.approx(share * forward)


def test_the_table_of_predicted_mfu_is_what_the_plan_says():
    assert mfu_table() in (ROOT / "dapo/tools/bench/RESULTS.md").read_text(encoding="utf-8")


LEVERS = [
    ({"actor.compile": True}, ("elementwise", "head", "waiting for the host")),
    ({"model.attn_implementation": "fa3"}, ("attention",)),
    ({"plan.attention": "fa3"}, ("attention",)),
    ({"model.gradient_checkpointing": "selective"}, ("matrices", "attention")),
    ({"model.gradient_checkpointing": "none"}, ("matrices", "attention", "elementwise")),
    ({"actor.reshard_after_forward": False}, ("FSDP",)),
    ({"model.head_dtype": "float32"}, ("head",)),
    ({"model.lora.rank": 8}, ("matrices", "head", "FSDP", "AdamW")),
]


@pytest.mark.parametrize(("change", "kinds"), LEVERS, ids=lambda value: str(value))
def test_a_lever_takes_time_from_its_kind_of_work_alone(change, kinds):
    before = benched("0.5B", 4096, "H200") if "actor.compile" in change else benched("7B", 20480, "H200")
    after = Step(changed(before.cfg, change), before.shape)
    spent = [{kind: sum(each.get(kind, 0) for each in step.work.values()) for kind in WORK} for step in (before, after)]
    assert [kind for kind in WORK if spent[1][kind] < spent[0][kind]] == [kind for kind in WORK if kind in kinds]
    assert after.update_s < before.update_s


def test_selective_checkpointing_takes_the_time_of_the_host_until_it_is_compiled():
    before = benched("0.5B", 4096, "H200")
    selective = Step(changed(before.cfg, {"model.gradient_checkpointing": "selective"}), before.shape)
    compiled = Step(changed(selective.cfg, {"actor.compile": True}), before.shape)
    assert compiled.update_s < before.update_s < selective.update_s


def test_levers_are_told_and_only_what_fits_is_recommended():
    cfg, shape = planned(experiment="dapo_qwen32b_hybrid")
    found, (together, best) = levers(cfg, shape)
    fits = {words(change): fits for change, _, fits in found}
    assert not fits["model.gradient_checkpointing=none"] and fits["actor.compile=true"]
    assert together.keys() >= {"actor.compile", "model.attn_implementation"} and problems(best.cfg, shape) == []
    assert together.get("model.gradient_checkpointing") != "none"
    assert best.update_s < min(step.update_s for change, step, fits in found if fits and change.keys() & together)
    assert not any(key.startswith("algorithm.") for key in together), "it would be another loss"
    assert levers(best.cfg, shape)[1][0] == {}
    slow, _ = levers(*planned("actor.max_tokens_per_gpu=2816", "plan.network_bandwidth=5e9"))
    assert {"actor.fsdp_size": 8} in [change for change, *_ in slow]
    lines = report(cfg, shape).partition("\nLEVERS")[2].partition("\n\n")[0].splitlines()[1:]
    assert "as it is" in lines[0] and any("does not fit" in line for line in lines)


def test_a_weight_sync_as_measured_and_by_one_sender_of_400g():
    """`transfer` of the cycles in dapo/tools/bench/RESULTS.md; 7B in a second and 32B in four need no second sender."""
    for model, seconds in (("0.5B", 0.30), ("1.5B", 0.33), ("7B", 0.64)):
        step = Step(*planned(f"model.path=Qwen/Qwen2.5-{model}", experiment="dapo_qwen0.5b_1gpu"))
        assert step.sync_s == pytest.approx(seconds, rel=0.13)
    small, large = (Step(*planned(*APART, experiment=name)) for name in ("dapo_qwen7b", "dapo_qwen32b"))
    assert small.sync_s < 1 and large.sync_s < 4
    gather, send, load = large.bucket_s
    first = large.shape.embedding_parameters * 2
    assert send == pytest.approx(first / 50e9) and load > send > gather > 0
    slow = Step(changed(large.cfg, {"plan.network_bandwidth": 12.5e9}), large.shape)
    assert slow.sync_s - large.sync_s == pytest.approx(large.sync_bytes * (1 / 12.5e9 - 1 / 50e9), rel=0.01)


def test_a_sync_costs_the_cache_of_running_requests_unless_it_is_kept():
    cfg, shape = planned(experiment="dapo_qwen7b")
    stale = changed(cfg, {"filter_groups.max_staleness": 1})
    kept, engine = changed(stale, {"weight_sync.keep_kv_cache": True}), EngineMemory(cfg, shape)
    (now, _), (before, _), (after, _) = (Step(each, shape).generation_s(engine) for each in (stale, cfg, kept))
    assert before == after and 0.07 < (now - before) / now < 0.13
    running = engine.running(256, Step(cfg, shape).responses)
    tokens = running * engine.held(256, Step(cfg, shape).responses)
    assert now - before == pytest.approx(tokens * 2 * shape.num_layers * shape.layer_matrices / 0.62 / 989e12, rel=0.1)
    assert "had in the KV cache" in report(stale, shape) and "had in the KV cache" not in report(kept, shape)


def test_packing_is_the_actors_own():
    cfg, shape = planned("actor.ppo_mini_batch_size=4", "data.train_batch_size=4", ALONE)
    step, equal_at = Step(cfg, shape), shape.attention_equals_rest_tokens
    bins = [pack([256 + r for r in step.responses[k : k + 64]], 64, 22_528, equal_at) for k in range(0, 256, 64)]
    assert step.packing.micro_batches == round(sum(len(ranks[0]) for ranks in bins) / 4)


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        pytest.param(["actor.ppo_mini_batch_size=2", ALONE], "ranks wait for the heaviest", id="idle"),
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
