"""File access of a rank: model weights, checkpoints, exports and adapters."""
