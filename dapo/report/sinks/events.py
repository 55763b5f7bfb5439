"""Writes TensorBoard's event files: scalars, histograms, texts and hyperparameters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
SHOWN = ("rollout/accuracy", "eval/accuracy")  # beside the hyperparameters, to compare runs by


class TensorBoard:
    """Writes OUTPUT_DIR/tensorboard. Each `begin` starts another file, which voids what earlier files have for
    later steps."""

    def __init__(self, output_dir: Path, hyperparameters: Mapping[str, str | float | bool] | None = None) -> None:
        self.name = f"TensorBoard's folder {output_dir / FOLDER}"
        self._folder = output_dir / FOLDER
        self._hyperparameters = hyperparameters
        self._events: SummaryWriter | None = None

    def begin(self, step: int) -> None:
        """Does what `Sink` says."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # A queue for all values of a step: at its default of 10, each of them waits for the writing thread.
        self._events = SummaryWriter(self._folder, purge_step=step + 1 if step else 0, max_queue=1000)
        if self._hyperparameters:
            writer: Any = self._events.file_writer  # declared as None
            for summary in hparams(dict(self._hyperparameters), dict.fromkeys(SHOWN, 0.0)):
                writer.add_summary(summary)
            self._events.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Does what `Sink` says."""
        events = self._writer()
        for name, value in values.items():
            events.add_scalar(name, value, step)
        events.flush()

    def histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        """Does what `Sink` says."""
        import numpy as np

        self._writer().add_histogram(name, np.asarray(values, dtype=float), step)

    def text(self, step: int, tag: str, text: str) -> None:
        """Does what `Sink` says."""
        events = self._writer()
        events.add_text(tag, text.encode("utf-8", "replace").decode(), step)
        events.flush()

    def close(self) -> None:
        """Does what `Sink` says."""
        events, self._events = self._events, None
        if events is not None:
            events.close()

    def _writer(self) -> "SummaryWriter":
        assert self._events is not None, "begin comes first"
        return self._events
