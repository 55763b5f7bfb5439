"""Prints the reference of all keys as Markdown: `python -m dapo.config > config/README.md`.

Reads the configuration's fields and the experiment files; prints tables of key, default, meaning, allowed values, and
the corresponding names in verl and TRL.
"""

import dataclasses
import re
import typing
from collections.abc import Iterator
from typing import Any

from dapo.config.fields import MISSING, Key, keys
from dapo.config.names import experiments
from dapo.config.paths import config_dir
from dapo.config.plan import PlannedConfig

HEADER = """\
# Configuration

Written by `python -m dapo.config > config/README.md` from the fields in `dapo/config/`; edit those.

```bash
python -m dapo.main_ppo +experiment=dapo_tiny trainer.seed=1 rollout.vllm.max_num_seqs=64   # key=value, no dashes
python -m dapo.main_ppo +experiment=dapo_tiny --cfg job                                     # print the composed tree
```

[Hydra](https://hydra.cc) composes the defaults below, an experiment (a YAML file in `experiment/` with what differs
from them) and the command line, in this order. Before any worker starts, unknown keys, values of a wrong type or out of
range, and keys that do not go together are reported, all at once. Engine arguments of vLLM stand under their own names
in `rollout.vllm`.

A run of verl (shell script, command line, resolved YAML) or TRL (script, command line, YAML) becomes an experiment;
nothing of it is executed:

```bash
python -m dapo.translate --out own/experiment/mine.yaml run_dapo.sh MODEL_PATH=Qwen/Qwen2.5-7B  # sets a variable
python -m dapo.main_ppo --config-dir own +experiment=MINE
```

The report has every field: *same* (perhaps under another name), *translated* (how), *no counterpart* (what happens
instead), *refused* (why); then the other system's own values of what is not given, where dapo's differ. A field that is
*unaccounted* for comes first, and the exit code is 1. The last two columns below are the names that it goes by.

| experiment | what it is |
|---|---|"""
TABLE = "| key | default | meaning | values | verl | TRL |\n|---|---|---|---|---|---|"


def main() -> None:
    print(reference(), end="")


def reference() -> str:
    lines = [HEADER, *(f"| `{name}` | {_cell(_first_words(name))} |" for name in experiments())]
    for section, kind in typing.get_type_hints(PlannedConfig).items():
        lines += ["", f"## `{section}`", "", "\n".join(_sections(kind)).rstrip(), "", TABLE]
        lines += [_row(one) for one in keys(kind, f"{section}.")]
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
    cells = (f"`{one.name}`", _default(one.default), about.text, about.values, _names(about.verl), _names(about.trl))
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _default(value: Any) -> str:
    if value in (MISSING, [MISSING]):
        return "to be given"
    if isinstance(value, list) and any(dataclasses.is_dataclass(item) for item in value):
        return "the defaults below, once"
    if value is None:
        return "empty"
    shown = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{shown}`" if shown else "empty"


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", ") if name)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
