"""Estimates tokens, FLOPs and seconds of one step; how long before a time limit a run must be signalled (`Lead`), and
how large its output directory gets (`on_disk`).

The response lengths are a fixed log-normal sample, truncated at the maximum, packed by the actors' own code
(`dapo.algorithm.packing`). A prompt is counted for each of its responses, but ranks compute a long one once for
several: the real update is then faster.
"""

import math
import random
from dataclasses import dataclass
from functools import cache, cached_property

from dapo.algorithm.packing import estimated_work, pack
from dapo.config.algorithm import BY_COVARIANCE
from dapo.config.derived import device_of, lends, lent_engines, optimizer_steps, resolve_transport, shares_gpus
from dapo.config.devices import gpus_per_engine
from dapo.config.facts.model_shape import ModelShape
from dapo.config.plan import PlannedConfig
from dapo.sampling.lending import Lending
from dapo.tools.plan.actor import ELEMENT_BYTES, ActorMemory, bucket_term
from dapo.tools.plan.engine import EngineMemory
from dapo.tools.plan.operations import OPTIMIZER, Operations, fsdp_bytes, launch_s, moving_s
from dapo.tools.plan.terms import Term, size, together

SAMPLED_MINIBATCHES = 4
ROOM = 1.5  # safety factor, the same as for `trainer.max_hours`
ENDING_S = 60.0  # for the processes to stop, and for Slurm's coarse timer
CPU_UPDATE_S = 60.0  # there are no estimates without GPUs; a tiny model's update takes a second or two
# Names in the output directory.
CHECKPOINTS, STORE, BATCHES, JOURNAL = "checkpoints", "samples.sqlite", "batches", "journal"
TEXT_BYTES = 4  # per token, about, for English with formulas
ARRAY_BYTES = 8  # per token: its id and its log-probability
ROW_BYTES = 300  # per response in the store, besides its text


