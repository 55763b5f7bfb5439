"""Two turns on a real engine, with the function in a process of its own: log-probabilities, masks, ends, crashes."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from dapo.config.sampling import RolloutFunctionConfig
from dapo.turns.protocol import Ask, Generated, Step
from dapo.types import Request, Response, Sampling
from dapo.workers.engines.worker import Start
from dapo.workers.trajectories import TrajectoryPool
from dapo.workers.turns import TurnFleet
from tests.support.fakes import make_prompt

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]

PROMPT = make_prompt(7)
SAMPLING = Sampling(n=4, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=60)
SEEDS = range(10, 14)
LETTERS = "aeiouAEIOU0123456789"
FUNCTIONS = """
import os
from pathlib import Path

from dapo.turns.protocol import Trajectory


async def rollout(prompt, generate, sampling, *, folder=""):
    first = await generate(max_tokens=9)
    if folder and not (Path(folder) / "died").exists():
        (Path(folder) / "died").touch()
        os._exit(7)
    second = await generate([30, 31, 32], max_tokens=12)
    return Trajectory(text=f"{prompt.ground_truth}: {first.text}|{second.text}")


async def stops(prompt, generate, sampling, *, letters):
    turn = await generate(stop=list(letters))
    return Trajectory(text=turn.text + "|" + turn.finish_reason)
"""


@pytest.fixture(scope="module")
def engines(two_engines):
    """(pool, its model in transformers, its tokenizer, path of both)."""
    path = two_engines.path
    return *two_engines.fresh(), AutoTokenizer.from_pretrained(path), path


def answered(engines, loop, folder: Path, **spec) -> tuple[list[Response], dict[str, float]]:
    """The responses, and what the functions' workers tell of themselves."""
    (folder / "functions.py").write_text(FUNCTIONS)
    function = RolloutFunctionConfig(path=str(folder / "functions.py"), num_workers=1, timeout_s=30.0, **spec)

    async def play() -> tuple[list[Response], dict[str, float]]:
        fleet = TurnFleet({"num_cpus": 0}, function)
        turns = TrajectoryPool(engines[0], fleet, retries=1)
        try:
            await fleet.start(engines[3], False, 120.0)
            generated = turns.generate(Request("g", PROMPT.token_ids, SAMPLING, SEEDS, problem=PROMPT))
            found = {number: response async for number, response in generated}
        finally:
            fleet.stop()
        return [found[number] for number in range(len(SEEDS))], turns.lap()

    return loop.run(play())


@torch.no_grad()
def largest_difference(model, response: Response) -> float:
    """Largest |log-probability of transformers - of the engine| of the sampled tokens."""
    ids = torch.from_numpy(np.concatenate([PROMPT.token_ids, response.token_ids]).astype(np.int64))[None]
    first = len(PROMPT.token_ids)
    logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)[first - 1 : -1]
    own = logprobs.gather(1, ids[0, first:, None])[:, 0].numpy()
    mask = np.ones(len(own), np.bool_) if response.token_mask is None else response.token_mask
    return np.abs(own - response.rollout_logprobs)[mask].max()


@pytest.mark.nightly
def test_two_turns_have_the_models_logprobs_and_come_out_alike_when_a_worker_dies(engines, loop, tmp_path) -> None:
    _, model, tokenizer, _ = engines
    responses, _ = answered(engines, loop, tmp_path)
    for response in responses:
        assert largest_difference(model, response) <= 1e-4
        [given] = np.flatnonzero(np.diff(response.token_mask.astype(int)) == -1)
        assert response.token_ids[given + 1 : given + 4].tolist() == [30, 31, 32]
        assert (~response.token_mask).sum() == 3 and np.isnan(response.rollout_logprobs[~response.token_mask]).all()
        assert given + 1 <= 9 and response.num_sampled - given - 1 <= 12
        parts = (response.token_ids[: given + 1], response.token_ids[given + 4 :])
        first, second = (tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        assert response.text == f"{PROMPT.ground_truth}: {first}|{second}"
        assert sum(span.end - span.start for span in response.policy_versions) == response.num_sampled
        assert math.isfinite(response.seconds) and response.finish_reason == "stop"
    found, lap = answered(engines, loop, tmp_path, kwargs={"folder": str(tmp_path)})
    assert lap["perf/restarted_function_workers"] == 1 and (tmp_path / "died").exists()
    for response, other in zip(found, responses, strict=True):
        assert response.token_ids.tolist() == other.token_ids.tolist() and response.text == other.text


def test_a_stop_string_ends_a_turn_and_is_its_end(engines, loop, tmp_path) -> None:
    _, model, tokenizer, _ = engines
    responses, _ = answered(engines, loop, tmp_path, name="stops", kwargs={"letters": LETTERS})
    for response in responses:
        text = tokenizer.decode(response.token_ids, skip_special_tokens=True)
        assert response.text == f"{text}|{response.finish_reason}"
        assert not set(text[:-1]) & set(LETTERS) and response.token_mask is None
        assert len(response.token_ids) == len(response.rollout_logprobs)
        assert response.policy_versions[-1].end == len(response.token_ids)
        assert largest_difference(model, response) <= 1e-4
    stopped = [response for response in responses if response.finish_reason == "stop"]
    assert any(response.text[-6] in LETTERS for response in stopped)


def test_a_stop_string_that_began_before_a_turn_was_put_down_ends_it(engines, loop) -> None:
    """The request that goes on sees no more than its own tokens; where that is put down too, so does the one after."""
    pool, _, tokenizer, _ = engines
    decode, begin = tokenizer.decode, [40, 41, 42, 43]

    async def part(name: str, *stop: str) -> Response:
        start = Start(token_ids=np.array(begin, np.int32), seed=21)
        worker = pool._slots[0].worker.generate.options(num_returns="streaming")
        how = replace(SAMPLING, n=1, stop=stop)
        [[(_, response)]] = [await ref async for ref in worker.remote(name, PROMPT.token_ids, how, [start])]
        return response

    whole = loop.run(part("free"))
    own = whole.token_ids.tolist()
    straddles = decode([*begin[-2:], *own[:3]])
    assert len(own) > 5 and straddles not in decode(own)
    cut = loop.run(part("stopped", "never said", straddles))
    assert cut.token_ids.tolist() == own[:3] and cut.text == decode([*begin, *own[:3]]) and cut.finish_reason == "stop"
    np.testing.assert_array_equal(cut.rollout_logprobs, whole.rollout_logprobs[:3])
    assert [(span.start, span.end) for span in cut.policy_versions] == [(0, 3)]


def test_programs_of_the_policy_run_in_the_sandbox_of_the_worker(engines, loop) -> None:
    _, _, tokenizer, path = engines
    spec = RolloutFunctionConfig(path="tool_use", kwargs={"python": True}, num_workers=1, timeout_s=60.0)

    async def play() -> tuple[str, Step]:
        fleet = TurnFleet({"num_cpus": 0}, spec)
        try:
            confined = await fleet.start(path, False, 120.0)
            call = await fleet.call("one")
            await call.begin(PROMPT, SAMPLING)
            said = "<python>print(6 * 7)</python>"
            return confined, await call.resume(Generated(token_ids=(1,), text=said, finish_reason="stop"))
        finally:
            fleet.stop()

    confined, step = loop.run(play())
    assert "seccomp" in confined and isinstance(step, Ask)
    assert step.token_ids == tuple(tokenizer("<result>42</result>", add_special_tokens=False)["input_ids"])
