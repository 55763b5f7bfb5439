"""Forward pass of a rank: packed sequences in, log-probability and entropy of each response token out."""
