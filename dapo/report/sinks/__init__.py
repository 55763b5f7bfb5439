"""Sinks: programs that receive a run's metrics."""
