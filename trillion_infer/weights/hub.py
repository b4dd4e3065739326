"""Downloads of a model from the Hugging Face hub, where there is a network."""

from pathlib import Path

from trillion_infer.core.errors import ModelLoadError

_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def download(repo: str) -> Path:
    """Fetches (or finds in the hub's cache) the files of `repo` that inference needs; returns their directory."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelLoadError(
            f"{repo} is no local path, and huggingface-hub, which would fetch it, is not installed; "
            "install it or give a local path"
        ) from error
    try:
        return Path(snapshot_download(repo, allow_patterns=_FILES))
    except Exception as error:
        raise ModelLoadError(
            f"{repo} is no local path and could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}); "
            "check the name and the network, or give a local path"
        ) from error
