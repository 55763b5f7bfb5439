"""Compares runs: results with confidence intervals, configuration differences, curves."""
