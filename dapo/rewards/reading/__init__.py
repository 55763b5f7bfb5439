"""Reads an answer out of a response, and says whether two answers, or an output and the expected one, are the same."""
