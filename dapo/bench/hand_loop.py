"""The yardstick of the update: what one would write by hand for one process, in plain torch and transformers.

In: a rank's packed micro-batches, those that `workers.actor` would get. Out: seconds. Each rank trains a copy of its
own: no FSDP, no exchange of gradients, no metrics, no guards; whole logits and plain autograd.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dapo.config.schema import Config
from dapo.types import TrainSequence
from workers.actor import ActorWorker, RankWork
from workers.training.attention import implementation
from workers.training.policy import MicroBatch, collate


class HandWrittenRank:
    """One process of the loop; a Ray actor in the benchmark."""

    def __init__(self, cfg: Config) -> None:
        torch.set_num_threads(cfg.actor.cpu_threads)
        self._cfg = cfg
        self._model = AutoModelForCausalLM.from_pretrained(
            cfg.model.path, dtype=torch.float32, attn_implementation=implementation(cfg.model.attn_implementation)
        )
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
        """Seconds for forward, backward and optimizer step over the rank's share."""
        began = time.perf_counter()
        for k in work.order:
            self._step(work.minibatches[k])
        return time.perf_counter() - began

    def _step(self, micro_batches: Sequence[Sequence[TrainSequence]]) -> None:
        for sequences in micro_batches:
            batch = collate(sequences, torch.device("cpu"))
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
    """Runs on an actor rank: seconds of one update within its process."""
    began = time.perf_counter()
    worker.update(work)
    return time.perf_counter() - began
