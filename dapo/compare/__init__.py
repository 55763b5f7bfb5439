"""Compares runs: results with intervals, differences of configuration, curves."""
