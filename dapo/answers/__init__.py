"""Extracts answers from responses and compares them with the expected ones."""
