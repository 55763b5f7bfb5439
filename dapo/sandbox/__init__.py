"""Runs Python programs that nobody trusts, such as a model's, where they can reach nothing."""
