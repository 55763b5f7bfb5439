"""Prints the reference of all metrics as Markdown: `python -m dapo.report > dapo/report/README.md`."""

from dapo.report.names import HISTOGRAMS, tables

HEADER = """\
# What a run reports

Written by `python -m dapo.report > dapo/report/README.md` from `names.py`; edit that.

- `metrics.jsonl` (`log.py`) is always written: one line a step, one more for an evaluation; `null` is a number that is
  not finite.
- `tensorboard/` has the same numbers, histograms, `logging.samples` sample texts and the configuration as
  hyperparameters (`logging.tensorboard`).
- Weights & Biases has the same where `logging.wandb` gives `wandb.init` its arguments and the package is installed
  (`pip install wandb`): `logging.wandb.project=dapo`, without a network `logging.wandb.mode=offline` and later
  `wandb sync`. The run directory keeps the id, so that a resumed run goes on in the same one; the steps that it takes
  again keep their first values there.
- MLflow has the numbers, the sample texts and the configuration where `logging.mlflow.tracking_uri` names a server and
  the package is installed (`pip install mlflow-skinny`), `_` in names for what it refuses; a resumed run goes on in the
  same one, and steps that it takes again have both values there.
- With `logging.prometheus` Ray's Prometheus endpoints have the newest number of each as a gauge `ray_dapo_NAME` with
  the label `run`, `_` in NAME for what is neither a letter nor a digit, and none while it is not finite;
  `launch/grafana.json` is a dashboard of them (`sinks/prometheus.py`).
- The terminal shows one line a step, and between two of them what goes on (`progress.py`): in place, every second,
  where standard output and standard error are a terminal (`live.py`); else a line every `logging.watchdog_s` of a
  longer step. It begins with `in step`, and step lines with `step`, for who searches a log for one kind. The rate
  counts the tokens of responses that have ended since the step began to collect, `longest` the wait for a slot as well;
  more usable groups than wanted mean that an earlier draw is still to come. `left` is what the last five steps took,
  less what this one did; a step without any before it, or one that takes longer, says when the batch would be full if
  usable groups came as they did so far.
- For each wait that takes `logging.watchdog_s` a line says what is waited for (`watchdog.py`).
- A warning is printed once an hour (`console.py`); the same text, sizes and times aside, is counted meanwhile: in the
  next step line, and by text at the end of the run. The events in `samples.sqlite` have every one.
- `summary.json` (`../results/summary.py`) is written when a run ends, is stopped or fails, from its files alone, so
  that it covers all its starts: accuracy at first, at last and at best with 95 % intervals (held-out ones over
  problems, with the gain problem by problem; of drawn groups over the first and the last 10 steps), tokens, goodput,
  seconds by phase, what was survived, and GPU hours: those of engines, ranks, reward model and judges times the
  seconds from when the workers were ready to the end, of each start. Starts and hours are not known where a store that
  was damaged, or of another version, was set aside. `curves.png` lies beside it where matplotlib is installed; the
  terminal shows the rest in a few lines. A run that is killed, or whose Ray head dies, leaves none; `python -m
  dapo.compare RUN` shows the same.

Continuing a run drops the lines after the step that it continues from. `perf/` and `ledger/` depend on timing; at
staleness 0 all other metrics are a function of the seed. Words in braces stand for a name that a person gave: of a
reward function, of a data source. "Elsewhere" are the names of the same number in verl, in TRL and in guides.

## Metrics

"""


def main() -> None:
    """Prints the reference."""
    print(reference(), end="")


def reference() -> str:
    """Returns the whole document."""
    histograms = "\n".join(f"- `{name}`: {about}" for name, about in HISTOGRAMS.items())
    return f"{HEADER}{tables()}\n\n### Histograms, over the groups that a step used up\n\n{histograms}\n"


if __name__ == "__main__":
    main()
