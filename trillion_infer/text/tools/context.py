"""What every format's reader works with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trillion_infer.text.tools.emitter import Emitter
from trillion_infer.text.tools.scanner import Scanner

_NAME = re.compile(r"[A-Za-z0-9_][\w.\-/:]*")


@dataclass(frozen=True)
class Context:
    """The machine's cursor and outlet, and the parameter schemas of the tools on offer by name.

    `tools` is None where the caller did not say which tools there are.
    """

    scan: Scanner
    emit: Emitter
    tools: Mapping[str, Mapping[str, Any]] | None = None
    first_call: int = 0

    def is_name(self, name: str) -> bool:
        """Whether `name` can be a tool's name."""
        return _NAME.fullmatch(name) is not None

    def offers(self, name: str) -> bool:
        """Whether `name` is a tool on offer; true of any name where the tools are not known."""
        return self.is_name(name) and (self.tools is None or name in self.tools)

    def parameter_schema(self, name: str, parameter: str) -> Mapping[str, Any] | None:
        """JSON schema of one parameter, None if it is not known."""
        properties = (self.tools or {}).get(name, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else None
