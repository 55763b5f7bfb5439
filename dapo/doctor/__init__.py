"""Looks at machines, files and settings before a run, and says what is wrong, with the remedy."""
