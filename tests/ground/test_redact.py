"""No secret is stored: by the names of keys, in addresses, and in every place that a configuration goes to."""

import json
import sqlite3
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dapo.config.compose import compose
from dapo.config.fields import keys
from dapo.config.schema import Config
from dapo.ground.redact import HIDDEN, is_secret, redacted, without_logins, without_secrets
from dapo.report.log import MetricsLogger
from dapo.report.sinks.choice import sinks_of
from dapo.report.store.samples import SampleStore
from dapo.report.store.schema import DATABASE
from dapo.state.run_dir import claim_output_dir
from tests.support.state.claims import save

SECRET = "s3cr3t-"
# As a person may give them: an engine argument, those of a reward function, of W&B, and addresses.
GIVEN = (
    f"+rollout.vllm.hf_token={SECRET}1",
    f"reward.functions=[{{path: math_dapo, kwargs: {{api_key: {SECRET}2, login: {{password: {SECRET}3}}, n: 2}}}}]",
    f"+logging.wandb.settings_of_mine={{access_token: [{SECRET}4, {SECRET}5]}}",
    f"data.val_files=['https://me:{SECRET}6@host/x.parquet', 'https://host/y.parquet?v=1&X-Amz-Signature={SECRET}7']",
)


def test_keys_that_hold_secrets_are_known_by_their_names() -> None:
    secret = """token hf_token HF_TOKEN accessToken password db.passwd client_secret secretName api_key APIKey x-api-key
        credentials private_key aws_secret_access_key Authorization basic_auth wandb_key ssh-key OPENAI_KEY MYKEY
        wandbKey tokens api_tokens slackTokens pass smtp_pass pw db_pw pwd jwt JWT_STRING service_account
        google_service_account_json webhook_url db_creds SENTRY_DSN passkey secret_prompt_key"""
    other = """max_tokens max_num_batched_tokens tokenizer tokenizer_mode eos_token stop_token per_token key keys author
        path loss_agg_mode prompt_key data.reward_fn_key image_key sortKey public_key monkey pad_token maxTokens compass
        add_special_tokens stop_tokens total_tokens bypass passes pass_rate key_variable authors patience ignore_keys
        begin_suppress_tokens spec_tokens lost_tokens kv_tokens"""
    assert [name for name in secret.split() if not is_secret(name)] == []
    assert [name for name in other.split() if is_secret(name)] == []


def test_no_key_of_ours_is_hidden() -> None:
    assert [one.name for one in keys(Config) if is_secret(one.name.rpartition(".")[2])] == []
    cfg = asdict(compose([], "dapo_tiny"))
    assert redacted(cfg) == json.loads(json.dumps(cfg))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("read https://u:p@h:80/a?b=c.", f"read https://{HIDDEN}@h:80/a?b=c."),
        ("ray://tok@h:1, s3://b/k", f"ray://{HIDDEN}@h:1, s3://b/k"),
        ("https://h/a?sig=x%3D&b=1#c", f"https://h/a?sig={HIDDEN}&b=1#c"),
        ("https://h/a@b owner/name@main me@host", "https://h/a@b owner/name@main me@host"),
        ("https://user:pa@ss@host/x", f"https://{HIDDEN}@host/x"),
        ("https://h/a?auth=x&n=1&pwd=y&access=z#token=t", "https://h/a?auth=*&n=1&pwd=*&access=*#token=*"),
        ("https://h/a?max_tokens=4&user=me", "https://h/a?max_tokens=4&user=me"),
        ("at https://hooks.slack.com/services/T0/B0/Xy.", "at https://hooks.slack.com/*"),
        ("https://discord.com/api/webhooks/1/Xy", "https://discord.com/api/webhooks/*"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert without_logins(text) == shown.replace("*", HIDDEN)
    assert without_logins(shown.replace("*", HIDDEN)) == shown.replace("*", HIDDEN)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("of hf_abcdefghijklmnopqrstuv, not hf_hub_download", "of *, not hf_hub_download"),
        ("sk-abcdefghijklmnopqrst sk-proj-Ab1_cdefghijklmnop", "* *"),
        ("sk-learn task-abcdefghijklmnopqrst", "sk-learn task-abcdefghijklmnopqrst"),
        ("ghp_abcdefghijklmnopqrst glpat-abcdefghij1234567890 xoxb-123456789012-ab AKIAABCDEFGHIJKLMNOP", "* * * *"),
        ("x eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln y", "x * y"),
        ("a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----\nb", "a\n*\nb"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE", "*"),
        ("-----BEGIN CERTIFICATE-----\nMIIE", "-----BEGIN CERTIFICATE-----\nMIIE"),
        ("Authorization: Bearer abcdefgh.ij", "Authorization: Bearer *"),
        ("Authorization: Basic dXNlcjpwYXNz is Basic arithmetic", "Authorization: Basic * is Basic arithmetic"),
        ("run --password=hunter2 -n 1", "run --password=* -n 1"),
        ("run --hf-token X1 --max-tokens 512 --api-key 'a b'", "run --hf-token * --max-tokens 512 --api-key '*'"),
        ("HF_TOKEN=abc x=1", "HF_TOKEN=* x=1"),
        ('{"api_key": "abc", "n": 2}', '{"api_key": "*", "n": 2}'),
        ("kwargs: {api_key: abc, max_tokens: 5}", "kwargs: {api_key: *, max_tokens: 5}"),
        ("password: hunter2", "password: *"),
        ("Unexpected token: x in its forward pass: y", "Unexpected token: x in its forward pass: y"),
        ("tokens=512 lost_tokens=many", "tokens=512 lost_tokens=many"),
        ("prompt_key=prompt, pass=3, token=None", "prompt_key=prompt, pass=3, token=None"),
    ],
)
def test_secrets_in_texts_are_known_by_their_shape_and_by_the_name_before_them(text: str, shown: str) -> None:
    wanted = shown.replace("*", HIDDEN)
    assert without_logins(text) == wanted and without_logins(wanted) == wanted


