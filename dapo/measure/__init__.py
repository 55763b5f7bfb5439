"""Measures time, memory and use of the machine, for metrics and bounds."""
