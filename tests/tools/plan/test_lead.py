"""How long before a time limit a run is told to save, and what launchers read of `python -m dapo.plan --job`."""

import sys

import pytest

from dapo.tools.plan.__main__ import main
from dapo.tools.plan.actor import ActorMemory
from dapo.tools.plan.report import report
from dapo.tools.plan.step import Lead, Step
from tests.support.plan.plans import planned


def test_the_lead_before_a_time_limit_is_an_update_and_a_save():
    cfg, shape = planned()
    assert not cfg.checkpoint.async_save
    step, saved = Step(cfg, shape), sum(term.amount for term in ActorMemory(cfg, shape).checkpoint())
    exact = 1.5 * (step.update_s + step.sync_s + saved / 2e9) + 60
    assert Lead(cfg, shape).seconds == pytest.approx(exact, abs=1) and 1.3e3 < exact < 1.5e3


def test_a_save_that_runs_beside_the_steps_may_have_to_end_first():
    slow = "plan.storage_bandwidth=0.2e9"
    alone, beside = (Lead(*planned(slow, f"checkpoint.async_save={on}")).seconds for on in ("false", "true"))
    assert alone == pytest.approx(60 + 1.5 * (670 + 2293), rel=0.01)
    assert beside == pytest.approx(60 + 1.5 * (2293 + 2293), rel=0.01)


def test_a_run_without_actors_has_neither_update_nor_weights_to_save():
    cfg, shape = planned("trainer.only=rollout")
    assert ActorMemory(cfg, shape).checkpoint() == () and Lead(cfg, shape).seconds == 60
    assert "  checkpoints " not in report(cfg, shape)


@pytest.mark.parametrize("name", ["dapo_tiny", "dapo_qwen7b_hybrid"])
def test_a_launcher_reads_lead_directory_and_resume(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plan", "--job", f"+experiment={name}", "trainer.output_dir=a b"])
    main()
    output_dir, resume, lead = capsys.readouterr().out.splitlines()
    assert int(lead.removeprefix("lead_s ")) > 60 and output_dir == f"output_dir {tmp_path}/a b"
    assert resume == "resume auto"


def test_a_launcher_learns_where_a_run_writes_whose_model_the_planner_does_not_know(capsys, monkeypatch, tmp_path):
    """It is given the lead then, and mounts the directory in a container."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = ["--job", "+experiment=dapo_qwen7b", "model.path=nobody/unknown", f"trainer.output_dir={tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["plan", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert said.out == f"output_dir {tmp_path}/run\nresume auto\n"
    assert ended.value.code == 1 and "nobody/unknown" in said.err


@pytest.mark.parametrize("arguments", [["-h"], ["+experiment=dapo_tiny", "--help"], ["--job", "-h"]])
def test_help(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dapo.plan", *arguments])
    main()
    said = capsys.readouterr()
    assert "python -m dapo.plan [--job] [+experiment=NAME]" in said.out and said.err == ""
