"""Results of a run, from its files: `summary.json` at its end, and comparison of runs (`dapo.compare`)."""
