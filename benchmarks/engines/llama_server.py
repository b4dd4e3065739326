"""llama.cpp's HTTP server on loopback, beside its client in one process; settings as in llama_library.py."""

import json
import urllib.request
from typing import Any

from llama_library import LlamaCpp
from protocol import main


class LlamaServer(LlamaCpp):
    """Every request is a connection; answers come whole."""

    def ask(self, server: Any, request: dict[str, Any]) -> dict[str, Any]:
        asked = urllib.request.Request(
            f"{server.listening_address}/v1/completions",
            json.dumps(request).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=600) as response:
            return json.load(response)


if __name__ == "__main__":
    main("llama_server", __doc__ or "", LlamaServer)
