"""Calls TRL's reward functions and verifiers' rubrics as functions of verl's signature, one response at a time."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dapo.config.reward import AUTO, TRL, TRL_TEXT, VERIFIERS

CONVERSATION = "conversation"  # in `extra_info`: the prompt's messages
OURS = (CONVERSATION, "num_response_tokens")
OF_TRL = ("completions", "completion_ids", "prompts")  # parameters
ABSENT = {  # parameters for which dapo has no value
    "completion_ids": "`reward.overlong_buffer` and the function `overlong` count the tokens of a response",
    "environments": "`rollout.function.path` names a function for several turns",
    "trainer_state": "a score depends on the response alone",
    "log_extra": "give a dict from a function of verl's signature to log more than the score",
    "log_metric": "give a dict from a function of verl's signature to log more than the score",
}
GROUP = ("states", "prompts", "completions", "answers", "infos", "tasks")  # verifiers' parameters of all responses


def adapted(found: Any, signature: str, where: str) -> Callable[..., Any] | None:
    """Returns the function to call, or None for one of verl's signature. found: function or rubric of a module.
    signature: as configured. Raises ValueError where dapo lacks what it needs. where: configuration key and value."""
    rubric = any(each.__module__.startswith("verifiers.") and "Rubric" in each.__name__ for each in type(found).__mro__)
    if rubric and signature in (AUTO, VERIFIERS):
        return _of_rubric(list(_parts(found)), where)
    if not callable(found) or (parameters := _parameters(found)) is None:
        return None
    if signature in (TRL, TRL_TEXT) or (
        signature == AUTO and {*OF_TRL} & {*parameters} and "solution_str" not in parameters
    ):
        return _of_trl(found, parameters, text=signature == TRL_TEXT, where=where)
    if signature == VERIFIERS or (
        signature == AUTO and "completion" in parameters and "solution_str" not in parameters
    ):
        return _of_rubric([(found, 1.0, {})], where)
    return None


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a C callable without a signature
        return None


def _takes_all(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, each in parameters.items() if each.default is each.empty and each.kind in named]


def _messages(extra: Mapping[str, Any]) -> list[dict[str, str]]:
    return list(extra.get(CONVERSATION) or [{"role": "user", "content": str(extra.get("prompt", ""))}])


def _truths(truth: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row's columns; the truth under each name that it may have there."""
    columns = {name: value for name, value in extra.items() if name not in OURS}
    return {"answer": truth, "solution": truth, "ground_truth": truth} | columns


def _of_trl(
    function: Callable[..., Any], parameters: Mapping[str, Any], *, text: bool, where: str
) -> Callable[..., Any]:
    """Gives lists of one item: `completions` and `prompts` as messages or texts, and the row's columns."""
    if lacking := [name for name in _required(parameters) if name in ABSENT]:
        raise ValueError(f"{where} needs {lacking[0]}, which dapo does not give; {ABSENT[lacking[0]]}")

    def arguments(source: str, solution: str, truth: str, extra: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        extra = extra if isinstance(extra, dict) else {}
        completion = solution if text else [{"role": "assistant", "content": solution}]
        prompt = _messages(extra)
        given = {name: [value] for name, value in _truths(truth, extra).items()}
        given |= {"data_source": [source], "completions": [completion], **kwargs}
        given["prompts"] = [prompt[-1]["content"] if text else prompt]
        return _chosen(function, parameters, given)

    def score(given: Any) -> Any:
        if not isinstance(given, list | tuple) or len(given) != 1:
            raise TypeError(f"it gave {type(given).__name__} for a batch of one; give a list of one score")
        return given[0]

    if inspect.iscoroutinefunction(function):

        async def ask(
            data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
        ) -> Any:
            try:
                return score(await function(**arguments(data_source, solution_str, ground_truth, extra_info, kwargs)))
            except (TypeError, AttributeError) as error:
                raise _explained(error, text) from None

        return ask

    def call(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any) -> Any:
        try:
            return score(function(**arguments(data_source, solution_str, ground_truth, extra_info, kwargs)))
        except (TypeError, AttributeError) as error:
            raise _explained(error, text) from None

    return call


def _explained(error: Exception, text: bool) -> Exception:
    """Returns the error of a function that may have wanted texts for messages, with its traceback."""
    if text or not re.search(r"\blist\b|\bdict\b", str(error)):
        return error
    words = f"{error}; completions are lists of messages: set `signature: {TRL_TEXT}` for a function of texts"
    return TypeError(words).with_traceback(error.__traceback__)


def _parts(rubric: Any) -> Iterator[tuple[Callable[..., Any], float, dict[str, Any]]]:
    """Yields function, weight and the objects that its rubric gives to it, of a rubric or a group of them."""
    inside = vars(rubric)
    for each in inside.get("rubrics", ()):
        yield from _parts(each)
    functions = inside.get("funcs", inside.get("reward_funcs", ()))
    weights = inside.get("weights", inside.get("reward_weights", ()))
    objects = inside.get("class_objects") or ({"parser": inside["parser"]} if "parser" in inside else {})
    for function, weight in zip(functions, weights, strict=True):
        yield function, float(weight), objects


def _of_rubric(parts: list[tuple[Callable[..., Any], float, dict[str, Any]]], where: str) -> Callable[..., Any]:
    """Sums the weighted functions; the first says whether a response is right. An error is no 0 here, unlike there."""
    if not parts:
        raise ValueError(f"{where} has no reward function; give it at least one")
    if of_groups := [function for function, _, _ in parts if {*GROUP} & {*(_parameters(function) or ())}]:
        raise ValueError(
            f"{where}: {_named(of_groups[0])} scores all responses of a prompt at once, and dapo one at a time; "
            "write it for one"
        )

    def asked(
        function: Callable[..., Any],
        objects: dict[str, Any],
        solution: str,
        truth: str,
        extra: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        extra = extra if isinstance(extra, dict) else {}
        given = _truths(truth, extra)
        given["prompt"], given["completion"] = _messages(extra), [{"role": "assistant", "content": solution}]
        given["info"] = given.get("info", {name: value for name, value in extra.items() if name not in OURS})
        given["state"] = {name: given[name] for name in ("prompt", "completion", "answer", "info")}
        given |= {**objects, **kwargs}
        return function(**_chosen(function, _parameters(function) or {}, given))

    def total(scores: list[Any]) -> dict[str, Any]:
        if None in scores:
            return {"score": None}
        numbers = [float(score) for score in scores]
        each = {_named(function): number for (function, _, _), number in zip(parts, numbers, strict=True)}
        weighted = sum(weight * number for (_, weight, _), number in zip(parts, numbers, strict=True))
        return {**each, "score": weighted, "acc": float(numbers[0] > 0)}

    if any(inspect.iscoroutinefunction(function) for function, _, _ in parts):

        async def ask(
            data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
        ) -> Any:
            found = []
            for function, _, objects in parts:
                value = asked(function, objects, solution_str, ground_truth, extra_info, kwargs)
                found.append(await value if inspect.isawaitable(value) else value)
            return total(found)

        return ask

    def call(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any) -> Any:
        return total(
            [asked(function, objects, solution_str, ground_truth, extra_info, kwargs) for function, _, objects in parts]
        )

    return call


def _named(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _chosen(function: Callable[..., Any], parameters: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns what the function takes. Raises ValueError naming what the row does not have."""
    if lacking := [name for name in _required(parameters) if name not in given]:
        raise ValueError(
            f"{_named(function)} needs `{lacking[0]}`, and the row has {', '.join(sorted(given))}; add that column"
        )
    return given if _takes_all(parameters) else {name: value for name, value in given.items() if name in parameters}
