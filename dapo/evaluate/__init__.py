"""Evaluation on held-out prompts: during a run, and standalone (`python -m dapo.evaluate`)."""
