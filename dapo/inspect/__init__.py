"""Shows in a terminal what a run sampled and why: `python -m dapo.inspect RUN`."""
