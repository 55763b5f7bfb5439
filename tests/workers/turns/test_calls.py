"""Two turns on a real engine, with the function in a process of its own: log-probabilities, masks, ends, crashes."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo.config.sampling import RolloutFunctionConfig
from dapo.turns.protocol import Ask, Generated, Step
from dapo.types import Response, Sampling
from tests.support.fakes import make_prompt
from workers.engines.unfinished import Start
from workers.trajectories import TrajectoryPool
from workers.turns.fleet import TurnFleet

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]

PROMPT = make_prompt(7)
SAMPLING = Sampling(n=4, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=60)
SEEDS = range(10, 14)
OPTIONS = {"num_cpus": 0}
FUNCTIONS = """
import os
from pathlib import Path

from dapo.turns.protocol import Trajectory

GIVEN = [30, 31, 32]


async def rollout(prompt, generate, sampling):
    first = await generate(max_tokens=9)
    second = await generate(GIVEN, max_tokens=12)
    return Trajectory(text=f"{prompt.ground_truth}: {first.text}|{second.text}")


async def dies_once(prompt, generate, sampling, *, folder):
    first = await generate(max_tokens=9)
    if not (Path(folder) / "died").exists():
        (Path(folder) / "died").touch()
        os._exit(7)
    second = await generate(GIVEN, max_tokens=12)
    return Trajectory(text=f"{prompt.ground_truth}: {first.text}|{second.text}")


async def stops(prompt, generate, sampling, *, letters):
    turn = await generate(stop=list(letters))
    return Trajectory(text=turn.text + "|" + turn.finish_reason)
