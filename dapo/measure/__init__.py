"""Measurement of time, memory and utilization, for metrics and limits."""
