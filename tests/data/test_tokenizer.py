"""The tokenizer of a run: what keeps its responses from ending is told before any worker starts."""

import json
import shutil
from pathlib import Path

import pytest

from dapo.config.actor import ModelConfig
from dapo.config.compose import compose
from dapo.config.paths import resolve_path
from dapo.data.tokenizer import load_tokenizer
from dapo.driver.run import load_data


def changed(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose tokenizer has no end of sequence, and whose files name one."""
    shutil.copytree(resolve_path("pkg://dapo.tiny/base"), tmp_path / "model")
    changed(tmp_path / "model" / "tokenizer_config.json", eos_token=None)
    return tmp_path / "model"


def test_an_end_of_sequence_may_stand_in_any_of_the_files_that_engines_read(model):
    assert load_tokenizer(ModelConfig(path=str(model))).eos_token_id is None
    (model / "generation_config.json").unlink()
    assert load_tokenizer(ModelConfig(path=str(model))).eos_token_id is None, "config.json has it"


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_model_that_never_ends_is_refused(model, file):
    if file == "config.json":
        (model / "generation_config.json").unlink()
    changed(model / file, eos_token_id=None)
    with pytest.raises(ValueError, match=rf"`model.path` \({model}\): neither its tokenizer .* set one"):
        load_tokenizer(ModelConfig(path=str(model)))


def test_a_directory_without_a_tokenizer_is_named(model):
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"makes no tokens of text, .*copy or download the model again"):
        load_tokenizer(ModelConfig(path=str(model)))
    (model / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer: it does not load .*copy or download the model again"):
        load_tokenizer(ModelConfig(path=str(model)))


def test_a_token_without_a_row_of_the_embedding_is_refused(model):
    cfg = compose([f"model.path={model}"], experiment="dapo_tiny")
    prompts, *_ = load_data(cfg)
    highest = max(int(prompt.token_ids.max()) for prompt in prompts)
    changed(model / "config.json", vocab_size=highest + 1)
    load_data(cfg)
    changed(model / "config.json", vocab_size=highest)
    with pytest.raises(ValueError, match=rf"gives token {highest} to a prompt .*, and `vocab_size` .* {highest};"):
        load_data(cfg)
