"""The checks before a run starts."""
