"""Rows of data files become prompts, and prompts an order of draws."""
