"""State that survives a crash: the claimed run directory and its checkpoints."""
