"""Replays a training step: saves what steps trained on, and trains on it again."""
