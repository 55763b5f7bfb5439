"""Estimates tokens, FLOPs and seconds of one step; how long before a time limit a run must be signalled (`Lead`), and
how large its output directory gets (`on_disk`).

The response lengths are a fixed log-normal sample, truncated at the maximum, packed by the actors' own code
(`dapo.algorithm.packing`). A prompt is counted for each of its responses, but ranks compute a long one once for
several: the real update is then faster.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property

from dapo.algorithm.packing import estimated_work, pack
from dapo.config.algorithm import BY_COVARIANCE
from dapo.config.derived import device_of, lends, lent_engines, optimizer_steps, shares_gpus
from dapo.config.facts.model_shape import ModelShape
from dapo.config.plan import PlannedConfig
from dapo.sampling.lending import Lending
from dapo.tools.plan.actor import ActorMemory
from dapo.tools.plan.engine import EngineMemory
from dapo.tools.plan.terms import Term, size, together

SAMPLED_MINIBATCHES = 4
# Multiples of the forward pass. Without weight gradients half as much; attention computes its scores once more.
BACKWARD, FROZEN_BACKWARD, ATTENTION_BACKWARD = 2.0, 1.0, 2.5
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


def response_lengths(cfg: PlannedConfig, count: int) -> list[int]:
    """Returns `count` lengths with the assumed mean, in a fixed random order."""
    cap, wanted = cfg.data.max_response_length, min(mean_tokens(cfg)[1], cfg.data.max_response_length)
    sigma = cfg.plan.length_sigma
    rng = random.Random(0)
    spread = [math.exp(sigma * rng.gauss(0, 1)) for _ in range(count)]
    low, high = 0.0, 4.0 * cap
    for _ in range(50):  # bisection for the scale whose truncated mean is the wanted one
        middle = (low + high) / 2
        mean = sum(min(cap, middle * s) for s in spread) / count
        low, high = (middle, high) if mean < wanted else (low, middle)
    return [max(1, min(cap, round(high * s))) for s in spread]


def sync_bytes(shape: ModelShape) -> int:
    """Bytes of a weight sync to each engine, in bfloat16."""
    return 2 * shape.parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How mini-batches are packed into micro-batches. filled: share of `max_tokens` used. balance: mean work of a rank
    over that of the heaviest, per micro-batch, because all ranks wait for each other at each one."""

    micro_batches: int
    filled: float
    balance: float


