import pytest

RAY_SAYS = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def a_user_without_ray(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cluster and no token in the environment, nor in the home directory; but a test on Ray keeps its own Ray."""
    if request.node.get_closest_marker("ray") is None:
        for name in RAY_SAYS:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
