"""Evaluates a checkpoint: `python -m dapo.evaluate [+experiment=NAME] model.path=DIR data.val_files=[...] [key=value]`.

    command line ─▶ Config, checked ─▶ held-out prompts ─▶ engines, reward workers ─▶ answers ─▶ tables, JSON

Any Hugging Face directory or hub name works, also `checkpoints/step_*/hf` of a run. The keys are those of a run; keys
of the actors have no effect. `eval.n`, `eval.temperature`, `eval.top_p` and `data.max_response_length` set the
sampling. The tables are printed last; `evaluation_NNN.json` has them and the score of every answer: in the run whose
checkpoint it is, else beside the model's directory, else under `outputs/evaluations`, or in `trainer.output_dir` where
that is given. With `--job` it only prints that directory, for `launch/slurm/eval.sbatch`.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dapo.config.compose import compose
from dapo.config.paths import PKG_SCHEME, output_path, resolve_path
from dapo.config.run_name import GIVEN
from dapo.config.sampling import SamplingConfig
from dapo.config.schema import Config
from dapo.data.origins import origins
from dapo.data.sources import held_out_files
from dapo.evaluation.held_out import Answered
from dapo.evaluation.summary import document, summaries, text
from dapo.ground.console import EXIT_INTERRUPTED, end, say
from dapo.ground.durable import make_folder, remove_empty
from dapo.ground.redact import redacted
from dapo.state.checkpoint import STEP_NAME
from dapo.state.run_dir import CONFIG

NO_TRAINING = "data.train_files=[none]"  # required by the configuration, never read here
JOB = "--job"
LINES_S = 30.0  # between two progress lines in a file


class Progress:
    """A progress bar on a terminal, an occasional line in a file."""

    def __init__(self) -> None:
        self._bar: Any = None

    def begin(self, total: int) -> None:
        every = 0.2 if sys.stderr.isatty() else LINES_S
        self._bar = tqdm(total=total, unit=" answers", mininterval=every, maxinterval=every, dynamic_ncols=True)

    def add(self, count: int) -> None:
        self._bar.update(count)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def configuration(overrides: Sequence[str]) -> Config:
    """Returns the checked configuration. Raises ValueError as `compose` does, and if there are no held-out files."""
    cfg = compose([NO_TRAINING, *overrides], trains=False)
    cfg.data.train_files = []  # not recorded as inputs of the evaluation
    for source in cfg.data.sources:
        source.files = []
    if not any(held_out_files(cfg.data)):
        raise ValueError("`data.val_files` is empty; give at least one file, as in data.val_files=[a.parquet]")
    return cfg


def folder_of(cfg: Config, overrides: Sequence[str]) -> Path:
    """Returns the directory of the results, as the head of this file says."""
    if any(override.lstrip("+").startswith(f"{GIVEN}=") for override in overrides):
        return output_path(cfg.trainer.output_dir)
    model = Path(resolve_path(cfg.model.path))
    if model.is_dir() and not cfg.model.path.startswith(PKG_SCHEME):
        step = model.parent
        is_of_run = STEP_NAME.fullmatch(step.name) and (step.parents[1] / CONFIG).is_file()
        folder = step.parents[1] if is_of_run else step / f"{model.name}-evaluations"
        if os.access(folder if is_of_run else step, os.W_OK):
            return folder
    return output_path(f"outputs/evaluations/{re.sub(r'[^A-Za-z0-9._-]+', '-', cfg.model.path).strip('-')}")


async def evaluate(cfg: Config) -> Answered:
    from dapo.driver import run  # loads torch and Ray, which takes seconds

    progress = Progress()
    try:
        return await run.evaluate(cfg, progress.begin, progress.add)
    finally:
        progress.close()


def write(folder: Path, cfg: Config, answered: Answered) -> Path:
    sampling = {field.name: getattr(cfg.eval, field.name) for field in fields(SamplingConfig)}
    about = {
        "model": cfg.model.path,
        "inputs": origins(cfg),
        "val_files": cfg.data.val_files,
        "chat_template_kwargs": cfg.data.chat_template_kwargs,
        "sampling": {**sampling, "max_response_length": cfg.data.max_response_length},
        "seed": cfg.trainer.seed,
    }
    found = json.dumps({**redacted(about), **document(answered, summaries(answered))}, indent=1, allow_nan=False)
    number = 1
    while True:
        path = folder / f"evaluation_{number:03d}.json"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(found + "\n")
            return path
        except FileExistsError:
            number += 1


def main() -> None:
    if not sys.argv[1:] or {"-h", "--help"} & set(sys.argv[1:]):
        say(__doc__)
        return
    arguments = [argument for argument in sys.argv[1:] if argument != JOB]
    try:
        cfg = configuration(arguments)
        folder = folder_of(cfg, arguments)
        if len(arguments) < len(sys.argv) - 1:
            say(f"output_dir {folder}")
            return
        from dapo.driver.preflight import file_problems

        if problems := [*dict.fromkeys(file_problems(cfg, trains=False))]:
            raise ValueError("\n".join(problems))
        made = make_folder(folder)  # fail now, not after hours
        try:
            answered = asyncio.run(evaluate(cfg))
            say(text(summaries(answered)))
            say(f"written to {write(folder, cfg, answered)}")
        finally:
            remove_empty(made)
    except (KeyboardInterrupt, asyncio.CancelledError):
        end("interrupted; nothing was written", EXIT_INTERRUPTED)
    except (ValueError, RuntimeError, OSError) as error:
        end(str(error))


if __name__ == "__main__":
    main()
