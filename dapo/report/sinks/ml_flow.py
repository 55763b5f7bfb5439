"""Sends metrics to an MLflow server: one MLflow run per run directory, kept over restarts by an id file there."""

import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from dapo.ground.durable import write_text
from dapo.ground.redact import redacted
from dapo.report.sinks.sink import Sink

ID_FILE = "mlflow_id"
ARGUMENTS = ("tracking_uri", "experiment", "run_name")
WAIT_S = 60  # for its server, at the end
# Limits of one request, and of its retries: an unreachable server must not keep a run from ending.
LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
MOST_METRICS, MOST_PARAMETERS, LONGEST_VALUE = 1000, 100, 6000  # limits of one request


class MLflow(Sink):
    """Writes to one MLflow run, from a thread, without histograms. Steps repeated after a resume have both values."""

    name = "MLflow"

    def __init__(self, output_dir: Path, arguments: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """arguments: those of `ARGUMENTS` that are given. config: the run's parameters."""
        self._output_dir = output_dir
        self._arguments = dict(arguments)
        self._config = dict(config)
        self._client: Any = None
        self._id = ""
        self._thread: ThreadPoolExecutor | None = None
        self._sent: list[Future[None]] = []

    def begin(self, step: int) -> None:
        self._thread, self._sent = ThreadPoolExecutor(1, thread_name_prefix="mlflow"), []
        self._send(self._open)

    def _open(self) -> None:
        for name, value in (LIMITS | {"MLFLOW_DISABLE_TELEMETRY": "true"}).items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self._arguments.get("tracking_uri"))
        id_file = self._output_dir / ID_FILE
        if not id_file.is_file():
            write_text(id_file, self._new_run())
        self._id = id_file.read_text(encoding="utf-8")
        self._client.update_run(self._id, status="RUNNING")

    def _new_run(self) -> str:
        from mlflow.entities import Param

        name = self._arguments.get("experiment", "dapo")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = self._client.create_run(number, run_name=self._arguments.get("run_name", self._output_dir.name))
        parameters = [Param(mlflow_name(key), str(value)[:LONGEST_VALUE]) for key, value in self._config.items()]
        for some in _parts(parameters, MOST_PARAMETERS):
            self._client.log_batch(run.info.run_id, params=some)
        return str(run.info.run_id)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(mlflow_name(name), float(value), now, step) for name, value in values.items()]
        for some in _parts(metrics, MOST_METRICS):
            self._send(partial(self._log, some))

    def _log(self, metrics: list[Any]) -> None:
        self._client.log_batch(self._id, metrics=metrics)

    def text(self, step: int, tag: str, text: str) -> None:
        self._send(lambda: self._client.log_text(self._id, text, f"{mlflow_name(tag)}/step_{step:06d}.md"))

    def _send(self, work: Callable[[], None]) -> None:
        """Queues work for the thread. Raises the error of an earlier call, if any."""
        assert self._thread is not None
        ended = [one for one in self._sent if one.done()]
        self._sent = [one for one in self._sent if not one.done()] + [self._thread.submit(work)]
        for one in ended:
            one.result()

    def close(self) -> None:
        """Waits at most a minute for queued requests, and not at all after a failure."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        sent = [*self._sent, thread.submit(lambda: self._client.set_terminated(self._id))]
        wait(sent, WAIT_S, return_when=FIRST_EXCEPTION)
        thread.shutdown(wait=False, cancel_futures=True)


def mlflow_name(name: str) -> str:
    """Replaces characters that MLflow does not accept in a name by `_`.

    >>> mlflow_name("eval/pass@4_low")
    'eval/pass_4_low'
    """
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def problem(arguments: Mapping[str, Any]) -> str:
    """Returns what is wrong with `logging.mlflow`; empty if nothing is."""
    if not arguments:
        return ""
    if importlib.util.find_spec("mlflow") is None:
        return (
            f"`logging.mlflow` ({', '.join(arguments)}) needs the package mlflow, which is missing: pip install "
            "mlflow-skinny"
        )
    for name in arguments:
        if name not in ARGUMENTS:
            return f"`logging.mlflow.{name}` ({redacted(arguments)[name]}) is none of {', '.join(ARGUMENTS)}"
    if not (arguments.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")):
        return (
            f"`logging.mlflow` ({', '.join(arguments)}) names no server: set logging.mlflow.tracking_uri or "
            "MLFLOW_TRACKING_URI"
        )
    return ""


def _parts(those: Sequence[Any], most: int) -> Iterator[list[Any]]:
    for start in range(0, len(those), most):
        yield list(those[start : start + most])
