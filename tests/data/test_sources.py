"""Several sources: what the configuration may say, and what is read of it."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from dapo.config.compose import compose
from dapo.config.derived import response_caps
from dapo.config.paths import resolve_path
from dapo.config.schema import Config
from dapo.data.order import PromptOrder
from dapo.data.origins import origins
from dapo.data.prompts import DataReport, fingerprint
from dapo.data.sources import load_held_out, load_train

NO_FILES = "data.train_files=[]"
OWN_SET = "data.sources=[{name: a, files: [x], val_files: [y]}]"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_path("pkg://dapo.tiny/base"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """GSM8K's columns in one file, TRL's in another, a problem in both."""
    worked = [{"question": f"{k}+1=", "answer": f"It is\n#### {k + 1}"} for k in range(6)]
    plain = [{"prompt": f"{k}+2=", "answer": str(k + 2)} for k in range(9)] + [{"prompt": "1+1=", "answer": "2"}]
    pq.write_table(pa.Table.from_pylist(worked), tmp_path / "worked.parquet")
    pq.write_table(pa.Table.from_pylist(plain), tmp_path / "plain.parquet")
    return tmp_path


def configured(folder: Path, *more: str, first: str = "", second: str = "") -> Config:
    one = f"{{name: worked, files: [{folder}/worked.parquet], weight: 3{first}}}"
    other = f"{{name: plain, files: [{folder}/plain.parquet]{second}}}"
    return compose([f"data.sources=[{one},{other}]", NO_FILES, *more], "dapo_tiny")


def test_sources_are_read_one_after_the_other(folder, tokenizer):
    cfg = configured(folder, first=", system_prompt: Be brief.", second=", max_response_length: 64")
    told: list[tuple[str, int]] = []
    prompts, report = load_train(cfg, tokenizer, told=lambda key, one: told.append((key, one.kept)))
    assert told == [("data.sources[0].files", 6), ("data.sources[1].files", 10)]
    assert report == DataReport(rows=16, duplicates=0, contradictory=0, too_long=0, kept=16)
    assert [prompt.id for prompt in prompts] == list(range(16))
    assert [prompt.entry for prompt in prompts] == ["worked"] * 6 + ["plain"] * 10
    assert prompts[0].messages == (("system", "Be brief."), ("user", "0+1="))
    assert prompts[6].messages == (("user", "0+2="),) and prompts[6].source == "plain"
    assert response_caps(cfg.data.sources) == {"plain": 64}
    draws = [PromptOrder.of(cfg, prompts).draw(index).prompt for index in range(400)]
    assert sum(prompt.entry == "worked" for prompt in draws) == 300
    assert {prompt.id for prompt in draws if prompt.entry == "plain"} == set(range(6, 16))
    plain = configured(folder)
    assert fingerprint(load_train(plain, tokenizer)[0], tokenizer) != fingerprint(prompts, tokenizer)


def test_a_sources_own_system_prompt_replaces_that_of_all(folder, tokenizer):
    cfg = configured(folder, "data.system_prompt=Add.", first=", system_prompt: Be brief.")
    prompts, _ = load_train(cfg, tokenizer)
    assert [prompts[number].messages[0] for number in (0, 6)] == [("system", "Be brief."), ("system", "Add.")]
    assert load_held_out(cfg, tokenizer)[0].prompts[0].messages[0] == ("system", "Add.")


def test_each_source_has_epochs_of_its_own(folder, tokenizer):
    cfg = configured(folder)
    prompts, _ = load_train(cfg, tokenizer)
    order = PromptOrder.of(cfg, prompts)
    for name, size in (("worked", 6), ("plain", 10)):
        visits = [p.id for p in (order.draw(index).prompt for index in range(200)) if p.entry == name]
        epochs = [visits[start : start + size] for start in range(0, len(visits) - size, size)]
        assert len(epochs) > 3 and all(len(set(epoch)) == size for epoch in epochs)
        assert len(set(map(tuple, epochs))) > 1


def test_a_source_may_bring_its_held_out_set(folder, tokenizer):
    cfg = configured(
        folder,
        "data.val_files={all: pkg://dapo.tiny/data/val.parquet}",
        first=f", system_prompt: Be brief., val_files: [{folder}/worked.parquet]",
    )
    sets = load_held_out(cfg, tokenizer)
    assert [one.name for one in sets] == ["all", "worked"]
    assert {prompt.entry for prompt in sets[0].prompts} == {""}
    assert {prompt.entry for prompt in sets[1].prompts} == {"worked"}
    assert sets[1].prompts[0].messages[0] == ("system", "Be brief.")
    assert [key for key in origins(cfg) if key.startswith("data.")] == [
        "data.sources[0].files[0]",
        "data.sources[1].files[0]",
        "data.val_files.all[0]",
        "data.sources[0].val_files[0]",
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.sources=[{name: a, files: [x]}]"], r"`data.train_files` \(.*\), and so has `data.sources`; .*=\[\]"),
        ([NO_FILES], r"`data.train_files` \(\[\]\), and `data.sources` is empty; give at least one file"),
        (["data.sources=[{name: a b, files: [x]}]", NO_FILES], r"`data.sources\[0\].name` \(a b\) must be letters"),
        (["data.sources=[{name: a}]", NO_FILES], r"`data.sources\[0\].files` \(\[\]\) must be at least one file"),
        (["data.sources=[{name: a, files: [x], weight: 0}]", NO_FILES], r"weight` \(0.0\) must be greater than 0"),
        (["data.sources=[{name: a, files: [x]},{name: a, files: [y]}]", NO_FILES], r"sources\[1\].name` \(a\) stands"),
        (["data.sources=[{name: a, files: [x], max_response_length: 999}]", NO_FILES], r"\(999\) must be at most `da"),
        (["data.sources=[{name: a, files: [x], format: csv}]", NO_FILES], r"format` \(csv\) must be one of auto, verl"),
        ([OWN_SET, NO_FILES], r"is a set without a name, next to `val_"),
        (["data.sources=[{name: train, files: [x]}]", NO_FILES], r"\(train\) is the name that `samples.sqlite` has"),
        (["data.val_files={a: y, eval: z}"], r"\(eval\) is the name that .* a held-out set without a n"),
        ([OWN_SET, NO_FILES, "data.val_files={a: z}"], "`data.val_files` has a set `a`, and so has"),
        (["data.sources=[{name: a, files: [x], max_response_length: 32}]", NO_FILES], r"\(32\) must be larger than"),
        (["data.curriculum=hard"], r"`data.curriculum` \(hard\) must be one of uniform, retire, weighted"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides, said):
    with pytest.raises(ValueError, match=said):
        compose(overrides, "dapo_tiny")
