"""The remote roles: vLLM rollout engines, reward workers and FSDP2 actors, each with its driver-side pool."""
