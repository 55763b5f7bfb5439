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
- With `logging.prometheus` Ray's Prometheus endpoints have the newest number of each as a gauge `ray_dapo_NAME` with
  the label `run`, `_` in NAME for what is neither a letter nor a digit, and none while it is not finite;
  `launch/grafana.json` is a dashboard of them (`prometheus.py`).
- The terminal shows one line a step; where nothing was printed for `logging.watchdog_s`, and for each wait that takes
  as long, one that says what is waited for and how far it is (`watchdog.py`).

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
