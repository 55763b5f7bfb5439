"""Hands what a run reports to the programs that people look at it with."""
