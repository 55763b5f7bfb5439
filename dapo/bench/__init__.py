"""`python -m dapo.bench`: how fast each part is, as ratios within one run."""
