"""Functions of a person's own: which text runs, what is said of a wrong name or file, and that a change is noticed."""

import pickle
from dataclasses import asdict

import pytest

from dapo.algorithm.own.loading import OwnFunctionError, digests, forget, load, own_function, read, source_of
from dapo.config.compose import compose
from dapo.driver.run import make_paths_absolute
from dapo.state.run_dir import claim_output_dir

KEY = "filter_groups.function"
SOUND = "def keep(group, min_scored):\n    return 'mixed'\n"


@pytest.fixture
def file(tmp_path):
    forget()
    (tmp_path / "my.py").write_text(SOUND)
    yield tmp_path / "my.py"
    forget()


@pytest.mark.parametrize(
    ("text", "name", "parts"),
    [
        pytest.param(SOUND, "kepe", ["is no function of", "did you mean keep?"], id="misspelt"),
        pytest.param("X = 1\n", "X", ["is no function of"], id="no function"),
        pytest.param("async def keep(group):\n    pass\n", "keep", ["it is an `async def`; write `def`"], id="async"),
        pytest.param("def keep(group, n):\n    pass\n", "keep", ["asks for n", "group, min_scored"], id="parameter"),
        pytest.param("import no_such_module\n", "keep", ["cannot be imported", "no_such_module"], id="import"),
        pytest.param("raise SystemExit(3)\n", "keep", ["cannot be imported", "SystemExit"], id="exit"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(file, text, name, parts):
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        load(read(KEY, f"{file}:{name}"))
    for part in (f"`{KEY}` ({file}:{name})", *parts):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"`filter_groups.function` \(/no/such.py:keep\): the file cannot be read"):
        read(KEY, "/no/such.py:keep")


def test_it_is_given_what_it_asks_for_and_no_more(file):
    one = "def one(group, gain=2.0):\n    return group, gain\n"
    file.write_text(one + "def rest(**given):\n    return sorted(given)\n")
    assert load(read(KEY, f"{file}:one"))(group=1, min_scored=2) == (1, 2.0)
    assert load(read(KEY, f"{file}:rest"))(group=1, min_scored=2) == ["group", "min_scored"]


def test_the_text_travels_and_two_versions_of_a_file_live_side_by_side(file):
    """It is pickled, as Ray does, and loaded after the file has gone, as on a node without it."""
    first = read(KEY, f"{file}:keep")
    file.write_text(SOUND.replace("mixed", "all_wrong"))
    second = read(KEY, f"{file}:keep")
    file.unlink()
    functions = [load(pickle.loads(pickle.dumps(source))) for source in (first, second)]
    assert [each(group=None, min_scored=2) for each in functions] == ["mixed", "all_wrong"]


def test_a_run_has_one_reading_of_a_file(file):
    cfg = compose([f"{KEY}={file}:keep"], "dapo_tiny")
    first = own_function(KEY, cfg.filter_groups.function)
    file.write_text(SOUND.replace("mixed", "all_wrong"))
    assert own_function(KEY, cfg.filter_groups.function) is first and source_of(cfg, KEY) is first.source
    assert source_of(cfg, "algorithm.policy_loss") is None
    forget()
    assert own_function(KEY, cfg.filter_groups.function)(group=None, min_scored=2) == "all_wrong"


def test_an_error_names_its_line(file):
    file.write_text("def keep(group):\n    x = 1\n    return 1 / 0\n")
    with pytest.raises(OwnFunctionError, match=r"my.py:keep\) raised ZeroDivisionError: .* at line 3 of my.py$"):
        load(read(KEY, f"{file}:keep"))(group=None, min_scored=2)


def test_paths_become_absolute_and_ready_names_stay(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    cfg = compose(
        [f"{KEY}=my.py:keep", "rollout.function.path=my.py", "algorithm.advantage.function=rloo"], "dapo_tiny"
    )
    make_paths_absolute(cfg)
    assert cfg.filter_groups.function == f"{file}:keep" and cfg.rollout.function.path == str(file)
    assert (cfg.algorithm.policy_loss, cfg.algorithm.advantage.function) == ("clip", "rloo")


def start(folder, cfg):
    """The part of a start that compares functions with those of the run that is there."""
    forget()
    with claim_output_dir(str(folder), "auto", asdict(cfg)) as run:
        run.check_own(digests(cfg))
        told = run.record_inputs(digests(cfg))
        run.begin()
        (folder / "metrics.jsonl").write_text("{}\n")  # it got somewhere
        return told, run.accepted


def test_a_run_that_goes_on_notices_another_text(file, tmp_path):
    folder, given = tmp_path / "run", f"{KEY}={file}:keep"
    cfg = compose([given], "dapo_tiny")
    assert start(folder, cfg) == ([], []) and start(folder, cfg) == ([], [])
    file.write_text(SOUND + "\n# another\n")
    with pytest.raises(
        ValueError, match=rf"`{KEY}` is another function \(my.py:keep, sha256 .*restore the file.*=\[{KEY}\]"
    ):
        start(folder, cfg)
    file.write_text(SOUND)
    assert start(folder, cfg) == ([], [])
    file.write_text(SOUND + "\n# another\n")
    accepting = compose([given, f"checkpoint.accept_changes=[{KEY}]"], "dapo_tiny")
    told, accepted = start(folder, accepting)
    assert len(told) == 1 and f"`{KEY}` was my.py:keep, sha256 " in told[0] and accepted == [KEY]
    assert start(folder, cfg) == ([], [])
