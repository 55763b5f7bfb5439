"""Scores responses: one supervisor for remote workers, and the child processes of one of them."""
