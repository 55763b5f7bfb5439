"""Computes what a configuration needs, per GPU and phase, before a machine is rented: `python -m dapo.plan`."""
