"""Prints the reference of all metrics as Markdown: `python -m dapo.report > dapo/report/README.md`."""

from dapo.report.names import tables

HEADER = """\
# What a run reports

Written by `python -m dapo.report > dapo/report/README.md` from `names.py`; edit that.

| where | what | file |
|---|---|---|
| `metrics.jsonl` | one line a step, one more for an evaluation; `null` is a number that is not finite. Always written | `log.py` |
| `tensorboard/` | the same numbers, histograms of length and pass rate, sample texts (`logging.tensorboard`, `logging.samples`) | `events.py` |
| the terminal | one line a step | `log.py`, `console.py` |

Continuing a run drops the lines after the step that it continues from. `perf/` and `ledger/` depend on timing; at staleness 0 all
other metrics are a function of the seed. Words in braces stand for a name that a person gave: of a reward function, of a data
source. "Elsewhere" are the names of the same number in verl and TRL and in guides.

## Metrics

"""


def main() -> None:
    """Prints the reference."""
    print(reference(), end="")


def reference() -> str:
    """Returns the whole document."""
    return HEADER + tables() + "\n"


if __name__ == "__main__":
    main()
