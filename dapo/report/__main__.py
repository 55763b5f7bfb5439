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
- The terminal shows one line a step; where nothing was printed for `logging.watchdog_s`, and for each wait that takes
  as long, one that says what is waited for and how far it is (`watchdog.py`).
- `summary.json` (`summary.py`) is written when a run ends, is stopped or fails, from its files alone, so that it covers
  all its starts: accuracy at first, at last and at best with 95 % intervals (held-out ones over problems, with the gain
  problem by problem; of drawn groups over the first and the last 10 steps), tokens, goodput, seconds by phase, what was
  survived, and GPU hours: those of engines, ranks and reward model times the seconds from when the workers were ready
  to the end, of each start. `curves.png` lies beside it where matplotlib is installed; the terminal shows the rest in a
  few lines. A run that is killed, or whose Ray head dies, leaves none; `python -m dapo.compare RUN` shows the same.

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
