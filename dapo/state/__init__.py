"""What survives a crash: the claimed run directory and whole checkpoints."""
