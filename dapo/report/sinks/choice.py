"""Creates the sinks of a run from `logging`: TensorBoard, Weights & Biases, MLflow and Prometheus."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dapo.config.schema import Config
from dapo.ground.redact import redacted
from dapo.report.sinks import ml_flow, prometheus, weights_and_biases
from dapo.report.sinks.events import TensorBoard
from dapo.report.sinks.ml_flow import MLflow
from dapo.report.sinks.prometheus import Prometheus
from dapo.report.sinks.sink import Sink
from dapo.report.sinks.weights_and_biases import WeightsAndBiases

OFF: dict[str, Any] = {"tensorboard": False, "wandb": {}, "mlflow": {}, "prometheus": False}  # `logging` without any


def problems(cfg: Config) -> Iterator[str]:
    found = (
        weights_and_biases.problem(cfg.logging.wandb),
        ml_flow.problem(cfg.logging.mlflow),
        prometheus.problem(cfg.logging.prometheus),
    )
    yield from filter(None, found)


def sinks_of(cfg: Config, output_dir: Path, gauge: Callable[..., Any] | None = None) -> list[Sink]:
    """Returns the sinks that `logging` enables; they receive no secrets. gauge: `ray.util.metrics.Gauge` under Ray."""
    flat = dict(_flat(redacted(asdict(cfg))))
    sinks: list[Sink] = [TensorBoard(output_dir, flat)] if cfg.logging.tensorboard else []
    if cfg.logging.wandb:
        sinks.append(WeightsAndBiases(output_dir, cfg.logging.wandb, flat))
    if cfg.logging.mlflow:
        sinks.append(MLflow(output_dir, cfg.logging.mlflow, flat))
    if cfg.logging.prometheus and gauge is not None:
        sinks.append(Prometheus(output_dir, gauge))
    return sinks


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | float | bool]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str | float | int) else str(value)
