"""Loads the reward functions of a run and calls them in processes with resource limits."""
