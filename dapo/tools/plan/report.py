"""Writes the plan as text: memory of a rank and of an engine, checkpoint, one step's work and time, with arithmetic."""

import textwrap

from dapo.config.derived import device_of, gpus_per_engine, lends, lent_engines, optimizer_steps, shares_gpus
from dapo.config.facts.model_shape import ModelShape
from dapo.config.plan import PlannedConfig
from dapo.tools.plan.actor import ActorMemory
from dapo.tools.plan.engine import EngineMemory
from dapo.tools.plan.fit import hints, room_for_actors
from dapo.tools.plan.step import TEXT_BYTES, Lead, Step, mean_tokens, on_disk, sync_bytes
from dapo.tools.plan.terms import duration, short, size, table, together


def report(cfg: PlannedConfig, shape: ModelShape) -> str:
    """Returns all sections. Sizes are decimal: 1 GB = 10^9 bytes."""
    sections = [_model, _actor, _engine, _checkpoint, _disk, _step, _time, _lead, _hints]
    return "\n\n".join("\n".join(section(cfg, shape)) for section in sections)


def _model(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    gpus = cfg.rollout.num_engines * EngineMemory(cfg, shape).gpus
    roles = f"{cfg.actor.num_workers} actor ranks, {cfg.rollout.num_engines} engines on {gpus}"
    judge = cfg.reward.judge.engine
    on_gpus = (device_of(cfg) if judge.device == "auto" else judge.device) == "cuda"
    judge_gpus = judge.num_engines * gpus_per_engine(judge.vllm) if on_gpus else 0
    beside = f", {judge.num_engines} judges on {judge_gpus} GPUs" if judge.path else ""
    same = f"both on the same {max(gpus, cfg.actor.num_workers)}"
    more = f"{roles}, {lent_engines(cfg)} more on the ranks' when that pays"
    shared = {"none": roles, "time": f"{same}, in turn", "lend": more}
    where, layout = ("GPUs", shared[cfg.trainer.colocate]) if device_of(cfg) == "cuda" else ("CPU processes", roles)
    return [
        f"model {cfg.model.path}: {shape.parameters:,} parameters = {shape.num_layers} layers x "
        f"{shape.layer_parameters:,} + embedding{'' if shape.tie_word_embeddings else ' and head'} "
        f"{shape.root_parameters - shape.hidden_size:,} + final norm {shape.hidden_size:,}",
        f"  attention costs as much as all matrices at {shape.attention_equals_rest_tokens:,} tokens; "
        f"{short(shape.flops_per_token, 'FLOP')} per token forward without it",
        f"{where}: {layout}{beside}; memory {size(cfg.plan.gpu_memory_bytes)} (plan.gpu_memory_bytes"
        f"{')' if device_of(cfg) == 'cuda' else ', shared by all)'}",
    ]


def _actor(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    memory = ActorMemory(cfg, shape)
    peak = memory.peak()
    copies = cfg.actor.num_workers // memory.shards
    lines = [
        f"ACTOR RANK (1 of {cfg.actor.num_workers}: {memory.shards} shards x {copies} copies; sequence parallel "
        f"{cfg.actor.ulysses_sequence_parallel_size}; {cfg.actor.max_tokens_per_gpu:,} tokens; checkpointing "
        f"{cfg.model.gradient_checkpointing})"
    ]
    if offloaded := memory.offloaded():
        ranks = min(cfg.plan.gpus_per_node, cfg.actor.num_workers)
        lines += ["in host memory:", *table(offloaded, "together per rank")]
        lines.append(f"  x {ranks} ranks of a node: {size(ranks * together(offloaded))}")
    lines += ["at all times:", *table(memory.resident(), "together")]
    resident = {term.name for term in memory.resident()}
    for phase in memory.phases():
        own = [term for term in phase.terms if term.name not in resident]
        lines += [f"and in phase `{phase.name}`:", *table(own), f"  in all {size(phase.total)}"]
    if shares_gpus(cfg):
        beside, resting = memory.beside(), memory.resting()
        lines += ["while an engine has the GPU:", *table(resting, "together")]
        lines += [f"and in phase `{beside.name}`:", *table(beside.terms[len(resting) :])]
        lines.append(f"  in all {size(beside.total)}")
    if moved := memory.moved():
        lines += ["in host memory meanwhile:", *table(moved, "together per rank")]
    room = room_for_actors(cfg, shape)
    verdict = "fits" if peak.total <= room else "DOES NOT FIT"
    lines.append(f"peak {size(peak.total)} in `{peak.name}`; room {size(room)}: {verdict}")
    return lines


def _engine(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    engine, (prompt, response) = EngineMemory(cfg, shape), mean_tokens(cfg)
    responses, (key, admitted) = Step(cfg, shape).responses, engine.admitted
    layers, heads, head_dim, width = engine.kv_factors
    return [
        f"ENGINE (1 of {cfg.rollout.num_engines}, per GPU of {engine.gpus})",
        *table(engine.terms(), "together"),
        *(["beyond its share, in a weight sync:", *table(engine.beyond(), "together")] if engine.beyond() else ()),
        f"  KV cache per token and GPU: {engine.kv_bytes_per_token:,} B = 2 x {layers} layers x "
        f"{heads} key-value heads x {head_dim} x {width} B",
        f"  {engine.kv_tokens:,} tokens in blocks of {engine.block}: {engine.at_full_length:.1f} sequences of full "
        f"length ({engine.window:,} tokens), {engine.at_lengths(prompt, responses):.0f} growing ones of {response:,} "
        f"in the mean; at most rollout.vllm.{key} = {admitted}",
    ]


def _checkpoint(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    memory = ActorMemory(cfg, shape)
    terms = memory.checkpoint()
    if not terms:
        return ["CHECKPOINT ON DISK: no weights, for there are no actors (trainer.only)"]
    lines = ["CHECKPOINT ON DISK", *table(terms, "together")]
    if copied := memory.copied():
        lines += ["in host memory while it is written beside the next steps (checkpoint.async_save):", *table(copied)]
        lines.append(f"  with all ranks of the node of rank 0, and what they offload: {size(memory.on_host())}")
    return lines


def _disk(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    terms = on_disk(cfg, together(ActorMemory(cfg, shape).checkpoint()))
    return [f"OUTPUT DIRECTORY AT ITS FULLEST (assumed: {TEXT_BYTES} B of text per token)", *table(terms, "together")]


def _step(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    step, packing = Step(cfg, shape), Step(cfg, shape).packing
    prompt, response = mean_tokens(cfg)
    again, attention_again = step.recomputed
    lines = [
        "ONE STEP (assumed lengths: mean prompt "
        f"{prompt:,}, mean response {response:,} tokens, log-normal with sigma {cfg.plan.length_sigma:g})",
        f"  trains on {cfg.data.train_batch_size} prompts x {cfg.rollout.n} responses = {step.sequences:,} sequences, "
        f"{short(step.trained_tokens)} tokens, in {optimizer_steps(step.cfg)} optimizer steps",
        f"  generates {short(step.generated_tokens)} response tokens = {step.sequences:,} x {response:,} / "
        f"{step.kept_rate:g} (assumed share of mixed groups)",
        f"  one forward pass over the batch: {short(step.forward_flops, 'FLOP')}",
        *(f"  pass for {name}: {short(flops, 'FLOP')}" for name, flops in step.extra_passes.items()),
        f"  update: {short(step.update_flops, 'FLOP')} = matrices x (1 + {step.backward:g} + {again:.2f} again) "
        f"+ attention x (1 + 2.5 + {attention_again:g} again)"
        + (f", x {cfg.actor.ppo_epochs} epochs" if cfg.actor.ppo_epochs > 1 else ""),
        f"  micro-batches per optimizer step: {packing.micro_batches} on each of {step.rank_groups} groups of ranks, "
        f"{packing.filled:.0%} full, {packing.idle:.0%} empty; the mean rank does {packing.balance:.0%} of the "
        "heaviest's work",
    ]
    return lines


def _time(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    step, engine, plan = Step(cfg, shape), EngineMemory(cfg, shape), cfg.plan
    if device_of(cfg) == "cpu":
        return ["TIME: not estimated without GPUs"]
    throughput_s, longest_s = step.generation_s(engine)
    gain_s, lent_s = step.lending(engine)
    generation_s = max(throughput_s - gain_s, longest_s)
    sync_s = sync_bytes(shape) / plan.sync_bandwidth
    taken = shares_gpus(cfg) and not lends(cfg)  # both roles use the same GPUs
    overlap = cfg.filter_groups.max_staleness > 0 and not taken
    switch_s = step.switch_s
    whole = (max(generation_s, step.update_s) if overlap else generation_s + step.update_s) + sync_s + switch_s
    ranks_s = step.update_s + (generation_s if taken else lent_s)
    engines_s = generation_s + (step.update_s if taken else 0.0)
    running = engine.running(mean_tokens(cfg)[0], step.responses)
    order = "the slower of generation and update" if overlap else "generation and update one after the other"
    return [
        f"TIME (assumed: {short(plan.gpu_flops, 'FLOP/s')} per GPU, HFU {plan.hfu:.0%}, "
        f"{short(plan.gpu_bandwidth, 'B/s')} of which decoding reaches {plan.bandwidth_share:.0%}, "
        f"{plan.engine_step_s * 1000:g} ms more per decoding step, {plan.engine_sequence_s * 1e6:g} us of its host per "
        f"token, sync {short(plan.sync_bandwidth, 'B/s')})",
        f"  generation {duration(generation_s)}: {cfg.rollout.num_engines} engines x {running} sequences, a token each "
        f"in {step.token_s(engine, running) * 1000:.1f} ms, take {duration(throughput_s)}; the longest response alone "
        f"{duration(longest_s)}",
        f"  update {duration(step.update_s)}: MFU of forward and backward {step.mfu:.0%}",
        *(
            f"    {name}: {duration(computing)} of computing, overlapped with {duration(wire)} of communication"
            for name, (computing, wire) in step.passes.items()
        ),
        *(
            [f"    gradients added up on the host, with nothing computed meanwhile: {duration(step.offload_s)}"]
            if step.offload_s
            else []
        ),
        f"    each micro-batch brings a rank {size(step.traffic[0])} of parameters for either pass, "
        f"{size(step.traffic[1])} of gradients, at {short(step.bandwidth, 'B/s')} (assumed)",
        f"  weight sync {duration(sync_s)}: {size(sync_bytes(shape))}",
        *([f"  switch {duration(switch_s)}: {step.switch_formula}"] if shares_gpus(cfg) else []),
        *(_lending(cfg, gain_s, lent_s) if lends(cfg) else []),
        f"  idle: the GPUs of engines {1 - engines_s / whole:.0%}, those of ranks {1 - ranks_s / whole:.0%} of a step",
        f"  step {duration(whole)}: {order} (filter_groups.max_staleness={cfg.filter_groups.max_staleness}), "
        f"{short(step.trained_tokens / whole)} trained tokens/s",
    ]


def _lending(cfg: PlannedConfig, gain_s: float, lent_s: float) -> list[str]:
    count, why = lent_engines(cfg), f"plan.switch_s {cfg.plan.switch_s:g} s (assumed) to wake and to sleep"
    if not gain_s:
        return [f"  lending: {count} engines on the ranks' GPUs would not pay: {why}"]
    return [
        f"  lending: {count} engines on the ranks' GPUs serve for {duration(lent_s)}, and generation takes "
        f"{duration(gain_s)} less: {why}"
    ]


def _lead(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    return Lead(cfg, shape).lines()


def _hints(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    found = hints(cfg, shape)
    lines = [textwrap.fill(line, 116, initial_indent="  - ", subsequent_indent="    ") for line in found]
    return ["DIVIDES BADLY", *lines] if found else ["DIVIDES BADLY: nothing found"]
