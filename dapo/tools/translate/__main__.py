"""Translates a run of verl or TRL: `python -m dapo.translate [--out FILE] SOURCE [NAME=VALUE ...]`.

    shell script, command line, YAML, TRL script ─▶ fields ─▶ outcome of each ─▶ experiment file and report

SOURCE is a shell script (NAME=VALUE sets its variables, KEY=VALUE goes where it has "$@"), a command line as it stands,
a YAML file, or a Python script with a GRPOConfig. Nothing of it is executed. The report has every field: same,
translated (how), no counterpart (what happens instead), refused (why). The exit code is 1 where a field is unaccounted
for; what a run on this machine would refuse of the file is said too.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.ground.console import EXIT_FAILED, end, say, warn

if TYPE_CHECKING:
    from dapo.tools.translate.outcome import Line

WIDTH = 60  # of a shown value


def main() -> None:
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "dapo translate",
        usage="dapo translate [--out FILE] [--command N] SOURCE [NAME=VALUE ...]",
        description=f"{about}\n{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, help="where to write the experiment file; without it, to standard output")
    parser.add_argument("--command", type=int, default=1, help="which training command of a script; the first is 1")
    given, words = parser.parse_known_args()  # another system's options stay as they are
    if not words:
        parser.error("give a script, a YAML file or a command line")
    from dapo.tools.translate.sources import read  # loads Hydra

    try:
        source = read(words, given.command)
    except (ValueError, OSError) as error:
        end(str(error))
    text, lines, problems = source.translated()
    report = [*_report(source.run.system, lines), *source.notes]
    report += [f"a run here would refuse it: {problem}" for problem in problems]
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text, encoding="utf-8")
        if given.out.parent.name == "experiment":
            folder, name = given.out.parent.parent, given.out.stem
            report.append(f"dapo train --config-dir {folder.resolve()} +experiment={name}")
        else:
            report.append(
                f"to train it: DIR/experiment/{given.out.name}, and dapo train --config-dir DIR "
                f"+experiment={given.out.stem}"
            )
    else:
        say(text)
    for line in report:
        (say if given.out else warn)(line)
    if unaccounted := [line.field for line in lines if line.outcome.kind == "unaccounted"]:
        end(f"unaccounted for: {', '.join(unaccounted)}", EXIT_FAILED)


def _report(system: str, lines: "list[Line]") -> "list[str]":
    from dapo.tools.translate.outcome import KINDS

    report: list[str] = []
    for kind in KINDS:
        of_kind = [line for line in lines if line.given and line.outcome.kind == kind]
        report += [f"{kind}: {len(of_kind)}"] if of_kind else []
        report += [f"  {line.field}={_shown(line.value)}: {line.outcome.said}" for line in of_kind]
    if left := [line for line in lines if not line.given]:
        report.append(f"not given, {system}'s own values: {len(left)}")
        for line in left:
            sets = ", ".join(f"`{key}`={_shown(value)}" for key, value in line.outcome.sets.items())
            report.append(f"  {line.field}={_shown(line.value)}: {sets or f'{line.outcome.kind}: {line.outcome.said}'}")
    counts = [f"{sum(line.given and line.outcome.kind == kind for line in lines)} {kind}" for kind in KINDS]
    return [*report, f"{sum(line.given for line in lines)} fields: {', '.join(counts)}"]


def _shown(value: Any) -> str:
    text = "".join(letter for letter in str(value) if letter.isprintable())
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


if __name__ == "__main__":
    main()
