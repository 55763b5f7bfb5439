"""Takes a step apart afterwards: keeps what steps trained on, and trains on it again."""
