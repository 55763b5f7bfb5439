"""Speculation and quantized engines: what is refused, with keys and remedy, and what goes."""

import pytest

from dapo.config.checks import validate
from dapo.config.compose import compose
from dapo.config.rules import decoding as decoding_checks
from dapo.config.rules.decoding import SPECULATION

NGRAM = "method: ngram, num_speculative_tokens: 4, prompt_lookup_min: 2, prompt_lookup_max: 4"
SCHEDULE = "num_speculative_tokens_per_batch_size: [[1, 16, 4], [17, 256, 0]]"
FP8 = (
    "rollout.vllm.quantization=fp8_per_tensor",
    "algorithm.rollout_correction.mode=truncate",
    "weight_sync.max_mean_logprob_diff=0.1",
)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages that draft, wherever this runs."""
    found = decoding_checks.importlib.util.find_spec
    monkeypatch.setattr(
        decoding_checks.importlib.util, "find_spec", lambda name: name == "numba" or found(name) if name else None
    )


def test_speculation_and_fp8_that_are_set_up_go() -> None:
    cfg = compose([f"{SPECULATION}={{{NGRAM}, {SCHEDULE}}}"], "dapo_tiny")
    assert cfg.rollout.vllm["speculative_config"]["num_speculative_tokens_per_batch_size"] == [[1, 16, 4], [17, 256, 0]]
    compose([f"{SPECULATION}={{{NGRAM}}}", "rollout.vllm.max_num_seqs=16"], "dapo_tiny")
    compose([*FP8, "model.dtype=bfloat16"], "dapo_tiny")
    compose([*FP8, "rollout.vllm.quantization=fp8_per_channel", "trainer.device=cpu"], "dapo_tiny")


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        pytest.param("4", ["(4)", "must be a mapping whose method is one of ngram, ngram_gpu, suffix"], id="number"),
        pytest.param("{method: eagle, model: x}", ["a second model, which the weight sync does not renew"], id="eagle"),
        pytest.param(f"{{{NGRAM}}}", [".num_speculative_tokens_per_batch_size", "(256)", "[[1, 256, 4]]"], id="always"),
        pytest.param("{method: ngram, num_speculative_tokens: 4}", [".prompt_lookup_max` (missing)"], id="no n"),
        pytest.param("{method: ngram, prompt_lookup_max: 4}", [".num_speculative_tokens` (None)"], id="k"),
        pytest.param(
            f"{{{NGRAM}, {SCHEDULE}, rejection_sample_method: synthetic}}",
            [".rejection_sample_method` (synthetic) must be standard"],
            id="another distribution",
        ),
        pytest.param(
            f"{{method: suffix, num_speculative_tokens: 8, {SCHEDULE}}}",
            ["does not work with suffix", ".method` (suffix) needs the package arctic_inference"],
            id="suffix",
        ),
    ],
)
def test_speculation_that_cannot_be_is_refused(given: str, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        compose([f"{SPECULATION}={given}"], "dapo_tiny")
    assert all(part in str(error.value) for part in parts), error.value


def test_without_the_package_that_drafts_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_checks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"speculative_config.method` \(ngram\) needs the package numba"):
        compose([f"{SPECULATION}={{{NGRAM}, {SCHEDULE}}}"], "dapo_tiny")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        pytest.param(
            [*FP8, "rollout.vllm.quantization=awq"],
            ["`rollout.vllm.quantization` (awq) must be one of fp8, fp8_per_tensor", "each weight sync"],
            id="awq",
        ),
        pytest.param(
            [*FP8, "algorithm.rollout_correction.mode=none"],
            ["`algorithm.rollout_correction.mode` (none)", "`rollout.vllm.quantization` (fp8_per_tensor)", "truncate"],
            id="not corrected",
        ),
        pytest.param(
            [*FP8, "weight_sync.max_mean_logprob_diff=1e-4"],
            ["`weight_sync.max_mean_logprob_diff` (0.0001)", "raise it to 0.05"],
            id="float32's bound",
        ),
        pytest.param([*FP8, "trainer.device=cpu"], ["needs GPUs", "`trainer.device` cpu", "fp8_per_channel"], id="cpu"),
    ],
)
def test_quantization_that_cannot_be_trained_on_is_refused(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        compose(overrides, "dapo_tiny")
    assert all(part in str(error.value) for part in parts), error.value


def test_engines_alone_need_no_correction() -> None:
    cfg = compose(list(FP8), "dapo_tiny")
    cfg.algorithm.rollout_correction.mode, cfg.weight_sync.max_mean_logprob_diff = "none", 1e-4
    with pytest.raises(ValueError, match="coarser policy"):
        validate(cfg)
    validate(cfg, trains=False)
