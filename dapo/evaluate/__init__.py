"""Answers held-out prompts and says how good the answers are: at the side of a run, and alone (`python -m
dapo.evaluate`)."""
