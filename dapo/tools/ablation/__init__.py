"""Runs the paper's techniques one by one, several seeds each: `python -m dapo.ablation`."""
