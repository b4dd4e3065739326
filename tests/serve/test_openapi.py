"""The OpenAPI document is what the server does: fuzzed by schemathesis."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openapi_spec_validator import validate
from schemathesis import GenerationMode, checks

from tests.serve.serving import MARKED, MODEL, letters, serving
from trillion_infer.serve import chat, completions, openapi, response_input, schemas
from trillion_infer.serve.app import endpoints
from trillion_infer.serve.fields import IGNORED

OPTIONS = {"max_body_bytes": 200_000, "body_timeout_s": 10.0}
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@pytest.fixture(scope="module")
def served():
    with serving(letters, MARKED, OPTIONS, max_model_len=256) as served:
        yield served
        served.check_idle()


@pytest.fixture(scope="module")
def api(served):
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


def _shorten(body):
    """Names the model that is served, so that most bodies get past the first check; no answer runs long."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = MODEL
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            body[name] = min(body[name], 4) if type(body.get(name)) is int else 4
        body.pop("min_tokens", None)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("endpoint", openapi.ENDPOINTS, ids=lambda endpoint: endpoint.operation_id)
def test_no_body_breaks_an_endpoint_or_its_document(api, endpoint, mode):
    operation = api[endpoint.path][endpoint.method.upper()]
    if mode is GenerationMode.NEGATIVE and endpoint.body is None:
        pytest.skip("takes no body that could be wrong")

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def fuzz(case):
        _shorten(case.body)
        case.call_and_validate(checks=CHECKS, timeout=60)

    fuzz()


def test_the_document_is_valid_openapi(served):
    validate(httpx.get(f"{served.url}/openapi.json", timeout=60).json())


def test_every_route_is_in_the_document():
    documented = {(each.path, each.method.upper()) for each in openapi.ENDPOINTS}
    assert endpoints() == documented


@pytest.mark.parametrize(
    ("taken", "documented"),
    [
        (completions.FIELDS, schemas.COMPLETION),
        (chat.FIELDS, schemas.CHAT),
        (response_input.FIELDS, schemas.RESPONSES),
    ],
)
def test_every_field_is_in_the_document(taken, documented):
    assert set(documented["properties"]) - IGNORED == set(taken) - IGNORED
