"""The engine's half of the weight sync, inside vLLM's worker processes (DESIGN section 8).

vLLM imports this module as `worker_extension_cls`, which registers the transfer backend there. In: paths of bucket
files with their digests. Out: the engine's model holds exactly those weights, or the update raises.
"""

import ctypes
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from workers.weight_sync import BACKEND, digest


@dataclass
class BucketInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: each bucket describes itself."""


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """path: a safetensors image on this node. digest: what the sender computed over its bytes."""

    path: str
    digest: str


class BucketTransferEngine(WeightTransferEngine[BucketInitInfo, BucketUpdateInfo]):
    """Loads buckets through the model's own loader, layer by layer, and refuses an incomplete or altered set."""

    init_info_cls = BucketInitInfo
    update_info_cls = BucketUpdateInfo

    def init_transfer_engine(self, init_info: BucketInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Restores the parameters to their checkpoint layout and notes which ones must arrive."""
        initialize_layerwise_reload(self.model)
        self._missing = {name for name, _ in self.model.named_parameters()}
        if self.model_config.hf_config.tie_word_embeddings:
            self._missing.discard("lm_head.weight")  # it is the embedding; see finish_weight_update

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """Checks one bucket's digest and loads it.

        Raises:
            RuntimeError: the bytes differ from those that the actors sent.
        """
        image = Path(update_info.path).read_bytes()
        found = digest(image)
        if found != update_info.digest:
            raise RuntimeError(
                f"weight bucket {update_info.path} has digest {found}, the actors sent {update_info.digest}"
            )
        self._missing -= self.model.load_weights(iter(load(image).items()))

    def finish_weight_update(self) -> None:
        """Puts the kernel layout back.

        Raises:
            RuntimeError: some parameter of the engine got no new value.
        """
        if self._missing:
            raise RuntimeError(
                f"the weight sync left {len(self._missing)} parameters stale: {sorted(self._missing)[:5]}"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        # A tied LM head keeps its own packed copy of the embedding on CPU, which the layerwise reload does not renew.
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to release."""


class WeightReceiverExtension:
    """Mixed into vLLM's worker class."""

    def weight_digest(self) -> str:
        """Digest of the model's parameters as they lie in this worker, for tests."""
        tensors = [tensor.detach().float().cpu().numpy().tobytes() for tensor in self.model_runner.model.parameters()]  # type: ignore[attr-defined]
        return digest(b"".join(tensors))


def _die_with_parent() -> None:
    """An engine process whose Ray actor was killed must not stay behind and hold the device (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


_die_with_parent()
WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)
