"""Benchmarks of whole steps of a run, on its own workers, one way against another."""
