"""What an update took of the ranks: memory, tokens per GPU, MFU."""

import numpy as np
import pytest

from dapo.config.facts.model_shape import read_shape
from dapo.ground.usage import RankUse
from dapo.tools.bench.setting import random_batch
from dapo.types import TrainBatch
from dapo.workers.training.update_metrics import begin_use, end_use, model_flops, rank_metrics
from tests.support.report.reference import undocumented

SHAPE = read_shape("Qwen/Qwen2.5-7B")
H200 = RankUse(resident_bytes=10, device="NVIDIA H200", gpu_peak_bytes=70)


def batch(*lengths: tuple[int, int], epochs: int = 1) -> TrainBatch:
    """Prompt and response tokens of each sequence; every second one in the other mini-batch."""
    [whole] = random_batch(list(lengths), 100, np.random.default_rng(0)).minibatches
    return TrainBatch(version=0, minibatches=(whole[::2], whole[1::2]), order=(0, 1) * epochs)


def test_model_flops_are_six_per_weight_and_token_and_attention() -> None:
    given = batch((512, 1536), (512, 512))
    tokens, answers = 3072, 2048
    matrices = SHAPE.num_layers * SHAPE.layer_matrices * tokens + SHAPE.embedding_parameters * answers
    attention = 2 * SHAPE.num_layers * SHAPE.attention_size * (2048**2 + 1024**2)
    assert model_flops(given, SHAPE, lora=False) == pytest.approx(6 * matrices + 3 * attention)
    assert model_flops(given, SHAPE, lora=True) == pytest.approx(4 * matrices + 2 * attention)
    twice = batch((512, 1536), (512, 512), epochs=2)
    assert model_flops(twice, SHAPE, lora=False) == pytest.approx(2 * model_flops(given, SHAPE, lora=False))


def test_metrics_of_ranks() -> None:
    given = batch((512, 1536), (512, 512))
    other = RankUse(resident_bytes=30, device="NVIDIA H200", gpu_peak_bytes=60)
    found = rank_metrics([H200, other], given, 2.0, SHAPE, lora=False)
    assert found == pytest.approx(
        {
            "perf/rank/resident_bytes": 30,
            "perf/rank/gpu_peak_bytes": 70,
            "perf/rank/tokens_per_s_per_gpu": 3072 / (2.0 * 2),
            "perf/rank/mfu": model_flops(given, SHAPE, lora=False) / (2.0 * 2 * 989e12),
        }
    )
    assert undocumented(found) == []
    begin_use("cpu")
    here = end_use("cpu")
    assert here.resident_bytes > 50e6
    assert rank_metrics([here], given, 1.0, SHAPE, lora=False) == {"perf/rank/resident_bytes": here.resident_bytes}
    unknown = RankUse(resident_bytes=1, device="NVIDIA X")
    for use, shape in ((unknown, SHAPE), (H200, None)):
        assert "perf/rank/mfu" not in rank_metrics([use], given, 1.0, shape, lora=False)
