"""Extracts answers from responses and compares answers, or a program's output, with the expected ones."""