def mean_tokens(cfg: PlannedConfig) -> tuple[int, int]:
    prompt = cfg.plan.mean_prompt_tokens or max(1, cfg.data.max_prompt_length // 8)
    return prompt, cfg.plan.mean_response_tokens or max(1, cfg.data.max_response_length // 3)


@cache
def response_lengths(cap: int, wanted: int, sigma: float, count: int) -> tuple[int, ...]:
    """Returns `count` lengths up to `cap` with the mean `wanted`, in a fixed random order. sigma: of their log."""
    rng = random.Random(0)
    spread = [math.exp(sigma * rng.gauss(0, 1)) for _ in range(count)]
    low, high = 0.0, 4.0 * cap
    for _ in range(50):  # bisection for the scale whose truncated mean is the wanted one
        middle = (low + high) / 2
        mean = sum(min(cap, middle * s) for s in spread) / count
        low, high = (middle, high) if mean < wanted else (low, middle)
    return tuple(max(1, min(cap, round(high * s))) for s in spread)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How mini-batches are packed into micro-batches. filled: share of `max_tokens` used. balance: mean work of a rank
    over that of the heaviest, per micro-batch, because all ranks wait for each other at each one."""

    micro_batches: int
    filled: float
    balance: float


@cache
def packed(lengths: tuple[int, ...], size: int, groups: int, room: int, equal_at: int) -> Packing:
    """size: sequences of a mini-batch. groups: of ranks, with `room` tokens each in a micro-batch."""
    bins, heaviest, work = 0, 0.0, 0.0
    for start in range(0, len(lengths), size):
        minibatch = lengths[start : start + size]
        for position in zip(*pack(minibatch, groups, room, equal_at), strict=True):
            loads = [sum(estimated_work(minibatch[i], equal_at) for i in members) for members in position]
            heaviest += max(loads) * groups
            work += sum(loads)
            bins += groups
    return Packing(
        micro_batches=round(bins / groups * size / len(lengths)),
        filled=sum(lengths) / (bins * room),
        balance=work / heaviest,
    )


@dataclass(frozen=True)
class Step:
    """One step: train_batch_size groups of n responses each."""

    cfg: PlannedConfig
    shape: ModelShape

    @property
    def sequences(self) -> int:
        return self.cfg.data.train_batch_size * self.cfg.rollout.n

    @cached_property
    def responses(self) -> tuple[int, ...]:
        cap, count = self.cfg.data.max_response_length, self.cfg.actor.ppo_mini_batch_size * self.cfg.rollout.n
        wanted = min(mean_tokens(self.cfg)[1], cap)
        return response_lengths(cap, wanted, self.cfg.plan.length_sigma, SAMPLED_MINIBATCHES * count)

    @property
    def kept_rate(self) -> float:
        return self.cfg.plan.mixed_rate if self.cfg.filter_groups.enable else 1.0

    @property
    def switch_s(self) -> float:
        """Seconds per step to switch shared GPUs between engines and ranks; not counted where engines are lent."""
        if not shares_gpus(self.cfg):
            return 0.0
        moved = together(ActorMemory(self.cfg, self.shape).moved())
        asleep_s = 0.0 if lends(self.cfg) else self.cfg.plan.switch_s
        return asleep_s + 2 * moved / self.cfg.plan.host_bandwidth

    @property
    def rank_groups(self) -> int:
        """The data-parallel size: groups of ranks that share micro-batches."""
        return self.cfg.actor.num_workers // self.cfg.actor.ulysses_sequence_parallel_size

    @property
    def packing(self) -> Packing:
        prompt, _ = mean_tokens(self.cfg)
        return packed(
            tuple(prompt + r for r in self.responses),
            self.cfg.actor.ppo_mini_batch_size * self.cfg.rollout.n,
            self.rank_groups,
            self.cfg.actor.max_tokens_per_gpu * self.cfg.actor.ulysses_sequence_parallel_size,
            self.shape.attention_equals_rest_tokens,
        )

    @property
    def generated_tokens(self) -> float:
        """Response tokens that the engines generate, those of dropped groups included."""
        return self.sequences * mean_tokens(self.cfg)[1] / self.kept_rate

    @property
    def trained_tokens(self) -> int:
        return self.sequences * sum(mean_tokens(self.cfg))

    @cached_property
    def epoch(self) -> Operations:
        prompt, _ = mean_tokens(self.cfg)
        scale = self.sequences / len(self.responses)
        return Operations(
            cfg=self.cfg,
            shape=self.shape,
            tokens=scale * sum(prompt + r for r in self.responses),
            responses=scale * sum(self.responses),
            attention=scale * sum(self.shape.attention_flops(prompt + r) for r in self.responses),
            micro_batches=self._micro_batches // self.cfg.actor.ppo_epochs * self.cfg.actor.num_workers,
        )

    @property
    def _micro_batches(self) -> int:
        """Of a rank in an update."""
        return optimizer_steps(self.cfg) * self.packing.micro_batches

    @property
    def forward_flops(self) -> float:
        return self.epoch.flops(self.epoch.forward)

    @property
    def update_flops(self) -> float:
        return (self.forward_flops + self.epoch.flops(self.epoch.backward)) * self.cfg.actor.ppo_epochs

    @property
    def extra_passes(self) -> dict[str, float]:
        """Forward passes without gradient, by purpose: what share of the batch each goes over. The first optimizer step
        computes old log-probabilities itself, unless something is chosen by them before."""
        algorithm, passes = self.cfg.algorithm, {}
        by_entropy, by_covariance = algorithm.entropy_top_share < 1, algorithm.policy_loss in BY_COVARIANCE
        several = optimizer_steps(self.cfg) > 1 or by_covariance
        if several and not algorithm.rollout_correction.use_rollout_logprobs:
            first = self.cfg.actor.ppo_mini_batch_size / self.cfg.data.train_batch_size
            passes["old log-probabilities"] = 1.0 if by_entropy or by_covariance else 1.0 - first
        elif by_entropy:
            passes["entropies"] = 1.0
        if algorithm.kl.loss_coeff or algorithm.kl.reward_coeff:
            passes["reference log-probabilities"] = 1.0
        return {name: share for name, share in passes.items() if share}

    @property
    def traffic(self) -> tuple[float, float]:
        """Bytes a rank receives in one micro-batch: parameters, gathered once in each of forward and backward pass, and
        float32 gradients to be summed. The first value is for one pass."""
        memory = ActorMemory(self.cfg, self.shape)
        share = (memory.shards - 1) / memory.shards
        return share * memory.element * self.shape.parameters, share * 4 * memory.trained

    @property
    def bandwidth(self) -> float:
        """Byte/s at which a rank receives shards: within a node if a copy of the parameters fits one, else through the
        adapters of all the group's GPUs there."""
        plan, shards = self.cfg.plan, ActorMemory(self.cfg, self.shape).shards
        if shards <= plan.gpus_per_node:
            return plan.node_bandwidth
        return min(plan.node_bandwidth, math.gcd(shards, plan.gpus_per_node) * plan.network_bandwidth)

    @property
    def sync_bytes(self) -> int:
        """Bytes of a weight sync to each engine."""
        return ELEMENT_BYTES[self.cfg.model.dtype] * self.shape.parameters

    @property
    def bucket_s(self) -> tuple[float, float, float]:
        """Seconds to gather a full bucket of the weight sync, to send it from one adapter to all engines (0 by IPC),
        and to load it. While a bucket is sent and loaded the ranks gather the next."""
        plan, shards = self.cfg.plan, ActorMemory(self.cfg, self.shape).shards
        size = bucket_term(self.cfg, self.shape, "bucket", 1).amount
        gpus = self.cfg.actor.num_workers + self.cfg.rollout.num_engines * gpus_per_engine(self.cfg.rollout.vllm)
        wire = plan.node_bandwidth if gpus <= plan.gpus_per_node else plan.network_bandwidth
        sent = size / wire if resolve_transport(self.cfg) == "broadcast" else 0.0
        return (1 - 1 / shards) * size / self.bandwidth, sent, size / plan.sync_bandwidth

    @property
    def sync_s(self) -> float:
        gather, send, load = self.bucket_s
        buckets = self.sync_bytes / (load * self.cfg.plan.sync_bandwidth)
        first = self.shape.num_layers * self.cfg.plan.sync_layer_s + gather + send + load
        return first + (buckets - 1) * max(gather, send + load)

    @property
    def overlaps(self) -> bool:
        """Whether engines generate while the ranks train."""
        return self.cfg.filter_groups.max_staleness > 0 and self.cfg.trainer.colocate != "time"

    @property
    def rounds(self) -> int:
        """Parameter gathers per update and pass: one per micro-batch, or per optimizer step without resharding."""
        return optimizer_steps(self.cfg) * (self.packing.micro_batches if self.cfg.actor.reshard_after_forward else 1)

    @cached_property
    def work(self) -> dict[str, dict[str, float]]:
        """Seconds of the heaviest rank, by pass over the batch and kind of work. All ranks wait for it, and a GPU waits
        for its host, which launches each layer."""
        cfg, epoch, memory = self.cfg, self.epoch, ActorMemory(self.cfg, self.shape)
        copied = fsdp_bytes(cfg, self.shape.parameters, memory.trained, memory.shards)
        gathered, reduced, piled = (moving_s(cfg, each) for each in copied)
        without_gradient, forward, backward = launch_s(cfg, self.shape)
        speed, rounds, micro_batches = cfg.actor.num_workers * self.packing.balance, self.rounds, self._micro_batches

        def one(of_epoch: dict[str, float], copying: float, launching: float, part: float = 1.0) -> dict[str, float]:
            """part: of the update's epochs."""
            found = {kind: epochs * part * seconds / speed for kind, seconds in of_epoch.items()}
            found["FSDP"] = part * copying
            return found | {"waiting for the host": max(0.0, part * launching - sum(found.values()))}

        epochs, extra = cfg.actor.ppo_epochs, self.extra_passes.items()
        once = epoch.seconds(epoch.forward), rounds * gathered, micro_batches * without_gradient
        again = rounds * gathered if cfg.actor.reshard_after_forward else micro_batches * piled
        moved = optimizer_steps(cfg) * OPTIMIZER * memory.trained / memory.shards
        on_host = cfg.actor.offload == "host"
        return {
            **{name: one(*once, part / epochs) for name, part in extra},
            "forward": one(epoch.seconds(epoch.forward), rounds * gathered, micro_batches * forward),
            "backward": one(epoch.seconds(epoch.backward), again + rounds * reduced, micro_batches * backward),
            "optimizer": {"AdamW": moved / cfg.plan.host_bandwidth if on_host else moving_s(cfg, moved)},
        }

    @cached_property
    def passes(self) -> dict[str, tuple[float, float]]:
        """Seconds of computing and of communication, which overlap, by pass over the batch."""
        gathered, summed = (self.rounds * size / self.bandwidth for size in self.traffic)
        again = gathered if self.cfg.actor.reshard_after_forward else 0.0
        wires = {"forward": gathered, "backward": again + summed, "optimizer": 0.0}
        wires |= {name: gathered * part / self.cfg.actor.ppo_epochs for name, part in self.extra_passes.items()}
        return {name: (sum(kinds.values()), wires[name]) for name, kinds in self.work.items()}

    @property
    def offload_s(self) -> float:
        """Seconds without computing because gradients are summed on the host: from an optimizer step's second
        micro-batch on, the backward pass waits for the sum over ranks and for the copy."""
        memory = ActorMemory(self.cfg, self.shape)
        if not memory.offloaded() or self.cfg.actor.offload != "host":
            return 0.0
        moved = 4 * memory.trained / memory.shards
        again = self.rounds - optimizer_steps(self.cfg)
        return again * (self.traffic[1] / self.bandwidth + moved / self.cfg.plan.host_bandwidth)

    @property
    def update_s(self) -> float:
        """Seconds of the update with its extra passes, each as long as the slower of computing and communication."""
        return sum(max(pair) for pair in self.passes.values()) + self.offload_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of forward, backward and optimizer; backward counts twice forward, once with LoRA."""
        seconds = sum(max(self.passes[name]) for name in ("forward", "backward", "optimizer")) + self.offload_s
        flops = (2 if self.cfg.model.lora.rank else 3) * self.forward_flops * self.cfg.actor.ppo_epochs
        return flops / (seconds * self.cfg.actor.num_workers * self.cfg.plan.gpu_flops)

    def token_s(self, engine: EngineMemory, running: int) -> float:
        """Seconds in which an engine makes one token for each of `running` sequences: the maximum of reading weights
        and cache or computing on the GPU, and vLLM's own work on the host."""
        prompt, response = mean_tokens(self.cfg)
        read = engine.weights().amount + running * (prompt + response / 2) * engine.kv_bytes_per_token
        reading = read / (self.cfg.plan.gpu_bandwidth * self.cfg.plan.bandwidth_share)
        speed = engine.gpus * self.cfg.plan.gpu_flops * self.cfg.plan.matrix_share
        computing = running * self.shape.flops_per_token / speed
        on_gpu = engine.sharing * max(reading, computing) + self.cfg.plan.engine_step_s
        return max(on_gpu, running * self.cfg.plan.engine_sequence_s)

    def again_s(self, engine: EngineMemory) -> float:
        """Seconds in which each engine computes again, after a weight sync, the keys and values of running requests."""
        if not self.overlaps or self.cfg.weight_sync.keep_kv_cache:
            return 0.0
        prompt, _ = mean_tokens(self.cfg)
        held, speed = engine.held(prompt, self.responses), self.cfg.plan.gpu_flops * self.cfg.plan.matrix_share
        flops = engine.running(prompt, self.responses) * self.shape.forward_flops([round(held)], head_tokens=1)
        return flops / (engine.gpus * speed)

    def generation_s(self, engine: EngineMemory) -> tuple[float, float]:
        """Seconds with all engines full, and seconds of the longest response alone, a lower bound."""
        running = engine.running(mean_tokens(self.cfg)[0], self.responses)
        throughput = self.cfg.rollout.num_engines * running / self.token_s(engine, running)
        filled_s = self.generated_tokens / throughput + self.again_s(engine)
        return filled_s, self.cfg.data.max_response_length * self.token_s(engine, 1)

    def lending_s(self, engine: EngineMemory) -> float:
        """Seconds by which engines lent the ranks' GPUs shorten generation; 0 if that does not pay."""
        running = engine.running(mean_tokens(self.cfg)[0], self.responses)
        own, lent = self.cfg.rollout.num_engines * running, lent_engines(self.cfg) * running
        half = self.cfg.plan.switch_s / 2
        lending = Lending(own=own, lent=lent, wake_s=half, sleep_s=half)
        waiting = max(0.0, self.sequences / self.kept_rate - own)
        return max(0.0, lending.gain_s(waiting, mean_tokens(self.cfg)[1] * self.token_s(engine, running)))


@dataclass(frozen=True)
class Lead:
    """The signal of `launch/slurm/train.sbatch` before a time limit: the run then finishes an update and saves."""

    cfg: PlannedConfig
    shape: ModelShape

    @cached_property
    def update_s(self) -> float:
        """Seconds of an update that has just begun, with the weight sync after it."""
        if self.cfg.trainer.only == "rollout":
            return 0.0
        if device_of(self.cfg) == "cpu":
            return CPU_UPDATE_S
        return Step(self.cfg, self.shape).update_s + Step(self.cfg, self.shape).sync_s

    @cached_property
    def save_s(self) -> float:
        return together(ActorMemory(self.cfg, self.shape).checkpoint()) / self.cfg.plan.storage_bandwidth

    @property
    def seconds(self) -> int:
        """An earlier asynchronous save may have to finish first."""
        before = max(self.update_s, self.save_s) if self.cfg.checkpoint.async_save else self.update_s
        return math.ceil(ROOM * (before + self.save_s) + ENDING_S)


def on_disk(cfg: PlannedConfig, checkpoint_bytes: float) -> tuple[Term, ...]:
    """Terms named as in the output directory at its fullest. checkpoint_bytes: of one checkpoint."""
    steps, only, log = cfg.trainer.total_steps, cfg.trainer.only, cfg.logging
    every = 1 if cfg.checkpoint.every_s else cfg.checkpoint.every
    saved = 1 + (steps // every if every else 0)
    kept = min(cfg.checkpoint.keep or saved, saved) + 1  # one is being written
    trained = cfg.data.train_batch_size * cfg.rollout.n
    drawn = trained / (cfg.plan.mixed_rate if cfg.filter_groups.enable and only != "train" else 1.0)
    text = TEXT_BYTES * mean_tokens(cfg)[1]
    response = text + ARRAY_BYTES * mean_tokens(cfg)[1]
    batches = {"rollout": steps, "train": 0}.get(only, min(cfg.checkpoint.batches, steps))
    segments = min(kept, steps) if cfg.checkpoint.journal and only != "train" else 0
    row = ROW_BYTES + min(text, log.max_text_bytes) * log.sample_fraction
    store = steps * drawn * row
    if log.max_store_bytes:  # bounds the texts; a step is there twice while it is written
        store = min(store, max(log.max_store_bytes, steps * drawn * ROW_BYTES) + 2 * drawn * row)
    counts = (
        (CHECKPOINTS, kept, "checkpoints", 1, checkpoint_bytes),
        (BATCHES, batches, "steps", trained, response),
        (JOURNAL, segments, "segments", drawn, response),
    )
    return (
        *(
            Term(name=name, amount=n * each * width, formula=f"{n:,} {what} of {size(each * width)}")
            for name, n, what, each, width in counts
        ),
        Term(name=STORE, amount=store, formula=f"{steps:,} steps of {size(drawn * row)}, logging.max_store_bytes"),
    )
