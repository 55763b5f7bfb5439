"""`python -m dapo.plan`: what a configuration needs, per GPU and phase, before any machine is rented."""
