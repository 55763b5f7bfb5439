"""Tokens, FLOPs and seconds of one step: configuration, model shape and assumptions in, estimates out.

The response lengths are a fixed sample, log-normal and cut off at the cap; mini-batches of it are packed by the actors'
own code (`dapo.packing`), so that idle and badly filled micro-batches are counted and not guessed.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property

from dapo.config.model_shape import ModelShape
from dapo.config.schema import Config
from dapo.packing import estimated_work, pack
from dapo.plan.actor import ActorMemory, device_of
from dapo.plan.engine import EngineMemory

SAMPLED_MINIBATCHES = 4
BACKWARD, ATTENTION_BACKWARD = 2.0, 2.5  # times the forward pass; attention computes its scores once more


def mean_tokens(cfg: Config) -> tuple[int, int]:
    """Of a prompt and of a response, as assumed."""
    prompt = cfg.plan.mean_prompt_tokens or max(1, cfg.data.max_prompt_length // 8)
    return prompt, cfg.plan.mean_response_tokens or max(1, cfg.data.max_response_length // 3)


def response_lengths(cfg: Config, count: int) -> list[int]:
    """`count` lengths with the assumed mean, in a fixed random order."""
    cap, wanted = cfg.data.max_response_length, min(mean_tokens(cfg)[1], cfg.data.max_response_length)
    sigma = cfg.plan.length_sigma
    rng = random.Random(0)
    spread = [math.exp(sigma * rng.gauss(0, 1)) for _ in range(count)]
    low, high = 0.0, 4.0 * cap
    for _ in range(50):  # the scale whose mean after the cut is the wanted one
        middle = (low + high) / 2
        mean = sum(min(cap, middle * s) for s in spread) / count
        low, high = (middle, high) if mean < wanted else (low, middle)
    return [max(1, min(cap, round(high * s))) for s in spread]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How mini-batches fall into micro-batches. filled: share of `max_tokens` used. balance: mean work of a rank over
    the heaviest one's, micro-batch by micro-batch, for nobody overtakes the others. idle: micro-batches without a
    sequence."""

    micro_batches: int
    filled: float
    balance: float
    idle: float


