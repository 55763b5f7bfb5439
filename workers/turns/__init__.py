"""Worker processes that run rollout functions, and their supervision."""
