"""Arguments of a batch: one for all prompts, or one each."""

from collections.abc import Mapping, Sequence
from typing import Any

from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.generation.prompts import Prompt


def as_batch(prompts: Any) -> list[Prompt]:
    """A list of prompts, from one prompt or several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    batch = list(prompts)
    if not batch:
        return []
    return batch if isinstance(batch[0], str | Mapping | Sequence) or hasattr(batch[0], "__len__") else [batch]


def params_for(
    batch: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """One a prompt; the defaults for None."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(batch)
    if len(params) != len(batch):
        raise InvalidRequestError(f"{len(params)} sampling_params for {len(batch)} prompts; give one, or one a prompt.")
    return list(params)


def tenants_for(batch: Sequence[Prompt], tenant: str | Sequence[str]) -> list[str]:
    """One a prompt."""
    tenants = [tenant] * len(batch) if isinstance(tenant, str) else list(tenant)
    if len(tenants) != len(batch):
        raise InvalidRequestError(f"{len(tenants)} tenants for {len(batch)} prompts; give one, or one a prompt.")
    return tenants


def sessions_for(
    batch: Sequence[Prompt], session_id: str | Sequence[str] | None, tenants: Sequence[str]
) -> list[str | None]:
    """One a prompt, None for those of no session. No session of a tenant has two turns at once."""
    if session_id is None:
        return [None] * len(batch)
    sessions: list[str | None] = [session_id] if isinstance(session_id, str) else list(session_id)
    if len(sessions) != len(batch):
        raise InvalidRequestError(f"{len(sessions)} session_id for {len(batch)} prompts; give one each.")
    named = [(tenant, name) for tenant, name in zip(tenants, sessions, strict=True) if name is not None]
    if len(set(named)) < len(named):
        raise InvalidRequestError("One session_id is given for two prompts; turns come one after the other.")
    return sessions
