"""The driver's work around the training loop: preflight checks, saving and resuming."""
