"""Loads the reward functions of a run, and calls them in limited processes."""
