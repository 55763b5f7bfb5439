"""Loads prompts without the number of rows that have each."""

from collections.abc import Sequence
from typing import Any

from dapo.data.prompts import DataReport, load_counted
from dapo.types import Prompt


def load_prompts(files: Sequence[str], tokenizer: Any, **options: Any) -> tuple[list[Prompt], DataReport]:
    counted, report = load_counted(files, tokenizer, **{"max_too_long": 1.0, **options})
    return [prompt for prompt, _ in counted], report
