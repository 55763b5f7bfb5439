"""Writes the plan as text: memory of a rank and of an engine, checkpoint, one step's work and time, with arithmetic."""

import textwrap

from dapo.config.derived import device_of, lends, lent_engines, optimizer_steps, shares_gpus
from dapo.config.facts.model_shape import ModelShape
from dapo.config.plan import PlannedConfig
from dapo.tools.plan.actor import ActorMemory
from dapo.tools.plan.engine import EngineMemory
from dapo.tools.plan.fit import OTHER_LOSS, Change, hints, levers, room_for_actors, words
from dapo.tools.plan.operations import attention_of
from dapo.tools.plan.step import TEXT_BYTES, Lead, Step, mean_tokens, on_disk
from dapo.tools.plan.terms import duration, short, size, table, together

AGAIN = "to compute again what running requests had in the KV cache at the sync (weight_sync.keep_kv_cache)"


def report(cfg: PlannedConfig, shape: ModelShape) -> str:
    """Returns all sections. Sizes are decimal: 1 GB = 10^9 bytes."""
    sections = [_model, _actor, _engine, _disk, _step, _time, _levers, _lead, _hints]
    if device_of(cfg) == "cpu":
        sections.remove(_levers)
    return "\n\n".join("\n".join(section(cfg, shape)) for section in sections)


