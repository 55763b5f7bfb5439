"""Reckons which GPUs of which nodes the roles get: what they ask for, and what fits. Knows no Ray."""