@dataclass(frozen=True)
class Step:
    """One step: train_batch_size groups of n responses each."""

    cfg: PlannedConfig
    shape: ModelShape

    @property
    def sequences(self) -> int:
        return self.cfg.data.train_batch_size * self.cfg.rollout.n

    @cached_property
    def responses(self) -> list[int]:
        return response_lengths(self.cfg, SAMPLED_MINIBATCHES * self.cfg.actor.ppo_mini_batch_size * self.cfg.rollout.n)

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

    @cached_property
    def packing(self) -> Packing:
        prompt, _ = mean_tokens(self.cfg)
        size = self.cfg.actor.ppo_mini_batch_size * self.cfg.rollout.n
        room = self.cfg.actor.max_tokens_per_gpu * self.cfg.actor.ulysses_sequence_parallel_size
        equal_at = self.shape.attention_equals_rest_tokens
        bins, heaviest, work, tokens = 0, 0.0, 0.0, 0
        for start in range(0, SAMPLED_MINIBATCHES * size, size):
            lengths = [prompt + r for r in self.responses[start : start + size]]
            packed = pack(lengths, self.rank_groups, room, equal_at)
            tokens += sum(lengths)
            for position in zip(*packed, strict=True):
                loads = [sum(estimated_work(lengths[i], equal_at) for i in members) for members in position]
                heaviest += max(loads) * self.rank_groups
                work += sum(loads)
                bins += self.rank_groups
        return Packing(
            micro_batches=round(bins / self.rank_groups / SAMPLED_MINIBATCHES),
            filled=tokens / (bins * room),
            balance=work / heaviest,
        )

    @property
    def generated_tokens(self) -> float:
        """Response tokens that the engines generate, those of dropped groups included."""
        return self.sequences * mean_tokens(self.cfg)[1] / self.kept_rate

    @property
    def trained_tokens(self) -> int:
        return self.sequences * sum(mean_tokens(self.cfg))

    @cached_property
    def _forward(self) -> tuple[float, float]:
        """FLOPs of the matrices, and of attention, in one forward pass over the batch."""
        prompt, response = mean_tokens(self.cfg)
        lengths = [prompt + r for r in self.responses]
        scale = self.sequences / len(lengths)
        attention = sum(self.shape.attention_flops(length) for length in lengths)
        whole = self.shape.forward_flops(lengths, head_tokens=sum(self.responses))
        return scale * (whole - attention), scale * attention

    @property
    def forward_flops(self) -> float:
        return sum(self._forward)

    @property
    def recomputed(self) -> tuple[float, float]:
        """Shares of the forward pass, of matrices and of attention, that the backward pass recomputes: always the head,
        and all of a layer but `down`, whose output is needed only for a router's gradient."""
        shape, mode = self.shape, self.cfg.model.gradient_checkpointing
        h, i, q, kv = shape.hidden_size, shape.mlp_width, shape.attention_size, shape.kv_size
        whole = h * (2 * q + 2 * kv + (3 * i + shape.experts if shape.experts else 2 * i))
        kept = h * (q + kv + (0 if shape.experts else i))  # selective: k, o and up
        products = {"full": whole, "selective": whole - kept, "none": 0}[mode]
        per_token = 2 * (shape.num_layers * products + shape.embedding_parameters)
        return per_token / shape.flops_per_token, 1.0 if mode == "full" else 0.0

    @property
    def backward(self) -> float:
        """Multiple of the forward pass of matrices. With LoRA the frozen weights need no gradient."""
        return FROZEN_BACKWARD if self.cfg.model.lora.rank else BACKWARD

    @property
    def update_flops(self) -> float:
        (linear, attention), (again, attention_again) = self._forward, self.recomputed
        once = linear * (1 + self.backward + again) + attention * (1 + ATTENTION_BACKWARD + attention_again)
        return once * self.cfg.actor.ppo_epochs

    @property
    def extra_passes(self) -> dict[str, float]:
        """FLOPs of forward passes without gradient, by purpose."""
        kl, passes = self.cfg.algorithm.kl, {}
        several = optimizer_steps(self.cfg) > 1 or self.cfg.algorithm.policy_loss in BY_COVARIANCE
        if several and not self.cfg.algorithm.rollout_correction.use_rollout_logprobs:
            passes["old log-probabilities"] = self.forward_flops
        elif self.cfg.algorithm.entropy_top_share < 1:
            passes["entropies"] = self.forward_flops
        if kl.loss_coeff or kl.reward_coeff:
            passes["reference log-probabilities"] = self.forward_flops
        return passes

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
    def rounds(self) -> int:
        """Parameter gathers per update and pass: one per micro-batch, or per optimizer step without resharding."""
        return optimizer_steps(self.cfg) * (self.packing.micro_batches if self.cfg.actor.reshard_after_forward else 1)

    @cached_property
    def passes(self) -> dict[str, tuple[float, float]]:
        """Seconds of computing and of communication, which overlap, by pass over the batch. All ranks wait for the
        heaviest one, and a GPU waits for its host, which launches each layer."""
        speed = self.cfg.actor.num_workers * self.cfg.plan.gpu_flops * self.cfg.plan.hfu * self.packing.balance
        gathered, summed = (size / self.bandwidth for size in self.traffic)
        epochs = self.cfg.actor.ppo_epochs
        forward, rounds = epochs * self.forward_flops, self.rounds
        micro_batches = optimizer_steps(self.cfg) * self.packing.micro_batches
        launched = micro_batches * self.shape.num_layers * self.cfg.plan.layer_s
        again = 1 if self.cfg.model.gradient_checkpointing == "none" else 2  # recomputation launches each layer again
        found = {
            name: (flops, launched / epochs, rounds / epochs * gathered) for name, flops in self.extra_passes.items()
        }
        found["forward"] = (forward, launched, rounds * gathered)
        found["backward"] = (self.update_flops - forward, again * launched, rounds * (gathered + summed))
        return {name: (max(flops / speed, host), wire) for name, (flops, host, wire) in found.items()}

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
        """Model FLOPs utilization of forward and backward pass; backward counts twice forward, once with LoRA."""
        seconds = max(self.passes["forward"]) + max(self.passes["backward"]) + self.offload_s
        flops = (1 + self.backward) * self.forward_flops * self.cfg.actor.ppo_epochs
        return flops / (seconds * self.cfg.actor.num_workers * self.cfg.plan.gpu_flops)

    def token_s(self, engine: EngineMemory, running: int) -> float:
        """Seconds in which an engine makes one token for each of `running` sequences: the maximum of reading weights
        and cache or computing on the GPU, and vLLM's own work on the host."""
        prompt, response = mean_tokens(self.cfg)
        read = engine.weights().amount + running * (prompt + response / 2) * engine.kv_bytes_per_token
        reading = read / (self.cfg.plan.gpu_bandwidth * self.cfg.plan.bandwidth_share)
        computing = running * self.shape.flops_per_token / (engine.gpus * self.cfg.plan.gpu_flops * self.cfg.plan.hfu)
        on_gpu = max(reading, computing) + self.cfg.plan.engine_step_s
        return max(on_gpu, running * self.cfg.plan.engine_sequence_s)

    def generation_s(self, engine: EngineMemory) -> tuple[float, float]:
        """Seconds with all engines full, and seconds of the longest response alone, a lower bound."""
        running = engine.running(mean_tokens(self.cfg)[0], self.responses)
        throughput = self.cfg.rollout.num_engines * running / self.token_s(engine, running)
        return self.generated_tokens / throughput, self.cfg.data.max_response_length * self.token_s(engine, 1)

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
        return Step(self.cfg, self.shape).update_s + sync_bytes(self.shape) / self.cfg.plan.sync_bandwidth

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
