"""Writes the RL prompts and the held-out prompts of the tiny tasks: `python -m tests.tiny.maker.make_data [--out DIR]`.

Out: `train.parquet` (6000 prompts of the `rl` split) and `val.parquet` (512 of `heldout`) of the addition task, as
many of the long sums (`long_*.parquet`), and 2000 and 512 of the checked ones (`checked_*.parquet`); DAPO-Math schema.
"""

from functools import partial
from typing import Any

from dapo.smollm2.word_problems import write
from dapo.tiny import FOLDER
from tests.tiny.maker import checked_sums, long_sums
from tests.tiny.maker.task import rows

DATA_DIR = FOLDER / "data"
NUM_TRAIN, TRAIN_SEED = 6000, 1
NUM_VAL, VAL_SEED = 512, 2
NUM_CHECKED = 2000  # more distinct short sums without a carry are hard to find


def tables() -> dict[str, list[dict[str, Any]]]:
    """Returns the rows by file name, exactly as shipped."""
    long = partial(rows, source=long_sums.DATA_SOURCE, draw=long_sums.draw_long_sum)
    checked = partial(rows, source=checked_sums.DATA_SOURCE, draw=checked_sums.draw_prompt)
    return {
        "train.parquet": rows("rl", NUM_TRAIN, TRAIN_SEED),
        "val.parquet": rows("heldout", NUM_VAL, VAL_SEED),
        "long_train.parquet": long("rl", NUM_TRAIN, TRAIN_SEED),
        "long_val.parquet": long("heldout", NUM_VAL, VAL_SEED),
        "checked_train.parquet": checked("rl", NUM_CHECKED, TRAIN_SEED),
        "checked_val.parquet": checked("heldout", NUM_VAL, VAL_SEED),
    }


if __name__ == "__main__":
    write(__doc__, tables(), DATA_DIR)
