"""Holds rollout functions: what answers a prompt in several turns, and what such a function is given."""
