"""Translates a verl or TRL run into an experiment file of dapo."""
