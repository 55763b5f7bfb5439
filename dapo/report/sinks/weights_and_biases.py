"""Sends metrics to Weights & Biases: one W&B run per run directory, kept over restarts by an id file there."""

import importlib.util
import inspect
import os
import secrets
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dapo.config.names import nearest
from dapo.ground.durable import write_text
from dapo.ground.redact import redacted
from dapo.report.sinks.sink import Sink

ID_FILE = "wandb_id"
OWN = {"dir", "config", "id", "resume", "settings", "reinit"}  # arguments that dapo sets
WAIT_S = 60  # for its server, at the start and at the end


class WeightsAndBiases(Sink):
    """Writes to one W&B run. Steps repeated after a resume keep their first values there."""

    name = "Weights & Biases"

    def __init__(self, output_dir: Path, arguments: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """arguments: of `wandb.init`. config: the hyperparameters that its pages show."""
        self._output_dir = output_dir
        self._arguments = dict(arguments)
        self._config = dict(config)
        self._run: Any = None

    def begin(self, step: int) -> None:
        import wandb

        id_file = self._output_dir / ID_FILE
        if not id_file.is_file():
            write_text(id_file, secrets.token_hex(4))
        # x_disable_meta: wandb's machine metadata includes the command line, which may contain secrets.
        settings = wandb.Settings(
            init_timeout=WAIT_S, finish_timeout=WAIT_S, silent=True, console="off", x_disable_meta=True
        )
        self._run = wandb.init(
            **{"name": self._output_dir.name, **self._arguments},
            dir=str(self._output_dir),
            config=self._config,
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            settings=settings,
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        import wandb

        self._run.log({name: wandb.Histogram(list(values))}, step=step)

    def text(self, step: int, tag: str, text: str) -> None:
        import wandb

        self._run.log({tag: wandb.Html(f"<pre>{escape(text)}</pre>", inject=False)}, step=step)

    def close(self) -> None:
        """Waits at most a minute for unsent data; the rest stays in the run directory, for `wandb sync`."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def problem(arguments: Mapping[str, Any]) -> str:
    """Returns what is wrong with `logging.wandb`; empty if nothing is."""
    if not arguments:
        return ""
    if importlib.util.find_spec("wandb") is None:
        return f"`logging.wandb` ({redacted(arguments)}) needs the package wandb, which is missing: pip install wandb"
    import wandb

    known = inspect.signature(wandb.init).parameters.keys() - OWN
    for name in arguments.keys() - known:
        remedy = nearest(name, known) or f"it takes {', '.join(sorted(known))}"
        return f"`logging.wandb.{name}` is no argument of `wandb.init` that can be set; {remedy}"
    if arguments.get("mode", os.environ.get("WANDB_MODE", "online")) != "online":
        return ""
    if not wandb.login(prompt=False):
        return (
            "`logging.wandb` needs an API key for its server: run `wandb login`, set WANDB_API_KEY, or write to disk "
            "alone with logging.wandb.mode=offline"
        )
    return ""
