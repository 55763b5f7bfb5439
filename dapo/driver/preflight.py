"""Preflight checks on the driver, before any worker starts: learning-rate schedule, model files, user-defined
functions, installation."""

import os
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path

from dapo.algorithm.own.loading import problems as own_problems
from dapo.config.facts.hub import unreachable, why_not_pushed
from dapo.config.paths import checked_data, data_parts, not_on_hub, resolve_path
from dapo.config.reward import RewardConfig, RewardFunctionConfig, SandboxConfig
from dapo.config.reward_functions import SECTION, labels, ready_name, section_of, source_functions
from dapo.config.rules import model
from dapo.config.schema import Config
from dapo.data.files import check_cache
from dapo.data.sources import check_files, held_out_files, train_files
from dapo.ground.redact import redacted
from dapo.report.sinks import choice
from dapo.rewards import judge
from dapo.rewards.calling.loading import LoadedFunction, load, with_judge
from dapo.rewards.trial import tried
from dapo.sandbox.confine import python_paths
from dapo.turns.loading import load as load_rollout
from dapo.turns.loading import runs_programs

REACH_S = 3.0


def preflight(cfg: Config, *, trains: bool = True) -> None:
    """Raises ValueError with one line per problem: key, value and remedy. trains: as for `validate`."""
    from dapo.algorithm.schedule import learning_rates  # loads torch

    problems = [
        *_refusal(lambda: learning_rates(cfg)),
        *model.stored(cfg, trains=trains),
        *model.loadable(cfg, trains=trains),
        *_reward_functions(cfg),
        *choice.problems(cfg),
        *_rollout_function(cfg),
        *(own_problems(cfg) if trains else ()),
    ]
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))


def early_problems(cfg: Config, warn: Callable[[str], None], say: Callable[[str], None]) -> list[str]:
    """Returns problems that are found without torch and transformers. warn: receives those that do not stop a run; say:
    what each reward function gave."""
    functions = [*_reward_functions(cfg)]
    problems = [
        *_push(cfg, warn),  # before `unreachable`, which may set HF_HUB_OFFLINE
        *_data(cfg),
        *model.stored(cfg, trains=True),
        *functions,
        *choice.problems(cfg),
        *_rollout_function(cfg),
        *_cluster(cfg),
    ]
    if cfg.trainer.preflight and cfg.trainer.only != "train" and not functions:
        lines, doubts, errors = tried(cfg)
        for line in lines:
            say(line)
        for line in doubts:
            warn(line)
        problems += errors
    return [*dict.fromkeys(problems)]


def file_problems(cfg: Config, *, trains: bool = True) -> Iterator[str]:
    """Yields problems of data, models and functions that are found without torch and transformers."""
    yield from _data(cfg, trains=trains)
    yield from model.stored(cfg, trains=trains)
    yield from _reward_functions(cfg)
    yield from _rollout_function(cfg)
    yield from _cluster(cfg)


def _push(cfg: Config, warn: Callable[[str], None]) -> Iterator[str]:
    repository = cfg.checkpoint.push_to_hub
    if repository and (why := why_not_pushed(repository, warn)):
        yield f"`checkpoint.push_to_hub` ({repository}): {why}"


def _data(cfg: Config, *, trains: bool = True) -> Iterator[str]:
    """Checks that all data are there, and the rows of local files."""
    held_out = held_out_files(cfg.data) if cfg.trainer.only == "both" or not trains else ()
    for one in (*(train_files(cfg.data) if trains else ()), *held_out):
        local = True
        for name in one.files:
            try:
                repository, *_ = data_parts(checked_data(name, key=one.key))
                local &= Path(repository).is_file()
                if Path(repository).is_dir():
                    check_cache(repository, f"`{one.key}`: {name}")
                elif not Path(repository).exists() and (error_there := unreachable(repository, "dataset")):
                    yield "; ".join(not_on_hub(one.key, repository, error_there, "file"))
            except ValueError as error:
                local = False
                yield str(error)
        if local:
            yield from _refusal(partial(check_files, one, cfg.data, Path(resolve_path(cfg.model.path))))


