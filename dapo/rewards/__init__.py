"""Reward functions: the rule verifier, the overlong penalty, and the loader of a person's own functions (section 6)."""
