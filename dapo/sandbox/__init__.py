"""Runs untrusted Python programs, such as a model's, in isolation."""