@dataclass(frozen=True)
class Step:
    """One step: train_batch_size groups of n responses each."""

    cfg: Config
    shape: ModelShape

    @property
    def sequences(self) -> int:
        """That one update trains on."""
        return self.cfg.data.train_batch_size * self.cfg.rollout.n

    @cached_property
    def responses(self) -> list[int]:
        """Lengths of as many responses as a few mini-batches have."""
        return response_lengths(self.cfg, SAMPLED_MINIBATCHES * self.cfg.actor.ppo_mini_batch_size * self.cfg.rollout.n)

    @property
    def kept_rate(self) -> float:
        """Share of the generated groups that are trained on."""
        return self.cfg.plan.mixed_rate if self.cfg.filter_groups.enable else 1.0

    @property
    def optimizer_steps(self) -> int:
        """Of one update."""
        return self.cfg.data.train_batch_size // self.cfg.actor.ppo_mini_batch_size * self.cfg.actor.ppo_epochs

    @property
    def groups(self) -> int:
        """Of ranks that share micro-batches: the data-parallel size."""
        return self.cfg.actor.num_workers // self.cfg.actor.ulysses_sequence_parallel_size

    @cached_property
    def packing(self) -> Packing:
        """Of a few mini-batches."""
        prompt, _ = mean_tokens(self.cfg)
        size = self.cfg.actor.ppo_mini_batch_size * self.cfg.rollout.n
        room = self.cfg.actor.max_tokens_per_gpu * self.cfg.actor.ulysses_sequence_parallel_size
        equal_at = self.shape.attention_equals_rest_tokens
        bins, heaviest, work, idle, tokens = 0, 0.0, 0.0, 0, 0
        for start in range(0, SAMPLED_MINIBATCHES * size, size):
            lengths = [prompt + r for r in self.responses[start : start + size]]
            packed = pack(lengths, self.groups, room, equal_at)
            tokens += sum(lengths)
            for position in zip(*packed, strict=True):
                loads = [sum(estimated_work(lengths[i], equal_at) for i in members) for members in position]
                heaviest += max(loads) * self.groups
                work += sum(loads)
                idle += sum(not members for members in position)
                bins += self.groups
        return Packing(
            micro_batches=round(bins / self.groups / SAMPLED_MINIBATCHES),
            filled=tokens / (bins * room),
            balance=work / heaviest,
            idle=idle / bins,
        )

    @property
    def generated_tokens(self) -> float:
        """Response tokens that the engines make, of groups that are dropped too."""
        return self.sequences * mean_tokens(self.cfg)[1] / self.kept_rate

    @property
    def trained_tokens(self) -> int:
        """Prompt and response tokens in one pass over the batch."""
        return self.sequences * sum(mean_tokens(self.cfg))

    @cached_property
    def _forward(self) -> tuple[float, float]:
        """FLOPs of the matrices and of attention, one forward pass over the batch."""
        prompt, response = mean_tokens(self.cfg)
        lengths = [prompt + r for r in self.responses]
        scale = self.sequences / len(lengths)
        attention = sum(self.shape.attention_flops(length) for length in lengths)
        whole = self.shape.forward_flops(lengths, head_tokens=sum(self.responses))
        return scale * (whole - attention), scale * attention

    @property
    def forward_flops(self) -> float:
        """One forward pass over the batch."""
        return sum(self._forward)

    @property
    def recomputed(self) -> tuple[float, float]:
        """Shares of the forward pass that the backward pass does again, of matrices and of attention. The head always;
        of a layer all but `down`, whose value no gradient needs."""
        shape, mode = self.shape, self.cfg.model.gradient_checkpointing
        h, i, q, kv = shape.hidden_size, shape.intermediate_size, shape.attention_size, shape.kv_size
        products = {"full": h * (2 * q + 2 * kv + 2 * i), "selective": h * (q + kv + i), "none": 0}[mode]
        per_token = 2 * (shape.num_layers * products + shape.embedding_parameters)
        return per_token / shape.flops_per_token, 1.0 if mode == "full" else 0.0

    @property
    def model_flops(self) -> float:
        """Of the update: forward and twice that backward, by convention; what MFU counts."""
        return 3 * self.forward_flops * self.cfg.actor.ppo_epochs

    @property
    def update_flops(self) -> float:
        """Of the update, as executed."""
        (linear, attention), (again, attention_again) = self._forward, self.recomputed
        once = linear * (1 + BACKWARD + again) + attention * (1 + ATTENTION_BACKWARD + attention_again)
        return once * self.cfg.actor.ppo_epochs

    @property
    def extra_passes(self) -> dict[str, float]:
        """FLOPs of forward passes without gradient, by what they compute."""
        kl, passes = self.cfg.algorithm.kl, {}
        if self.optimizer_steps > 1 and not self.cfg.algorithm.rollout_correction.use_rollout_logprobs:
            passes["old log-probabilities"] = self.forward_flops
        if kl.loss_coeff or kl.reward_coeff:
            passes["reference log-probabilities"] = self.forward_flops
        return passes

    @property
    def actor_speed(self) -> float:
        """FLOP/s of all ranks together; waiting for the heaviest rank is counted."""
        return self.cfg.actor.num_workers * self.cfg.plan.gpu_flops * self.cfg.plan.hfu * self.packing.balance

    @property
    def traffic(self) -> tuple[float, float]:
        """Bytes that a rank receives in one micro-batch: gathered parameters, and gradients to be summed in float32.

        Parameters are gathered for the forward pass and for the backward pass."""
        memory = ActorMemory(self.cfg, self.shape)
        share = (memory.shards - 1) / memory.shards
        return share * memory.element * self.shape.parameters, share * 4 * memory.trained

    @property
    def bandwidth(self) -> float:
        """Byte/s at which shards travel: within a node where a copy of the parameters fits one."""
        inside = ActorMemory(self.cfg, self.shape).shards <= self.cfg.plan.gpus_per_node
        return self.cfg.plan.node_bandwidth if inside else self.cfg.plan.network_bandwidth

    @property
    def rounds(self) -> int:
        """How often per update parameters are gathered: each micro-batch, or each optimizer step where they stay."""
        return self.optimizer_steps * (self.packing.micro_batches if self.cfg.actor.reshard_after_forward else 1)

    @cached_property
    def passes(self) -> dict[str, tuple[float, float]]:
        """By pass over the batch, seconds of computing and of communication; they overlap."""
        gathered, summed = (size / self.bandwidth for size in self.traffic)
        epochs = self.cfg.actor.ppo_epochs
        forward, rounds = epochs * self.forward_flops, self.rounds
        found = {name: (flops, rounds / epochs * gathered) for name, flops in self.extra_passes.items()}
        found["forward"] = (forward, rounds * gathered)
        found["backward"] = (self.update_flops - forward, rounds * (gathered + summed))
        return {name: (flops / self.actor_speed, wire) for name, (flops, wire) in found.items()}

    @property
    def update_s(self) -> float:
        """Seconds of the update with its extra passes, each as long as the slower of computing and communication."""
        return sum(max(pair) for pair in self.passes.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of forward and backward pass that follows."""
        seconds = max(self.passes["forward"]) + max(self.passes["backward"])
        return self.model_flops / (seconds * self.cfg.actor.num_workers * self.cfg.plan.gpu_flops)

    def token_s(self, engine: EngineMemory, running: int) -> float:
        """Seconds in which an engine makes one token for each of `running` sequences: reading weights and cache, or
        computing, whichever takes longer."""
        prompt, response = mean_tokens(self.cfg)
        read = engine.weights().amount + running * (prompt + response / 2) * engine.kv_bytes_per_token
        reading = read / (self.cfg.plan.gpu_bandwidth * self.cfg.plan.bandwidth_share)
        computing = running * self.shape.flops_per_token / (engine.gpus * self.cfg.plan.gpu_flops * self.cfg.plan.hfu)
        return max(reading, computing) + self.cfg.plan.engine_step_s

    def generation_s(self, engine: EngineMemory) -> tuple[float, float]:
        """Seconds with all engines full, and of the longest response by itself, which is the least a step can take."""
        running = engine.running(mean_tokens(self.cfg)[0], self.responses)
        throughput = self.cfg.rollout.num_engines * running / self.token_s(engine, running)
        return self.generated_tokens / throughput, self.cfg.data.max_response_length * self.token_s(engine, 1)

    @property
    def sync_bytes(self) -> float:
        """That one weight sync moves to each engine."""
        return self.shape.parameters * (4 if device_of(self.cfg) == "cpu" else 2)
