"""Keeps a judge of the run's own: vLLM's OpenAI-compatible server as a supervised process."""
