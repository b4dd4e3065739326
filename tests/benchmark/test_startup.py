"""Start-up in a process of its own."""

import pytest

from trillion_infer.benchmark.startup import first_token_s
from trillion_infer.core.errors import TrillionInferError


def test_a_process_that_fails_is_an_error_with_its_last_words():
    with pytest.raises(TrillionInferError, match=r"gave no token: .*/nowhere/model does not exist"):
        first_token_s({"model": "/nowhere/model"}, [1, 2, 3])
