"""Groups in, training batches and the objective out."""
