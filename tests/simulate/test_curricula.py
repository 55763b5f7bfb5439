"""What curricula save on paper."""

from dapo.config.sampling import CURRICULA
from dapo.simulate.books import Scenario
from dapo.simulate.curricula import COLUMNS, Population, outcome
from dapo.simulate.fleet import Workload
from tests.simulate.test_command import simulated


def test_a_curriculum_saves_tokens_where_prompts_come_again() -> None:
    scenario = Scenario(workload=Workload(n=8), batch=32, steps=30)
    few, many = Population(count=200, gain=0.05), Population(count=50_000, gain=0.05)
    found = {name: outcome(name, scenario, few) for name in CURRICULA}
    assert {one.mixed for one in found.values()} == {32 * 30}
    assert found["retire"].tokens < 0.95 * found["uniform"].tokens
    assert found["weighted"].tokens < 0.95 * found["uniform"].tokens
    # Without a second visit nothing is known of any prompt.
    assert len({outcome(name, scenario, many).tokens for name in CURRICULA}) == 1


def test_the_smallest_table() -> None:
    head, _, *rows = simulated("--table curricula --batch 4 --n 2 --steps 3 --prompts 20")
    assert [row.split("|")[1].strip() for row in rows] == list(CURRICULA) and head.count("|") == len(COLUMNS) + 1
