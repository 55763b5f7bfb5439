"""A tiny arithmetic task with data, tokenizer and base models, so that the whole loop runs on a two-core CPU."""

from pathlib import Path

FOLDER = Path(__file__).parent
