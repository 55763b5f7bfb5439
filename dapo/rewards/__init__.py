"""Reward functions: ready ones, the loader of a person's own, and the process that calls them (DESIGN section 6)."""
