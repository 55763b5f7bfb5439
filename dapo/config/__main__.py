"""Prints the reference of all keys as Markdown: `python -m dapo.config > config/README.md`, or what some keys or
sections are: `python -m dapo.config KEY ...`.

Reads the configuration's fields and the experiment files; prints tables of key, default, meaning, and the names in verl
(with dots) and TRL.
"""

import dataclasses
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any

from dapo.config.fields import ITEM, MISSING, About, Key, keys
from dapo.config.names import experiments, hint
from dapo.config.paths import config_dir
from dapo.config.plan import PlannedConfig

HEADER = """\
# Configuration

Written by `python -m dapo.config > config/README.md` from the fields in `dapo/config/`; edit those.

```bash
dapo train dapo_tiny trainer.seed=1 rollout.vllm.max_num_seqs=64   # key=value, no dashes
dapo train dapo_tiny --cfg job                                     # prints all keys with their values
```

[Hydra](https://hydra.cc) composes the defaults below, an experiment (a YAML file in `experiment/`) and the command
line. Wrong keys, types and combinations are reported together before any worker starts. What can mean
one thing alone is taken as that: `actor.lr=1e-6` is `actor.optim.lr`. Durations (`_s`) are in seconds. A key without a
default must be given. In the last column names with dots are verl's, the others TRL's.

A run of verl (shell script, command line, resolved YAML) or TRL (script, command line, YAML) becomes an experiment;
nothing of it is executed:

```bash
dapo translate --out own/experiment/mine.yaml run_dapo.sh MODEL_PATH=Qwen/Qwen2.5-7B  # sets a variable of the script
dapo train --config-dir own +experiment=mine
```

The report has every field: *same* (perhaps under another name), *translated* (how), *no counterpart* (what happens
instead), *refused* (why); then the other system's own values of what is not given, where dapo's differ. A field that is
*unaccounted* for comes first, and the exit code is 1.

| experiment | what it is |
|---|---|"""
TABLE = "| key | default | meaning | elsewhere |\n|---|---|---|---|"
LADDERS = "the paper's techniques one by one ([ablation](../dapo/tools/ablation/README.md))"
RANGE = re.compile(r"(?:at least \d+|0 or more|greater than 0|above 0 and at most 1); ")  # not worth its words


def main() -> None:
    """`KEY ...` prints the keys of these names, or of these sections."""
    names = sys.argv[1:]
    if {"-h", "--help"} & {*names}:
        print(
            "python -m dapo.config [KEY ...]: what a key or the keys of a section mean; without: the table of all keys"
        )
    elif names:
        print("\n\n".join(map(about, names)))
    else:
        print(reference(), end="")


def about(name: str) -> str:
    """Returns default, meaning and allowed values of a key, or of each key of a section. Exits for an unknown name."""
    found = [
        one for one in keys(PlannedConfig) if f"{one.name}.".startswith(f"{name}.") or one.name.startswith(f"{name}[")
    ]
    if not found:
        sys.exit(f"dapo.config: unknown key `{name}`; {hint(name, plan=True)}")
    return "\n\n".join(_text(one) for one in found)


def _text(one: Key) -> str:
    also = [f"in {system}: {names}" for system, names in (("verl", one.about.verl), ("TRL", one.about.trl)) if names]
    values = [f"values: {one.about.values}"] if one.about.values else []
    return "\n    ".join([f"{one.name} (default: {_default(one.default).strip('`')})", one.about.text, *values, *also])


def reference() -> str:
    lines = [HEADER, *(f"| `{name}` | {_cell(_first_words(name))} |" for name in experiments() if "/" not in name)]
    lines += [
        f"| `{folder}/...` | {LADDERS} |"
        for folder in sorted({name.split("/")[0] for name in experiments() if "/" in name})
    ]
    for section, kind in typing.get_type_hints(PlannedConfig).items():
        lines += ["", f"## `{section}`", "", "\n".join(_sections(kind)).rstrip(), "", TABLE]
        lines += [_row(one) for one in keys(kind, f"{section}.") if one.name.count(ITEM) < 2]
    return "\n".join(lines) + "\n"


def _first_words(experiment: str) -> str:
    text = (config_dir() / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in text[1:] if line.startswith("#"))
    return re.split(r"(?<!Dr)(?<!Eq)\.(?: |$)", comment)[0]


def _sections(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yields the docstrings of a section's class and of its nested sections."""
    said = " ".join((kind.__doc__ or "").split())
    yield f"- `{prefix[:-1]}`: {said}" if prefix else f"{said}\n"
    for name, inner in typing.get_type_hints(kind).items():
        for one in (inner, *typing.get_args(inner)):
            if dataclasses.is_dataclass(one):
                yield from _sections(one, f"{prefix}{name}.")


def _row(one: Key) -> str:
    about = one.about
    cells = (f"`{one.name}`", _default(one.default), "; ".join(filter(None, _meaning(about))), _elsewhere(about))
    return f"| {' | '.join(_cell(cell) for cell in cells)} |".removesuffix("  |")


def _meaning(about: About) -> Iterator[str]:
    """Yields the meaning, choices that it does not name, and what the allowed values say besides a range."""
    yield about.text
    if about.values.startswith("one of "):
        names = about.values.removeprefix("one of ").partition(" (")[0].partition(", or ")[0].split(", ")
        yield "" if f"`{names[-1]}`" in about.text else "one of " + ", ".join(f"`{name}`" for name in names)
    elif found := RANGE.match(about.values):
        yield about.values[found.end() :]


def _elsewhere(about: About) -> str:
    return ", ".join(f"`{name}`" for name in f"{about.verl}, {about.trl}".split(", ") if name)


def _default(value: Any) -> str:
    if value in (MISSING, [MISSING]):
        return ""
    if isinstance(value, list) and any(dataclasses.is_dataclass(item) for item in value):
        return "`[{path: math}]`"
    if value is None:
        return "empty"
    if isinstance(value, str) and (len(value) > 60 or "\n" in value):
        return "in `dapo/config/reward.py`"
    shown = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{shown}`" if shown else "empty"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
