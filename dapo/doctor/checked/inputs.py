"""Checks of training inputs: tokenizer, chat template, prompts, held-out sets, and the verifier on their reference
answers. Run only on the driver."""

from collections.abc import Iterable

from dapo.data import notes
from dapo.data.tokenizer import check_rows
from dapo.doctor.finding import Finding, fault, ok, warning
from dapo.doctor.subject import Subject
from dapo.rewards.calling.loading import ready_name

BAD_SHARE = 0.01  # of reference answers that are scored as wrong


def settings(subject: Subject) -> Finding:
    """Runs a run's own checks before it starts workers: schedule, model, functions and their known answers, sinks."""
    from dapo.driver.preflight import preflight, rewards_tried  # imports torch

    try:
        preflight(subject.cfg)
    except ValueError as error:
        return fault(str(error), "correct each")
    if lines := [*rewards_tried(subject.cfg)]:
        say = fault if any(fails for fails, _ in lines) else warning
        return say("\n".join(line for _, line in lines), "")
    names = ", ".join(ready_name(spec.path) or spec.path for spec in subject.cfg.reward.functions)
    return ok(f"schedule {subject.cfg.actor.optim.lr_scheduler}, reward functions {names}")


def tokenizer(subject: Subject) -> Finding:
    found = f"{type(subject.tokenizer).__name__} of {len(subject.tokenizer)} tokens"
    return _noted(notes.of_tokenizer(subject.tokenizer, subject.cfg.model.path), found)


def template(subject: Subject) -> Finding:
    return _noted(
        notes.of_template(subject.tokenizer, subject.cfg.data.chat_template_kwargs),
        "shows what is asked, opens the model's turn, and is the same every day",
    )


def prompts(subject: Subject) -> Finding:
    loaded, report = subject.prompts
    check_rows(loaded, subject.cfg.model.path)
    found = f"{report.kept} prompts of {report.rows} rows"
    said = []
    if report.duplicates:
        said.append(f"{report.duplicates} rows repeat a prompt, which counts once")
    if report.contradictory:
        said.append(f"{report.contradictory} prompts have ground truths that disagree, and are left out")
    if report.too_long:
        said.append(f"{report.too_long} are longer than `data.max_prompt_length`, and are left out")
    said += notes.of_prompts(loaded, subject.cfg.data.train_batch_size, subject.tokenizer)
    if said:
        return warning(f"{found}; {'; '.join(said)}", "correct `data.train_files` if that is not meant")
    return ok(f"{found}, the longest of {max(len(prompt.token_ids) for prompt in loaded)} tokens")


def held_out(subject: Subject) -> Finding:
    sets = subject.held_out()
    check_rows([prompt for one in sets for prompt in one.prompts], subject.cfg.model.path)
    counts = ", ".join(f"{one.name or 'one set'}: {len(one.prompts)}" for one in sets)
    found = f"problems in {counts}; none is trained on" if sets else "no held-out set"
    return _noted(notes.of_held_out(subject.prompts[0], sets), found)


def verifier(subject: Subject) -> Finding:
    """Scores reference answers of the run's data with the ready functions in `reward.functions`."""
    judged = [*notes.judged_truths(subject.cfg, subject.prompts[0])]
    if not judged:
        return ok("no ready function compares with ground truths; `canaries` beside one of your own are its test")
    said = [*notes.of_truths(judged)]
    if any(len(wrong) > BAD_SHARE * looked for _, looked, wrong, _ in judged):
        return fault("; ".join(said), "")
    found = "; ".join(
        f"{name}: {looked} of {looked} reference answers as they should be" for name, looked, _, _ in judged
    )
    return _noted(said, found)


def _noted(lines: Iterable[str], found: str) -> Finding:
    said = "; ".join(lines)
    return warning(said, "") if said else ok(found)
