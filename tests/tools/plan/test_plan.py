"""The planner: it answers every experiment, refuses what cannot fit with changes that are enough, and adds up."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dapo.config.compose import experiments
from dapo.config.derived import device_of
from dapo.report.store.schema import DATABASE
from dapo.state.batches import BATCHES
from dapo.state.journal import JOURNAL
from dapo.tools.plan.actor import ActorMemory, adapter_parameters
from dapo.tools.plan.engine import MAX_NUM_SEQS, EngineMemory
from dapo.tools.plan.fit import changed, problems
from dapo.tools.plan.report import report
from dapo.tools.plan.step import Step, on_disk
from dapo.tools.plan.terms import size
from tests.support.plan.plans import planned

ROOT = Path(__file__).resolve().parents[3]
GB = 1e9
STEP = 16_384 * (300 + 4 * 6826)  # bytes of a step of 32B in the sample store


def term(phase, name):
    (found,) = [one.amount for one in phase.terms if one.name.startswith(name)]
    return found


def phase(memory, name):
    (found,) = [one for one in memory.phases() if one.name.startswith(name)]
    return found


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_is_answered_and_fits(name):
    cfg, shape = planned(experiment=name)
    text = report(cfg, shape)
    assert problems(cfg, shape) == []
    for heading in (
        "ACTOR RANK",
        "ENGINE",
        "CHECKPOINT",
        "OUTPUT DIRECTORY",
        "ONE STEP",
        "TIME",
        "SIGNAL",
        "DIVIDES BADLY",
    ):
        assert f"\n{heading}" in text
    assert ("\nLEVERS" in text) == (device_of(cfg) == "cuda")
    assert max(len(line) for line in text.splitlines()) < 200


def test_refusal_ends_with_1_and_one_message_and_needs_no_worker():
    program = (
        "import sys; from dapo.tools.plan import __main__ as plan\n"
        "sys.argv = ['plan', '+experiment=dapo_qwen7b', 'plan.gpu_memory_bytes=24e9']\n"
        "try: plan.main()\n"
        "finally: print('loaded', {'ray', 'vllm', 'workers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "DOES NOT FIT" in done.stdout and done.stdout.endswith("loaded set()\n")
    assert done.stderr.startswith("dapo: an actor rank needs ") and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "checkpoints", "store", "batches", "segments"),
    [
        ((), 4, 50e9 + 2 * STEP, 20, 4),
        (("logging.max_store_bytes=0",), 4, 1000 * STEP, 20, 4),
        (("trainer.total_steps=2", "checkpoint.batches=7"), 2, 2 * STEP, 2, 2),
        (("trainer.only=rollout", "logging.max_store_bytes=1"), 4, 1000 * 16_384 * 300 + 2 * STEP, 1000, 4),
    ],
)
def test_what_a_run_of_32b_writes_is_counted(overrides, checkpoints, store, batches, segments):
    cfg, _ = planned(*overrides)
    counted = {term.name: term.amount for term in on_disk(cfg, 459e9)}
    group = 6826 * 12
    assert counted == {
        "checkpoints": checkpoints * 459e9,
        DATABASE: store,
        BATCHES: batches * 8192 * group,
        JOURNAL: segments * 16_384 * group,
    }


def test_state_of_32b_by_hand():
    cfg, shape = planned("actor.offload=none")
    memory = ActorMemory(cfg, shape)
    assert [t.amount for t in memory.state()] == [each * 32_763_876_352 / 64 for each in (4, 4, 8)]
    backward = phase(memory, "backward")
    assert term(backward, "2 layers gathered") == 2 * 2 * 487_605_248
    assert term(backward, "head and final norm") == 2 * (152_064 * 5_120 + 5_120)
    assert term(backward, "activations kept") == 22_528 * (63 * 2 * 5_120 + 2 * 2 * 128)
    assert backward.total == sum(one.amount for one in backward.terms)


def test_a_copy_for_checkpoints_is_stated_and_must_fit_beside_what_is_offloaded():
    cfg, shape = planned("actor.offload=host", "checkpoint.async_save=true")
    memory, parameters = ActorMemory(cfg, shape), shape.parameters
    assert [term.amount for term in memory.copied()] == [12 * parameters / 64, 2 * parameters]
    assert memory.on_host() == pytest.approx(8 * (16 + 12) * parameters / 64 + 2 * parameters)
    assert f"host memory of a node for its ranks: {size(memory.on_host())}" in report(cfg, shape)
    assert problems(changed(cfg, {"plan.host_memory_bytes": memory.on_host()}), shape) == []
    (message,) = problems(changed(cfg, {"plan.host_memory_bytes": memory.on_host() - 1}), shape)
    assert "checkpoint.async_save=false" in message and size(memory.on_host()) in message
    alone = ActorMemory(changed(cfg, {"checkpoint.hf_export": False, "actor.offload": "none"}), shape)
    assert alone.on_host() == pytest.approx(8 * 12 * parameters / 64)
    lora = ActorMemory(changed(cfg, {"model.lora.rank": 8}), shape)
    assert lora.copied()[0].amount == 12 * lora.trained / 64
    kept = changed(cfg, {"checkpoint.async_save": False, "checkpoint.memory_copies": 1})
    assert ActorMemory(kept, shape).copied() == ()
    assert ActorMemory(kept, shape).on_host() == pytest.approx(8 * (16 + 2 * 12) * parameters / 64)
    assert "(checkpoint.memory_copies), in Ray's object store" in report(kept, shape)


def test_all_ranks_and_engines_share_the_memory_of_a_machine_without_gpus():
    cfg, shape = planned(experiment="dapo_tiny")
    memory, engine = ActorMemory(cfg, shape), EngineMemory(cfg, shape)
    whole = 2 * memory.peak().total + sum(term.amount for term in engine.terms())
    assert problems(changed(cfg, {"plan.gpu_memory_bytes": whole * (1 + 1e-9)}), shape) == []
    [problem] = problems(changed(cfg, {"plan.gpu_memory_bytes": whole - 1}), shape)
    assert problem.startswith("all ranks and engines need ")


def test_offload_moves_the_state_to_the_host():
    cfg, shape = planned("actor.offload=host")
    off, on = ActorMemory(changed(cfg, {"actor.offload": "none"}), shape), ActorMemory(cfg, shape)
    assert off.peak().total - on.peak().total == pytest.approx(16 * shape.parameters / 64)
    assert sum(t.amount for t in on.offloaded()) == pytest.approx(16 * shape.parameters / 64)
    assert off.offloaded() == ()


@pytest.mark.parametrize(
    ("overrides", "grows"),
    [
        pytest.param(["model.gradient_checkpointing=selective"], True, id="selective"),
        pytest.param(["actor.max_tokens_per_gpu=45056"], True, id="tokens"),
        pytest.param(["actor.fsdp_size=8", "actor.offload=none"], True, id="copies"),
        pytest.param(["actor.reshard_after_forward=false"], True, id="gathered"),
        pytest.param(["actor.ulysses_sequence_parallel_size=8", "actor.max_tokens_per_gpu=2816"], False, id="shared"),
    ],
)
def test_each_key_moves_the_peak_its_way(overrides, grows):
    before, after = ActorMemory(*planned()).peak().total, ActorMemory(*planned(*overrides)).peak().total
    assert (after > before) if grows else (after < before)


def test_a_reference_costs_where_a_coefficient_asks_for_it():
    cfg, shape = planned("algorithm.kl.loss_coeff=0.001", experiment="dapo_qwen7b")
    memory = ActorMemory(cfg, shape)
    assert [t.amount for t in memory.offloaded()] == [2 * shape.parameters / 4]
    assert "reference log-probabilities" in Step(cfg, shape).extra_passes
    lora = changed(cfg, {"model.lora.rank": 16})
    assert ActorMemory(lora, shape).offloaded() == ()


def test_lora_trains_adapters_alone():
    cfg, shape = planned("model.lora.rank=16", experiment="dapo_qwen7b")
    per_layer = 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert adapter_parameters(cfg, shape) == 28 * per_layer
    assert ActorMemory(cfg, shape).checkpoint()[0].amount == 12 * 28 * per_layer
    full = ActorMemory(changed(cfg, {"model.lora.rank": 0}), shape)
    assert ActorMemory(cfg, shape).peak().total < full.peak().total - 13 * shape.parameters / 4
    some = changed(cfg, {"model.lora.target_modules": ["q_proj"]})
    assert adapter_parameters(some, shape) == 28 * 16 * (3584 + 3584)


def test_a_mixture_of_experts():
    """What one token goes through counts for time and activations, all experts count for memory."""
    cfg, shape = planned("model.path=Qwen/Qwen3-30B-A3B")
    assert problems(cfg, shape) == []
    experts = 128 * 3 * 2048 * 768
    assert shape.flops_per_token < 2 * 3.36e9 < shape.parameters / 4
    assert (shape.loaded_at_once, shape.largest_parameter) == (experts, experts // 3 * 2)
    sync = phase(ActorMemory(cfg, shape), "weight sync")
    assert term(sync, "one parameter gathered") == 2 * 2 * experts // 3 * 2
    assert EngineMemory(cfg, shape).weights().amount == 2 * shape.parameters / 4
    assert Step(cfg, shape).epoch.backward.layers == 2 + 1, "a router's gradient needs the value of `down` too"
    lora = changed(cfg, {"model.lora.rank": 16})
    attention = 2 * (2048 + 4096) + 2 * (2048 + 512)
    assert adapter_parameters(lora, shape) == 48 * 16 * attention, "experts have no adapters"
    assert "Qwen/Qwen3-30B-A3B: 30,532,122,624 parameters" in report(cfg, shape)


def test_the_engine_by_hand():
    cfg, shape = planned()
    engine = EngineMemory(cfg, shape)
    assert engine.kv_bytes_per_token == 2 * 64 * 8 * 128 * 2 / 4
    assert engine.weights().amount == 2 * shape.parameters / 4
    table = 2 * 152_064 * 5_120
    assert [t.amount for t in engine.beyond()] == [table, table * (1 + 1 / 4)], "a bucket, a copy, a part of four"
    *used, cache = engine.terms()
    assert sum(t.amount for t in used) + cache.amount == pytest.approx(0.8 * 80 * GB)
    assert engine.kv_tokens % 16 == 0 and engine.kv_tokens * 65_536 <= cache.amount < (engine.kv_tokens + 16) * 65_536
    wide = EngineMemory(changed(cfg, {"rollout.vllm.tensor_parallel_size": 16}), shape)
    assert wide.kv_bytes_per_token == 2 * 64 * 128 * 2


@pytest.mark.parametrize(
    ("experiment", "overrides"),
    [
        pytest.param("dapo_qwen7b", ["plan.gpu_memory_bytes=40e9"], id="memory"),
        pytest.param("dapo_qwen7b", ["model.gradient_checkpointing=none"], id="recomputation"),
        pytest.param("dapo_qwen7b", ["actor.max_tokens_per_gpu=200000"], id="tokens"),
        pytest.param("dapo_qwen7b", ["actor.fsdp_size=1"], id="copies"),
        pytest.param("dapo_qwen7b", ["actor.reshard_after_forward=false"], id="gathered"),
        pytest.param("dapo_qwen32b", ["actor.num_workers=8", "actor.offload=none"], id="ranks"),
        pytest.param("dapo_qwen32b", ["data.max_response_length=100000", "actor.max_tokens_per_gpu=102048"], id="long"),
    ],
)
def test_each_change_it_names_is_enough(experiment, overrides):
    cfg, shape = planned(*overrides, experiment=experiment)
    found = [one for one in problems(cfg, shape) if one.startswith("an actor rank")]
    assert len(found) == 1, "the case must not fit"
    for one in found[0].split(" any of these makes it fit: ")[1].split("; "):
        fixed, _ = planned(*overrides, *one.split(), experiment=experiment)
        assert not [p for p in problems(fixed, shape) if p.startswith("an actor rank")], one


def test_nothing_is_promised_where_nothing_helps():
    cfg, shape = planned("plan.gpu_memory_bytes=5e9", "actor.num_workers=8", "actor.offload=host")
    message = problems(cfg, shape)[0]
    assert "makes it fit" not in message and message.endswith("take a smaller model or larger GPUs")
    # What it names to be combined is the least that single changes reach, in bytes: shorter micro-batches.
    least = ActorMemory(changed(cfg, {"actor.max_tokens_per_gpu": 2816}), shape).peak().total
    assert f"combine what saves most (actor.max_tokens_per_gpu=2816 ({size(least)})" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["rollout.vllm.tensor_parallel_size=1"], "an engine needs", id="cache"),
        pytest.param(["plan.host_memory_bytes=60e9"], "the ranks of a node keep 65.53 GB in host memory", id="host"),
        pytest.param(
            ["rollout.vllm.gpu_memory_utilization=0.96"],
            "rollout.vllm.gpu_memory_utilization=0.95",
            id="arriving-weights",
        ),
        pytest.param(["rollout.vllm.gpu_memory_utilization=0.25"], "gpu_memory_utilization=0.28", id="utilization"),
    ],
)
def test_engines_and_hosts_that_cannot_fit(overrides, message):
    cfg, shape = planned("actor.offload=host", *overrides)
    (found,) = problems(cfg, shape)
    assert message in found
    if enough := re.search(r"gpu_memory_utilization=(0.28)", found):
        cfg, shape = planned(f"rollout.vllm.gpu_memory_utilization={enough[1]}")
        assert problems(cfg, shape) == [] and EngineMemory(cfg, shape).at_full_length < 2


@pytest.mark.parametrize("experiment", ["dapo_qwen7b", "dapo_qwen7b_hybrid", "dapo_qwen0.5b_1gpu"])
def test_a_cache_of_so_many_bytes_counts_whatever_share_is_given(experiment):
    """vLLM takes it beside weights and working memory, and looks at no share."""
    cfg, shape = planned(experiment=experiment)
    key = "rollout.vllm.kv_cache_memory_bytes"
    for given in (int(cfg.plan.gpu_memory_bytes), 1_000_000):
        [problem] = problems(changed(cfg, {key: given}), shape)
        enough = int(re.search(rf"{key}=(\d+)", problem)[1])
        assert problems(changed(cfg, {key: enough}), shape) == [] and "gpu_memory_utilization" not in problem


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["rollout.vllm.gpu_memory_utilization=0.25"], id="share"),
        pytest.param(["rollout.vllm.gpu_memory_utilization=0.25", "trainer.colocate=none"], id="apart"),
        pytest.param(["rollout.vllm.kv_cache_memory_bytes=1000000"], id="bytes"),
        pytest.param(["rollout.vllm.kv_cache_memory_bytes=400000000", "data.max_prompt_length=1024"], id="shorter"),
        pytest.param(["model.path=Qwen/Qwen2.5-32B", "rollout.vllm.gpu_memory_utilization=0.7"], id="wider"),
    ],
)
def test_each_change_that_it_names_for_an_engine_is_enough_and_allowed(overrides):
    offload = ("actor.offload=none",) if "trainer.colocate=none" in overrides else ()
    cfg, shape = planned(*overrides, *offload, experiment="dapo_qwen7b_hybrid")
    before = problems(cfg, shape)
    [problem] = [one for one in before if one.startswith("an engine needs")]
    for words in problem.split(" any of these makes it fit: ")[1].split("; "):
        after = problems(*planned(*overrides, *offload, *words.split(), experiment="dapo_qwen7b_hybrid"))
        assert len(after) < len(before) and not any(one.startswith("an engine needs") for one in after)


def test_an_argument_without_a_value_has_vllms_default():
    cfg, shape = planned("rollout.vllm.max_num_seqs=null", "+rollout.vllm.max_model_len=null", experiment="dapo_qwen7b")
    assert EngineMemory(cfg, shape).max_num_seqs == MAX_NUM_SEQS and "KV cache" in report(cfg, shape)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["+plan.none=1"], "unknown key `plan.none`", id="key"),
        pytest.param(["plan.matrix_share=2"], "`plan.matrix_share` (2.0) must be above 0 and at most 1", id="share"),
        pytest.param(["plan.mean_response_tokens=30000"], "must be at most `data.max_response_length`", id="mean"),
        pytest.param(["model.path=nobody/nothing"], "no config.json", id="model"),
        pytest.param(["+rollout.vllm.kv_cache_dtype=nvfp4"], "`rollout.vllm.kv_cache_dtype` (nvfp4)", id="cache"),
        pytest.param(["+rollout.vllm.dtype=half"], "`rollout.vllm.dtype` (half)", id="width"),
        pytest.param(["+rollout.vllm.quantization=fp8"], "`rollout.vllm.quantization` (fp8)", id="quantization"),
    ],
)
def test_what_it_cannot_predict_is_an_error(overrides, message):
    with pytest.raises(ValueError) as error:
        planned(*overrides)
    assert message in str(error.value)
