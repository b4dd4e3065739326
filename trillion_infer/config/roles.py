"""What the engines of a role differ in, where prefill and decode run on meshes of their own."""

from collections.abc import Callable
from dataclasses import replace

from trillion_infer.config.engine import EngineConfig
from trillion_infer.core.errors import ConfigError

ROLES = ("prefill", "decode")

_OPTIONS: dict[str, Callable[[str], object]] = {
    "max_running": int,
    "prefill_chunk": int,
    "kv_memory": float,
    "kv_dtype": str,
    "attention": str,
}


def role_config(config: EngineConfig, role: str) -> EngineConfig:
    """The options of one role's engines. Only decode engines draft (models that do run along in prefill engines, too);
    prefill engines have `prefill_options` beside.

    Tiers are left out: those are shared by all engines. Raises ConfigError.
    """
    plain = replace(config, prefill_options=None, host_kv=0, disk_kv=None, store=None)
    if role == "decode":
        return plain
    return replace(plain, speculate=None, **parse_options(config.prefill_options))


def parse_options(text: str | None) -> dict[str, object]:
    """Options from "max_running=8,kv_dtype=bfloat16". Raises ConfigError."""
    found: dict[str, object] = {}
    for item in (text or "").split(","):
        name, _, value = item.strip().partition("=")
        if not name:
            continue
        if name not in _OPTIONS:
            raise ConfigError(
                f"prefill_options names {name!r}; prefill engines may differ from decode engines in "
                f"{', '.join(_OPTIONS)}."
            )
        try:
            found[name] = _OPTIONS[name](value)
        except ValueError:
            raise ConfigError(f"prefill_options gives {name} as {value!r}, which is no number.") from None
    return found