def _model(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    engine = EngineMemory(cfg, shape)
    gpus = cfg.rollout.num_engines * engine.gpus // engine.sharing
    layout = f"{cfg.actor.num_workers} actor ranks, {cfg.rollout.num_engines} engines on {gpus}"
    if cfg.trainer.colocate == "time":
        layout = f"both on the same {max(gpus, cfg.actor.num_workers)}, in turn"
    elif lends(cfg):
        layout += f", {lent_engines(cfg)} more on the ranks' when that pays"
    return [
        f"model {cfg.model.path}: {shape.parameters:,} parameters = {shape.num_layers} layers x "
        f"{shape.layer_parameters:,} + embedding{'' if shape.tie_word_embeddings else ' and head'} "
        f"{shape.root_parameters - shape.hidden_size:,} + final norm {shape.hidden_size:,}",
        f"{'GPUs' if device_of(cfg) == 'cuda' else 'CPU processes'}: {layout}; memory "
        f"{size(cfg.plan.gpu_memory_bytes)} (plan.gpu_memory_bytes)",
    ]


def _actor(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    memory = ActorMemory(cfg, shape)
    peak, room = memory.peak(), room_for_actors(cfg, shape)
    lines = [
        f"ACTOR RANK (1 of {cfg.actor.num_workers}: {memory.shards} shards x "
        f"{cfg.actor.num_workers // memory.shards} copies; sequence parallel "
        f"{cfg.actor.ulysses_sequence_parallel_size}; {cfg.actor.max_tokens_per_gpu:,} tokens; checkpointing "
        f"{cfg.model.gradient_checkpointing})"
    ]
    if offloaded := memory.offloaded():
        lines += ["in host memory:", *table(offloaded, "together per rank")]
    lines += ["at all times:", *table(memory.resident(), "together")]
    for phase in memory.phases():
        own = phase.terms[len(memory.resident()) :]
        lines += [f"and in phase `{phase.name}`:", *table(own), f"  in all {size(phase.total)}"]
    if shares_gpus(cfg):
        beside = memory.beside()
        lines += [f"while an engine has the GPU, in phase `{beside.name}`:", *table(beside.terms, "in all")]
    if moved := memory.moved():
        lines += ["in host memory meanwhile:", *table(moved, "together per rank")]
    if copied := memory.copied():
        lines += ["in host memory while a checkpoint is written (checkpoint.async_save):", *table(copied)]
    if kept := memory.kept():
        lines += ["in host memory for lost ranks (checkpoint.memory_copies), in Ray's object store:", *table(kept)]
    if host := memory.on_host():
        lines.append(f"host memory of a node for its ranks: {size(host)}")
    verdict = "fits" if peak.total <= room else "DOES NOT FIT"
    lines.append(f"peak {size(peak.total)} in `{peak.name}`; room {size(room)}: {verdict}")
    return lines


def _engine(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    engine, (prompt, response) = EngineMemory(cfg, shape), mean_tokens(cfg)
    layers, heads, head_dim, width = engine.kv_factors
    return [
        f"ENGINE (1 of {cfg.rollout.num_engines}, per GPU of {engine.gpus}"
        f"{f', {engine.sharing} on each' if engine.sharing > 1 else ''})",
        *table(engine.terms(), "together"),
        *(["beyond its share, in a weight sync:", *table(engine.beyond(), "together")] if engine.beyond() else ()),
        f"  KV cache per token and GPU: {engine.kv_bytes_per_token:,} B = 2 x {layers} layers x "
        f"{heads} key-value heads x {head_dim} x {width} B",
        f"  {engine.kv_tokens:,} tokens in blocks of {engine.block}: {engine.at_full_length:.1f} sequences of full "
        f"length ({engine.window:,} tokens), {engine.at_lengths(prompt, Step(cfg, shape).responses):.0f} growing ones "
        f"of {response:,} in the mean; at most rollout.vllm.max_num_seqs = {engine.max_num_seqs}",
    ]


def _disk(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    checkpoint = ActorMemory(cfg, shape).checkpoint()
    return [
        "CHECKPOINT ON DISK",
        *table(checkpoint, "together"),
        f"OUTPUT DIRECTORY AT ITS FULLEST (assumed: {TEXT_BYTES} B of text per token)",
        *table(on_disk(cfg, together(checkpoint)), "together"),
    ]


def _step(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    step, packing, (prompt, response) = Step(cfg, shape), Step(cfg, shape).packing, mean_tokens(cfg)
    backward = step.epoch.backward
    epochs = f", x {cfg.actor.ppo_epochs} epochs" if cfg.actor.ppo_epochs > 1 else ""
    return [
        f"ONE STEP (assumed lengths: mean prompt {prompt:,}, mean response {response:,} tokens, log-normal with sigma "
        f"{cfg.plan.length_sigma:g})",
        f"  trains on {cfg.data.train_batch_size} prompts x {cfg.rollout.n} responses = {step.sequences:,} sequences, "
        f"{short(step.trained_tokens)} tokens, in {optimizer_steps(step.cfg)} optimizer steps",
        f"  generates {short(step.generated_tokens)} response tokens = {step.sequences:,} x {response:,} / "
        f"{step.kept_rate:g} (assumed share of mixed groups)",
        f"  one forward pass over the batch: {short(step.forward_flops, 'FLOP')}",
        *(f"  pass for {name}: {short(part * step.forward_flops, 'FLOP')}" for name, part in step.extra_passes.items()),
        f"  update: {short(step.update_flops, 'FLOP')} = matrices x (1 + {backward.layers:.2f}) + head x "
        f"(1 + {backward.head}) + attention x (1 + {backward.attention + backward.attention_backward:g}){epochs}",
        f"  micro-batches per optimizer step: {packing.micro_batches} on each of {step.rank_groups} groups of ranks, "
        f"{packing.filled:.0%} full; the mean rank does {packing.balance:.0%} of the heaviest's work",
    ]


def _time(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    step, engine, plan = Step(cfg, shape), EngineMemory(cfg, shape), cfg.plan
    if device_of(cfg) == "cpu":
        return ["TIME: not estimated without GPUs"]
    throughput_s, longest_s = step.generation_s(engine)
    gain_s = step.lending_s(engine) if lends(cfg) else 0.0
    generation_s = max(throughput_s - gain_s, longest_s)
    both_s = max(generation_s, step.update_s) if step.overlaps else generation_s + step.update_s
    whole = both_s + step.sync_s + step.switch_s
    running = engine.running(mean_tokens(cfg)[0], step.responses)
    order = "the slower of generation and update" if step.overlaps else "generation and update one after the other"
    lines = [
        f"TIME (assumed: {short(plan.gpu_flops, 'FLOP/s')} per GPU, of which matrices reach {plan.matrix_share:.0%}, "
        f"attention by {attention_of(cfg)}; {short(plan.gpu_bandwidth, 'B/s')}, of which decoding reaches "
        f"{plan.bandwidth_share:.0%} and elementwise work {plan.memory_share:.0%};",
        f"  {plan.engine_step_s * 1000:g} ms more per decoding step, {plan.engine_sequence_s * 1e6:g} us of its host "
        "per token)",
        f"  generation {duration(generation_s)}: {cfg.rollout.num_engines} engines x {running} sequences, a token each "
        f"in {step.token_s(engine, running) * 1000:.1f} ms, take {duration(throughput_s)}; the longest response alone "
        f"{duration(longest_s)}",
        *([f"    of that {duration(again_s)} {AGAIN}"] if (again_s := step.again_s(engine)) else ()),
        f"  update {duration(step.update_s)}: MFU of forward and backward {step.mfu:.0%}",
    ]
    for name, (computing, wire) in step.passes.items():
        lines.append(
            f"    {name}: {duration(computing)} of computing, overlapped with {duration(wire)} of communication"
        )
    kinds = {kind: sum(each.get(kind, 0) for each in step.work.values()) for kind in (*step.work["forward"], "AdamW")}
    shares = [(seconds / sum(kinds.values()), kind) for kind, seconds in kinds.items()]
    words_of = [f"{kind} {share:.0%}" for share, kind in sorted(shares, reverse=True) if share > 0.005]
    lines.append(f"    computing: {', '.join(words_of)}")
    if step.offload_s:
        lines.append(f"    gradients added up on the host, with nothing computed meanwhile: {duration(step.offload_s)}")
    gather, send, load = (f"{seconds * 1000:.0f} ms" for seconds in step.bucket_s)
    lines.append(
        f"  weight sync {duration(step.sync_s)}: {size(step.sync_bytes)} in buckets, gathered in {gather} while "
        f"the one before is sent in {send} and loaded in {load}, and {plan.sync_layer_s * 1000:g} ms per layer"
    )
    if shares_gpus(cfg):
        lines.append(f"  switch {duration(step.switch_s)} (plan.switch_s, and the optimizer to the host and back)")
    if lends(cfg):
        count = lent_engines(cfg)
        lines.append(
            f"  lending: {count} engines on the ranks' GPUs save {duration(gain_s)} of generation (0: would not pay)"
        )
    lines.append(
        f"  step {duration(whole)}: {order} (filter_groups.max_staleness={cfg.filter_groups.max_staleness}), "
        f"{short(step.trained_tokens / whole)} trained tokens/s"
    )
    return lines


def _levers(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    found, (together, best) = levers(cfg, shape)
    rows = [("as it is", Step(cfg, shape), Change())]
    for change, step, fits in found:
        rows.append(("another loss" if OTHER_LOSS in change else "" if fits else "does not fit", step, change))
    rows += [("all that fit", best, together)] if together else []
    lines = [f"{duration(step.update_s):>10} {step.mfu:5.0%}  {note:<12}  {words(keys)}" for note, step, keys in rows]
    wrapped = (textwrap.fill(one, 116, subsequent_indent=32 * " ", break_on_hyphens=False) for one in lines)
    return ["LEVERS, each alone (seconds of the update, MFU)", *wrapped]


def _lead(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    lead = Lead(cfg, shape)
    return [
        f"SIGNAL BEFORE A TIME LIMIT: {lead.seconds:,} s, for an update of {duration(lead.update_s)} and a save of "
        f"{duration(lead.save_s)} (assumed: plan.storage_bandwidth {size(cfg.plan.storage_bandwidth)}/s)"
    ]


def _hints(cfg: PlannedConfig, shape: ModelShape) -> list[str]:
    found = [*hints(cfg, shape)]
    lines = [textwrap.fill(line, 116, initial_indent="  - ", subsequent_indent="    ") for line in found]
    return ["DIVIDES BADLY", *lines] if found else ["DIVIDES BADLY: nothing found"]
