"""How much chaos: the suite takes a short slice, ``--chaos-scale 20`` is the whole of it."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chaos-scale",
        type=int,
        default=1,
        help="times 50 disconnects, 4 clients that never read, 3 seconds of overload (default: 1)",
    )
    parser.addoption(
        "--chaos-report", default=None, help="JSON file for what the overload measured"
    )


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> int:
    times: int = request.config.getoption("--chaos-scale", 1)
    return times
