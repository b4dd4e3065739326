"""After every test of the engine, every page of every engine is home."""

import pytest

from tests.engine.helpers import check_idle


@pytest.fixture(autouse=True)
def every_page_is_home(request: pytest.FixtureRequest):
    """free + cached == total in each LLM that tests share, and no request is left."""
    yield
    if "make_llm" in request.fixturenames:
        for llm in request.getfixturevalue("make_llm").made:
            check_idle(llm)