def test_command_lines_and_numbers_of_tokens() -> None:
    given = {"args": ["--token", "X", "--n", "X", "--password=X", "HF_TOKEN=X"], "tokens": 4, "user_tokens": [1, 2]}
    shown = {"args": ["--token", "*", "--n", "X", "--password=*", "HF_TOKEN=*"], "tokens": 4, "user_tokens": [1, 2]}
    assert redacted(given) == redacted(redacted(given)) == json.loads(json.dumps(shown).replace("*", HIDDEN))
    assert redacted({"tokens": ["a", 1], "token": 12345}) == {"tokens": HIDDEN, "token": HIDDEN}


def test_an_error_that_quotes_a_request_holds_no_key_of_the_environment(tmp_path: Path) -> None:
    variables = {"A_TOKEN": "abcdefgh", "JUDGE_API_KEY": "abcdefgh-ijk\n", "PWD": str(tmp_path), "B_TOKEN": "1"}
    quoted = f"Illegal header value b'Bearer abcdefgh-ijk\\n' of 1 request in {tmp_path} to https://u:p@h"
    hidden = f"Illegal header value b'Bearer {HIDDEN}\\n' of 1 request in {tmp_path} to https://{HIDDEN}@h"
    assert without_secrets(quoted, variables) == hidden


def given(folder: Path, *others: str) -> Config:
    return compose([f"trainer.output_dir={folder}", *GIVEN, *others], "dapo_tiny")


def test_what_is_stored_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.yaml, its copy in a checkpoint, the sample store, TensorBoard and W&B; what a person gave is left."""
    monkeypatch.setattr(sys, "argv", ["dapo", *GIVEN])
    monkeypatch.setenv("JUDGE_API_KEY", f"{SECRET}of-the-judge")
    cfg = given(tmp_path, "+logging.wandb.mode=offline", "+logging.wandb.project=p")
    assert str(asdict(cfg)).count(SECRET) == 7
    cfg.logging.wandb.pop("settings_of_mine")  # which `wandb.init` does not know
    with claim_output_dir(cfg.trainer.output_dir, "auto", asdict(cfg)) as run:
        save(run, 1)
        store = SampleStore(run.path, cfg.logging, warn=pytest.fail)
        store.begin(asdict(cfg))
        logger = MetricsLogger(run.path, sinks_of(cfg, run.path), store)
        logger.resume(0)
        logger.event("warning", f"no https://me:{SECRET}8@host with Bearer {SECRET}of-the-judge")
        logger.log(1, {"actor/loss": 0.5})
        logger.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and [path.name for path in files if SECRET.encode() in path.read_bytes()] == []
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        [(text,)] = connection.execute("SELECT config FROM runs").fetchall()
    stored: dict[str, Any] = json.loads(text)
    assert stored["rollout"]["vllm"]["hf_token"] == HIDDEN
    assert stored["reward"]["functions"][0]["kwargs"] == {"api_key": HIDDEN, "login": {"password": HIDDEN}, "n": 2}
    assert cfg.rollout.vllm["hf_token"] == f"{SECRET}1"


def test_a_run_goes_on_with_its_secrets_or_with_others(tmp_path: Path) -> None:
    other = given(tmp_path, f"rollout.vllm.hf_token={SECRET}9")
    for number, cfg in enumerate((given(tmp_path), given(tmp_path), other)):
        with claim_output_dir(cfg.trainer.output_dir, "auto", asdict(cfg)) as run:
            assert run.notices == [], number
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    changed = given(tmp_path, "rollout.vllm.hf_token=null")
    with claim_output_dir(changed.trainer.output_dir, "auto", asdict(changed)) as run:
        [notice] = run.notices
    assert "rollout.vllm" in notice and SECRET not in notice