def _cluster(cfg: Config) -> Iterator[str]:
    """Checks that something listens at the address of a cluster, before Ray is loaded to ask it."""
    address = cfg.trainer.ray_address or os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():  # `dapo.workers.cluster` reports what is no address
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        yield (
            f"no Ray at {address} (`trainer.ray_address`, or RAY_ADDRESS): {error}; start Ray there, give HOST:PORT of "
            "the head, or `trainer.ray_address=local`"
        )


def _refusal(call: Callable[[], object]) -> Iterator[str]:
    try:
        call()
    except ValueError as error:
        yield str(error)


def _reward_functions(cfg: Config) -> Iterator[str]:
    if not cfg.reward.functions:
        yield "`reward.functions` is empty; give at least one, such as {path: math}"
    own = {section_of(name): specs for name, specs in source_functions(cfg.data.sources).items()}
    most = 0
    for section, given in {SECTION: cfg.reward.functions, **own}.items():
        functions = with_judge(given, cfg.reward.judge)
        most = max(most, (yield from _section(section, functions, cfg.reward.limits.sandbox)))
        if cfg.reward.overlong_buffer.enable and any(ready_name(spec.path) == "overlong" for spec in functions):
            yield (
                f"`{section}` has `overlong`, and `reward.overlong_buffer.enable` (true) punishes the same tokens once "
                "more; drop one of the two"
            )
    if most and cfg.reward.remote.calls_per_minute:
        yield from _rate(cfg.reward, most)


def _rate(cfg: RewardConfig, functions: int) -> Iterator[str]:
    """Checks `reward.timeout_s` against the rate limit: if the service does not answer, a worker retries all its
    responses in flight before it drops one. functions: number of async functions per response."""
    calls = cfg.concurrency * (cfg.remote.retries + 1) * functions
    turns_s = 60 * cfg.num_workers / cfg.remote.calls_per_minute * calls
    if cfg.timeout_s <= cfg.remote.timeout_s + turns_s:
        yield (
            f"`reward.timeout_s` ({cfg.timeout_s:g}) must be longer than `reward.remote.timeout_s` "
            f"({cfg.remote.timeout_s:g}) and the {turns_s:g} s in which a worker makes its {calls} calls "
            f"(`reward.concurrency` x retries x async functions, {functions}) at `reward.remote.calls_per_minute`, or "
            "a worker passes for lost while it waits for others; raise the one or lower the others"
        )


def _section(
    section: str, functions: Sequence[RewardFunctionConfig], sandbox: SandboxConfig
) -> Generator[str, None, int]:
    asynchronous = 0
    for index, spec in enumerate(functions):
        try:
            function = load(spec, index=index, section=section)
        except ValueError as error:
            yield str(error)
            continue
        asynchronous += function.asynchronous
        if function.runs_programs:
            yield from _refusal(lambda: python_paths(sandbox.packages))
        if ready_name(spec.path):  # user-defined functions run only in child processes
            yield from _known_answers(function, f"{section}[{index}]")
        if ready_name(spec.path) == "judge":
            yield from judge.problems(function.kwargs)
    yield from _refusal(lambda: labels(functions, section))
    return asynchronous


def _rollout_function(cfg: Config) -> Iterator[str]:
    try:
        if cfg.rollout.function.path:
            function = load_rollout(cfg.rollout.function)
            if runs_programs(function, cfg.rollout.function.kwargs):
                python_paths(cfg.reward.limits.sandbox.packages)
    except ValueError as error:
        yield str(error)


def _known_answers(function: LoadedFunction, key: str) -> Iterator[str]:
    """Calls a function on its known answers, because invalid combinations of kwargs show only then."""
    try:
        for canary in function.canaries:
            function.call(
                data_source="canary",
                solution_str=canary.solution_str,
                ground_truth=canary.ground_truth,
                extra_info=canary.extra_info,
                **function.kwargs,
            )
    except ValueError as error:
        yield f"`{key}.kwargs` ({redacted(function.kwargs)}): {error}"
