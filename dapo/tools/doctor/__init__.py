"""Checks machines, files and settings before a run, and reports problems with remedies."""
