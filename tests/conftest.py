"""Shared by all tests: thread counts for two cores, and the same generated examples in every run."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# What a test says must not depend on chance. HYPOTHESIS_PROFILE=default draws new examples.
settings.register_profile("same", derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
