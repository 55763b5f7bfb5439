"""Simulates a fleet, the oversampling buffer against simulated engines: `python -m dapo.simulate`."""
