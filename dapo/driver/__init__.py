"""Holds what the driver does around the loop: what it tries before a run, and what it saves and reads back."""
