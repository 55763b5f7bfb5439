"""Turns rows of data files into prompts, and prompts into an order of draws."""
