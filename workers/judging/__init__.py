"""A self-hosted judge: vLLM's OpenAI-compatible server as a supervised process."""
