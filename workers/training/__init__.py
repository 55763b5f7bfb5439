"""Holds what an actor rank is made of: the forward pass, the shards and their files, the optimizer step."""
