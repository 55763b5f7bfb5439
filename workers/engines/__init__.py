"""vLLM engines: one Ray actor per engine, and driver-side code that replaces an engine when its processes die."""
