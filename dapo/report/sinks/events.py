"""Writes TensorBoard's event files: scalars, histograms, texts and hyperparameters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo.report.sinks.sink import Sink

FOLDER = "tensorboard"
SHOWN = ("rollout/accuracy", "eval/accuracy")  # beside the hyperparameters, to compare runs by
LAYOUT = {  # of the tab with custom scalars: what to look at first
    "first": {
        "accuracy": ["Multiline", ["rollout/accuracy", "eval/accuracy"]],
        "held-out accuracy with its interval": ["Margin", ["eval/accuracy", "eval/accuracy_low", "eval/accuracy_high"]],
        "reward": ["Multiline", ["rollout/reward_mean", "batch/reward_mean"]],
        "groups": ["Multiline", ["buffer/drawn", "buffer/trained", "buffer/all_correct", "buffer/all_wrong"]],
        "response length": ["Multiline", ["rollout/response_length_mean", "rollout/response_length_max"]],
        "entropy": ["Multiline", ["actor/entropy"]],
        "clipped tokens": ["Multiline", ["actor/clip_fraction_low", "actor/clip_fraction_high"]],
        "gradient norm": ["Multiline", ["actor/grad_norm"]],
        "seconds": ["Multiline", ["perf/step_s", "perf/generation_s", "perf/update_s", "perf/sync_s"]],
    }
}


class TensorBoard(Sink):
    """Writes OUTPUT_DIR/tensorboard/NAME, where NAME is OUTPUT_DIR's, as TensorBoard calls a run by its folder. Each
    `begin` starts a new file, which voids later steps of earlier files. A scalar of a new run begins with the last 0
    before its first other value: many would otherwise be empty charts."""

    def __init__(self, output_dir: Path, hyperparameters: Mapping[str, str | float | bool] | None = None) -> None:
        self.name = f"TensorBoard's folder {output_dir / FOLDER}"
        self._folder = output_dir / FOLDER / output_dir.absolute().name
        self._hyperparameters = hyperparameters
        self._events: Any = None
        self._zeros: dict[str, int] | None = None  # step of the last 0, by scalar; None: the run is resumed
        self._begun: set[str] = set()

    def begin(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # The queue holds all values of a step: with the default of 10, each value waits for the writing thread.
        self._events = SummaryWriter(self._folder, purge_step=step + 1 if step else 0, max_queue=1000)
        self._zeros, self._begun = (None if step else {}), set()
        self._events.add_custom_scalars(LAYOUT)
        if self._hyperparameters:
            for summary in hparams(dict(self._hyperparameters), dict.fromkeys(SHOWN, 0.0)):
                self._events.file_writer.add_summary(summary)
            self._events.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if self._zeros is not None and name not in self._begun:
                if value == 0:
                    self._zeros[name] = step
                    continue
                self._begun.add(name)
                if name in self._zeros:
                    self._events.add_scalar(name, 0.0, self._zeros[name])
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        import numpy as np

        self._events.add_histogram(name, np.asarray(values, dtype=float), step)

    def text(self, step: int, tag: str, text: str) -> None:
        self._events.add_text(tag, text.encode("utf-8", "replace").decode(), step)
        self._events.flush()

    def close(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()
