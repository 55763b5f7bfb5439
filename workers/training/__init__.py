"""Parts of an actor rank: forward pass, sharding, checkpoint files and optimizer step."""
