"""Scores responses: ready reward functions, the loader of user-defined ones, and the processes that call them."""
