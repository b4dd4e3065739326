"""Typed errors. Each message is a sentence that says what was given, what is allowed and how to mend it."""


class TrillionInferError(Exception):
    """Root of every error this library raises on purpose."""


class InvalidRequestError(TrillionInferError, ValueError):
    """One request cannot be served as given; nobody else's request is affected (HTTP 400)."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class SessionError(InvalidRequestError):
    """A saved session cannot be used here: it is of another model, or damaged."""


class UnknownSessionError(SessionError):
    """There is no session of this name (HTTP 404)."""


class ConfigError(TrillionInferError, ValueError):
    """An option of the engine, the mesh or the cache is out of its range, or two of them contradict."""


class ModelLoadError(TrillionInferError, ValueError):
    """A checkpoint is incomplete, corrupt, or describes something that is not implemented."""


class UnsupportedModelError(ModelLoadError):
    """The architecture, or an attribute of its config, is not one this library implements."""


class OutOfMemoryError(TrillionInferError, MemoryError):
    """A budget does not hold what is asked; the message names the budget, who holds it and the flags to change."""


class KernelInputError(TrillionInferError, ValueError):
    """A batch would have made a kernel touch a wrong page (found with debug_kernels): a fault of this library."""


class EngineDeadError(TrillionInferError, RuntimeError):
    """The engine loop stopped after an internal failure; requests in flight end with this error."""


class HandoffError(TrillionInferError, RuntimeError):
    """No prefill worker could hand a request over, and the policy is to fail; another try may do better (HTTP 503)."""


class QueueFullError(TrillionInferError, RuntimeError):
    """The waiting queue is at its limit; try again later (HTTP 429 or 503)."""


class GroupError(TrillionInferError, RuntimeError):
    """The processes of one engine did not find each other, or one of them is lost or out of step."""
