"""Prints the reference of all checks as Markdown: `python -m dapo.doctor.readme > dapo/doctor/README.md`.

In: the list in `checks.py`. Out: how to call the doctor, and a row per check.
"""

from dapo.doctor.checks import ALL, CHECKS, DRIVER, NODE
from dapo.report.table import table

HEADER = """\
# dapo.doctor: what is wrong before a run starts

Written by `python -m dapo.doctor.readme > dapo/doctor/README.md` from `checks.py`; edit that.

```bash
python -m dapo.doctor +experiment=dapo_tiny                                        # this machine, without Ray
python -m dapo.doctor +experiment=dapo_qwen7b trainer.ray_address=auto --json      # every node of a cluster
python -m dapo.doctor --run +experiment=dapo_tiny                                  # then the run, without a fault
```

The arguments are those of the run (`python -m dapo.main_ppo`), and `plan.*` for what the planner assumes. Each check is
a line: `ok`, `warning` (a run goes on), `fault` (a run ends, or is spoilt) or `skipped` (another fault is in its way),
what was found, and the remedy. The exit status is 1 with a fault. `--json` prints level, text, remedy, seconds of each
check, and what each node said. Nothing is left behind; a run that uses the output directory is not disturbed.

Where `trainer.ray_address` or RAY_ADDRESS names a cluster, checks of every node are Ray tasks that ask for no CPU, one
per node, each with a deadline of 120 s; the all-reduce has a rank per GPU, without GPUs one per node, and waits 90 s.
It takes all GPUs for some seconds: call the doctor before the run, not beside it. Of several nodes a line tells what
the worst say.

With `trainer.preflight`, which is the default, each run makes some of the checks on the driver's machine before it
starts workers (`before_run.py`): a fault ends it, a warning is printed.

`dapo_tiny` without a cluster takes 12 to 16 s of CPU time on two cores. On GPUs (NCCL, CUDA) nothing of it ever
ran, for lack of them.
"""
WHERE = {NODE: "every node", DRIVER: "the driver", ALL: "all nodes together"}


def main() -> None:
    """Prints the reference."""
    print(reference(), end="")


def reference() -> str:
    """Returns the whole document."""
    rows = [[f"`{check.name}`", WHERE[check.where], check.text, "yes" if check.cheap else ""] for check in CHECKS]
    names = ("check", "where", "what it looks at", "in each run")
    return f"{HEADER}\n## Checks\n\n{table(names, rows)}\n"


if __name__ == "__main__":
    main()
