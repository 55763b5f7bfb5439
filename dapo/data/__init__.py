"""Loads data files as prompts and decides the order in which prompts are drawn."""
