"""Simulation of the oversampling buffer with simulated engines: `python -m dapo.simulate`."""
