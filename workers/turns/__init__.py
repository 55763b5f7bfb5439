"""Holds the processes that run rollout functions, and what keeps them up."""
