"""Response lengths and model shapes of the benchmarks. Plain data, because the command line imports it."""

from typing import Any

LENGTHS = ("short", "long")  # worked sums, 20 to 60 tokens; geometric, mean about 110, up to 2,048
MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B")

# Sizes of random models for the weight sync; the larger ones are Qwen2.5's with a tiny vocabulary.
SYNC_SHAPES: dict[str, dict[str, Any]] = {
    "1m": {"layers": 4, "hidden": 128, "heads": 4, "key_value_heads": 2, "intermediate": 448},
    "100m": {"layers": 12, "hidden": 768, "heads": 12, "key_value_heads": 4, "intermediate": 3072},
    "0.5b": {"layers": 24, "hidden": 896, "heads": 14, "key_value_heads": 2, "intermediate": 4864},
    "1.5b": {"layers": 28, "hidden": 1536, "heads": 12, "key_value_heads": 2, "intermediate": 8960},
    "7b": {"layers": 28, "hidden": 3584, "heads": 28, "key_value_heads": 4, "intermediate": 18944},
}
