"""Shows in a terminal what a run sampled, and how each group was used: `python -m dapo.inspect RUN`."""
