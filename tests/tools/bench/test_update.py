"""The benchmark of the actors: its parts run on a CPU and give figures, also the one that is meant for a GPU."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo.config.facts.model_shape import read_shape
from dapo.tools.bench.__main__ import main
from dapo.tools.bench.setting import bench_config
from dapo.tools.bench.update import BareRank, HandWrittenRank, batch_of
from workers.actor import split_batch
from workers.training.forward.attention import PACKED_ATTENTION
from workers.training.forward.policy import PackedPolicy, collate

TINY = "pkg://dapo.tiny/base"


def test_the_loop_written_by_hand_takes_the_policys_step() -> None:
    """What it is compared with must be the same work: its parameters after a step, from the policy's gradient."""
    fixed = ("actor.optim.lr=1e-3", "actor.optim.eps=1e-3", "actor.optim.grad_clip=1e9", "rollout.temperature=0.7")
    sizes = ("data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "rollout.n=4", "actor.max_tokens_per_gpu=256")
    cfg = bench_config(*sizes, *fixed)
    batch = batch_of("short", cfg)
    [work] = split_batch(batch, 1, 256)
    assert len(work.minibatches[0]) > 1
    model = AutoModelForCausalLM.from_pretrained(cfg.model.path, attn_implementation=PACKED_ATTENTION)
    policy, optim = PackedPolicy(model, 0.7), cfg.actor.optim
    for sequences in work.minibatches[0]:
        packed = collate(sequences, torch.device("cpu"))
        (-packed.weights * packed.advantages * policy(packed)[0]).sum().backward()
    torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=tuple(optim.betas), eps=1e-3, weight_decay=optim.weight_decay
    ).step()

    assert BareRank(cfg).run(work) > 0
    rank = HandWrittenRank(cfg)
    assert rank.run(work) > 0
    wanted = model.state_dict()
    for name, parameter in rank._model.named_parameters():
        torch.testing.assert_close(parameter, wanted[name], rtol=0, atol=1e-6)


@pytest.mark.ray
@pytest.mark.nightly
def test_the_part_for_a_gpu_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.jsonl"
    options = {"--tokens": "256", "--sequences": "2", "--micro-batches": "2", "--repeats": "1", "--peak-flops": "1e12"}
    words = [word for pair in options.items() for word in pair]
    main(["device", "--models", TINY, "--device", "cpu", "--output", str(output), *words])
    row = json.loads(output.read_text())
    assert row == json.loads(capsys.readouterr().out)
    shape = read_shape(TINY)
    assert row["parameters"] == shape.parameters
    assert row["tokens_per_s"] == pytest.approx(512 / row["seconds"])
    # 4 sequences of 128 tokens; the head runs at the 112 of a response; backward counts twice.
    expected = 3 * shape.forward_flops([128] * 4, head_tokens=4 * 112)
    assert row["model_flops"] == expected
    assert row["mfu"] == pytest.approx(expected / row["seconds"] / 1e12)
    assert row["peak_bytes"] > 4 * 4 * shape.parameters  # parameters, gradients, two moments
    assert row["grad_norm"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_without_the_device_it_is_one_message() -> None:
    with pytest.raises(SystemExit, match=r"^dapo.bench: `--device` \(cuda\) .* torch sees no CUDA device"):
        main(["device"])