"""


@pytest.fixture(scope="module")
def engines(two_engines):
    """(pool, path of its model)."""
    pool, _ = two_engines.fresh()
    return pool, two_engines.path


def answered(engines, loop, folder: Path, **spec) -> tuple[list[Response], TurnFleet]:
    pool, path = engines
    (folder / "functions.py").write_text(FUNCTIONS)
    function = RolloutFunctionConfig(path=str(folder / "functions.py"), num_workers=1, timeout_s=30.0, **spec)

    async def play() -> tuple[list[Response], TurnFleet]:
        fleet = TurnFleet(OPTIONS, function)
        try:
            await fleet.start(path, False, 120.0)
            turns = TrajectoryPool(pool, fleet, retries=1)
            generated = turns.generate("g", PROMPT.token_ids, SAMPLING, SEEDS, problem=PROMPT)
            found = {number: response async for number, response in generated}
        finally:
            fleet.stop()
        return [found[number] for number in sorted(found)], fleet

    return loop.run(play())


@torch.no_grad()
def differences(model, response: Response) -> np.ndarray:
    """|log-probability of transformers - of the engine| of every sampled token."""
    ids = torch.from_numpy(np.concatenate([PROMPT.token_ids, response.token_ids]).astype(np.int64))[None]
    first = len(PROMPT.token_ids)
    logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)[first - 1 : -1]
    own = logprobs.gather(1, ids[0, first:, None])[:, 0].numpy()
    return np.abs(own - response.rollout_logprobs)[response.token_mask]


def test_logprobs_of_every_sampled_token_are_the_models(engines, loop, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(engines[1], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(engines[1])
    responses, _ = answered(engines, loop, tmp_path)
    assert len(responses) == len(SEEDS)
    for response in responses:
        assert differences(model, response).max() <= 1e-4
        [given] = np.flatnonzero(np.diff(response.token_mask.astype(int)) == -1)
        assert response.token_ids[given + 1 : given + 4].tolist() == [30, 31, 32]
        assert (~response.token_mask).sum() == 3 and np.isnan(response.rollout_logprobs[~response.token_mask]).all()
        assert given + 1 <= 9 and response.num_sampled - given - 1 <= 12
        parts = (response.token_ids[: given + 1], response.token_ids[given + 4 :])
        first, second = (tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        assert response.text == f"{PROMPT.ground_truth}: {first}|{second}"
        assert sum(span.end - span.start for span in response.policy_versions) == response.num_sampled
        assert math.isfinite(response.seconds) and response.finish_reason == "stop"


def test_a_worker_that_dies_is_replaced_and_its_responses_come_out_alike(engines, loop, tmp_path: Path) -> None:
    wanted, _ = answered(engines, loop, tmp_path)
    found, fleet = answered(engines, loop, tmp_path, name="dies_once", kwargs={"folder": str(tmp_path)})
    lap = TrajectoryPool(engines[0], fleet, retries=0).lap()
    assert lap["perf/restarted_function_workers"] == 1 and (tmp_path / "died").exists()
    for response, other in zip(found, wanted, strict=True):
        assert response.token_ids.tolist() == other.token_ids.tolist() and response.text == other.text


def test_a_stop_string_ends_a_turn_and_is_its_end(engines, loop, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(engines[1], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(engines[1])
    letters = "aeiouAEIOU0123456789"
    responses, _ = answered(engines, loop, tmp_path, name="stops", kwargs={"letters": letters})
    stopped = [response for response in responses if response.finish_reason == "stop"]
    assert stopped
    for response in responses:
        text = tokenizer.decode(response.token_ids, skip_special_tokens=True)
        assert response.text == f"{text}|{response.finish_reason}"
        assert not set(text[:-1]) & set(letters) and response.token_mask is None
        assert len(response.token_ids) == len(response.rollout_logprobs)
        assert response.policy_versions[-1].end == len(response.token_ids)
        masked = Response(
            **{name: getattr(response, name) for name in Response.__slots__ if name != "token_mask"},
            token_mask=np.ones(len(response.token_ids), np.bool_),
        )
        assert differences(model, masked).max() <= 1e-4
    assert any(response.text[-6] in letters for response in stopped)


def test_a_stop_string_that_began_before_a_turn_was_put_down_ends_it(engines, loop) -> None:
    """The request that goes on sees no more than its own tokens; where that is put down too, so does the one after."""
    pool, path = engines
    decode = AutoTokenizer.from_pretrained(path).decode

    async def part(name: str, begin: list[int], *stop: str) -> Response:
        start = Start(token_ids=np.array(begin, np.int32), seed=21)
        worker = pool._slots[0].worker.generate.options(num_returns="streaming")
        how = replace(SAMPLING, n=1, stop=stop)
        [[(_, response)]] = [await ref async for ref in worker.remote(name, PROMPT.token_ids, how, [start])]
        return response

    begin = [40, 41, 42, 43]
    whole = loop.run(part("free", begin))
    own = whole.token_ids.tolist()
    straddles = decode([*begin[-2:], *own[:3]])
    assert len(own) > 5 and straddles not in decode(own)
    cut = loop.run(part("stopped", begin, "never said", straddles))
    assert cut.token_ids.tolist() == own[:3] and cut.text == decode([*begin, *own[:3]]) and cut.finish_reason == "stop"
    np.testing.assert_array_equal(cut.rollout_logprobs, whole.rollout_logprobs[:3])
    assert [(span.start, span.end) for span in cut.policy_versions] == [(0, 3)]


def test_programs_of_the_policy_run_in_the_sandbox_of_the_worker(engines, loop) -> None:
    tokenizer = AutoTokenizer.from_pretrained(engines[1])
    spec = RolloutFunctionConfig(path="tool_use", kwargs={"python": True}, num_workers=1, timeout_s=60.0)

    async def play() -> tuple[str, Step]:
        fleet = TurnFleet(OPTIONS, spec)
        try:
            confined = await fleet.start(engines[1], False, 120.0)
            call = await fleet.call("one")
            await call.begin(PROMPT, SAMPLING)
            said = "<python>print(6 * 7)</python>"
            return confined, await call.resume(Generated(token_ids=(1,), text=said, finish_reason="stop"))
        finally:
            fleet.stop()

    confined, step = loop.run(play())
    assert "seccomp" in confined and isinstance(step, Ask)
    assert step.token_ids == tuple(tokenizer("<result>42</result>", add_special_tokens=False)["input_ids"])
