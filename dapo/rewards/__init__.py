"""Scores responses: ready reward functions, the loader of a person's own, and the process that calls them."""
