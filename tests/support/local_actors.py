"""Actors of one rank in the test's own process: any iterable of (name, tensor), sent by the real `WeightSender`."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from dapo.config.schema import Config
from dapo.types import Float32Array, TrainSequence
from dapo.workers.weight_sync import WeightSync
from dapo.workers.weights.bucket import Bucket, Endpoint
from dapo.workers.weights.sender import WeightSender


class LocalActors:
    """Fulfils `workers.weight_sync.WeightSource`. before(index): called when bucket `index` is asked for."""

    def __init__(self, model: nn.Module, bucket_bytes: int, before: Callable[[int], None] = lambda index: None) -> None:
        self._before = before
        self._model = model
        self.sender = WeightSender(
            lambda: ((name, parameter.detach()) for name, parameter in model.named_parameters()),
            [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()],
            dtype="float32",
            bucket_bytes=bucket_bytes,
            rank=0,
            device=torch.device("cpu"),
            readers=2,
        )

    def restarts(self) -> dict[str, float]:
        return {}

    async def until_idle(self) -> None:
        pass

    async def open_weights(self, transport: str) -> tuple[int, Sequence[Endpoint | None]]:
        return self.sender.num_buckets, [self.sender.open(transport, "127.0.0.1", 60)]

    async def join_weights(self, transport: str, num_receivers: int) -> None:
        await asyncio.to_thread(self.sender.join, num_receivers)

    async def close_weights(self, transport: str) -> None:
        self.sender.close()

    async def gather_bucket(self, transport: str, index: int, what: str) -> Bucket:
        self._before(index)
        bucket = await asyncio.to_thread(self.sender.gather, index)
        assert bucket is not None
        return bucket

    async def policy_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        return [self._logprobs(sequence) for sequence in sequences]

    @torch.no_grad()
    def _logprobs(self, sequence: TrainSequence) -> Float32Array:
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
        logprobs = torch.log_softmax(self._model(ids).logits[0], dim=-1)[sequence.num_prompt_tokens - 1 : -1]
        return logprobs.gather(1, ids[0, sequence.num_prompt_tokens :, None])[:, 0].numpy()


def local_sync(
    pool, model: nn.Module, transport: str = "broadcast", bucket_bytes: int = 1 << 30, **kwargs
) -> WeightSync:
    """A weight sync from `model` to the engines of `pool`, not yet connected."""
    cfg = Config()
    cfg.weight_sync.transport, cfg.weight_sync.timeout_s = transport, 60
    return WeightSync(LocalActors(model, bucket_bytes, **kwargs), pool, cfg)
