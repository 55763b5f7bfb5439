"""Baselines for the update, on the same packed micro-batches that `workers.actor` gets. Neither uses FSDP, gradient
exchange, metrics or guards: each process has its own copy of the model. `BareRank` is forward and backward through the
trainer's own log-probabilities. `HandWrittenRank` is a whole update as one would write it for one process in plain
torch and transformers: full logits, plain autograd, no shared prompts."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from dapo.config.schema import Config
from dapo.derived import shares_prompts
from dapo.types import TrainSequence
from workers.actor import ActorWorker, RankWork
from workers.training.forward.attention import implementation
from workers.training.forward.policy import MicroBatch, PackedPolicy, collate


def load_model(cfg: Config) -> PreTrainedModel:
    torch.set_num_threads(cfg.actor.cpu_threads)
    kind = implementation(cfg.model.attn_implementation)
    return AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32, attn_implementation=kind)


class BareRank:
    def __init__(self, cfg: Config) -> None:
        self._shared = shares_prompts(cfg)
        self._policy = PackedPolicy(load_model(cfg), cfg.rollout.temperature).train()

    def run(self, work: RankWork) -> float:
        began = time.perf_counter()
        for k in work.order:
            for sequences in work.minibatches[k]:
                batch = collate(sequences, torch.device("cpu"), share_prompts=self._shared)
                logprobs, _ = self._policy(batch)
                (-batch.weights * batch.advantages * logprobs).sum().backward()
        self._policy.zero_grad()
        return time.perf_counter() - began


class HandWrittenRank:
    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._model = load_model(cfg)
        optim = cfg.actor.optim
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def run(self, work: RankWork) -> float:
        began = time.perf_counter()
        for k in work.order:
            self._step(work.minibatches[k])
        return time.perf_counter() - began

    def _step(self, micro_batches: Sequence[Sequence[TrainSequence]]) -> None:
        for sequences in micro_batches:
            batch = collate(sequences, torch.device("cpu"), share_prompts=False)
            logprobs = self._logprobs(batch)
            ratio = torch.exp(logprobs - logprobs.detach())
            bounds = 1 - self._cfg.algorithm.clip_ratio_low, 1 + self._cfg.algorithm.clip_ratio_high
            gain = torch.minimum(ratio * batch.advantages, ratio.clamp(*bounds) * batch.advantages)
            (-batch.weights * gain).sum().backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._cfg.actor.optim.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        hidden = self._model.model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            use_cache=False,
            segments=batch.segments,
        ).last_hidden_state[0, batch.predictors]
        logits = self._model.lm_head(hidden).float() / self._cfg.rollout.temperature
        return logits.log_softmax(-1).gather(1, batch.labels[:, None])[:, 0]


def seconds_of(worker: ActorWorker, work: RankWork) -> float:
    """Runs on an actor rank: returns the seconds of one update within its process, at its current version."""
    work = replace(work, version=worker._version.version)
    began = time.perf_counter()
    worker.update(work)
    return time.perf_counter() - began
