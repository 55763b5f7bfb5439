"""Evaluates a checkpoint: `python -m dapo.evaluate [+experiment=NAME] model.path=DIR data.val_files=[...] [key=value]`.

    command line ─▶ Config, checked ─▶ held-out prompts ─▶ engines, reward workers ─▶ answers ─▶ tables, JSON

Any Hugging Face directory or hub name will do, also `checkpoints/step_*/hf` of a run. The keys are those of a run, the
actors' without effect: `eval.n`, `eval.temperature`, `eval.top_p` and `data.max_response_length` say how answers are
sampled. The tables come last; `evaluation_NNN.json` in `trainer.output_dir` holds them and the verdict on every answer.
With `--job` it prints that directory alone, for `launch/slurm/eval.sbatch`.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dapo.config.compose import compose
from dapo.config.paths import output_path
from dapo.config.schema import Config
from dapo.data.origins import origins
from dapo.data.sources import held_out_files
from dapo.evaluate.evaluation import Answered
from dapo.evaluate.summary import document, summaries, text
from dapo.report.console import EXIT_INTERRUPTED, end, say
from dapo.report.redact import redacted

NO_TRAINING = "data.train_files=[none]"  # the configuration asks for some; nothing reads them here
JOB = "--job"
LINES_S = 30.0  # between two lines of progress where the output is a file


class Progress:
    """Shows how many answers there are: a bar on a terminal, a line now and then in a file."""

    def __init__(self) -> None:
        self._bar: Any = None

    def begin(self, total: int) -> None:
        """Starts with none of `total`."""
        every = 0.2 if sys.stderr.isatty() else LINES_S
        self._bar = tqdm(total=total, unit=" answers", mininterval=every, maxinterval=every, dynamic_ncols=True)

    def add(self, count: int) -> None:
        """Counts answers that came."""
        self._bar.update(count)

    def close(self) -> None:
        """Leaves the last state on the screen."""
        if self._bar is not None:
            self._bar.close()


def configuration(overrides: Sequence[str]) -> Config:
    """Returns the checked configuration. Raises ValueError as `compose` does, and where there is nothing to answer."""
    cfg = compose([NO_TRAINING, *overrides], trains=False)
    cfg.data.train_files = []  # so that they are no input of the evaluation either
    for source in cfg.data.sources:
        source.files = []
    if not any(held_out_files(cfg.data)):
        raise ValueError("`data.val_files` is empty; give at least one file, as in data.val_files=[a.parquet]")
    return cfg


async def evaluate(cfg: Config) -> Answered:
    """Returns all answers; shows progress meanwhile."""
    from dapo import run  # loads torch and Ray, which takes seconds

    progress = Progress()
    try:
        return await run.evaluate(cfg, progress.begin, progress.add)
    finally:
        progress.close()


def write(folder: Path, cfg: Config, answered: Answered) -> Path:
    """Writes the next `evaluation_NNN.json` of a folder, and returns its path."""
    sampling = {name: getattr(cfg.eval, name) for name in ("n", "temperature", "top_p", "top_k")}
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
    """Evaluates, prints, writes."""
    if not sys.argv[1:] or {"-h", "--help"} & set(sys.argv[1:]):
        say(__doc__)
        return
    arguments = [argument for argument in sys.argv[1:] if argument != JOB]
    try:
        cfg = configuration(arguments)
        folder = output_path(cfg.trainer.output_dir)
        if len(arguments) < len(sys.argv) - 1:
            say(f"output_dir {folder}")
            return
        folder.mkdir(parents=True, exist_ok=True)  # now, and not after hours
        answered = asyncio.run(evaluate(cfg))
        say(text(summaries(answered)))
        say(f"written to {write(folder, cfg, answered)}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        end("interrupted; nothing was written", EXIT_INTERRUPTED)
    except (ValueError, RuntimeError, OSError) as error:
        end(str(error))


if __name__ == "__main__":
    main()
