"""`python -m dapo.simulate`: the oversampling buffer against simulated engines."""
