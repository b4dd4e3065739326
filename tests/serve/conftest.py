from tests.text.conftest import byte_metadata

__all__ = ["byte_metadata"]
