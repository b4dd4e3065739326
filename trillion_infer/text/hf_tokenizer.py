"""Reads the tokenizer files of a Hugging Face model directory."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from trillion_infer.core.errors import ModelLoadError

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_hf_tokenizer(directory: Path) -> dict[str, Any]:
    """Keyword arguments of `Tokenizer` from tokenizer.json, tokenizer_config.json, special_tokens_map.json,
    chat_template.jinja or .json, config.json and generation_config.json. Only the first is required."""
    if not directory.is_dir():
        raise ModelLoadError(f"{directory} is not a directory; give the folder that holds tokenizer.json.")
    config = {**_json(directory / "special_tokens_map.json"), **_json(directory / "tokenizer_config.json")}
    backend = _backend(directory, config)
    names = {name: _content(config[name]) for name in _NAMED if config.get(name)}
    _complete_added_tokens(backend, config, names)
    bos_id = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
    _wrap(backend, config, names)
    return {
        "backend": backend,
        "bos_id": bos_id,
        "eos_ids": _eos_ids(directory, backend, names),
        "chat_template": _chat_template(directory, config),
        "extra_template_variables": names,
    }


def _backend(directory: Path, config: dict[str, Any]) -> Backend:
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            backend = Backend.from_file(str(path))
            # Training leaves these behind in some files; they would cut or pad prompts silently.
            backend.no_truncation()
            backend.no_padding()
            return backend
        except Exception as error:  # tokenizers raises plain Exception
            raise ModelLoadError(f"{path} cannot be read as a tokenizer: {error}.") from error
    if (directory / "tiktoken.model").is_file():
        from trillion_infer.text.tiktoken_tokenizer import backend_from_tiktoken

        return backend_from_tiktoken(directory / "tiktoken.model", config)
    found = sorted(p.name for p in directory.iterdir() if "token" in p.name)
    raise ModelLoadError(
        f"{directory} has no tokenizer.json (found: {', '.join(found) or 'no tokenizer file'}); download it, "
        "or write it with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)."
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__}; an object is expected.")
    return value


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _complete_added_tokens(backend: Backend, config: dict[str, Any], names: dict[str, str]) -> None:
    """Adds tokens that only tokenizer_config.json declares, where their declared ids are the next free ones."""
    declared = {int(id): token for id, token in config.get("added_tokens_decoder", {}).items()}
    known = backend.get_added_tokens_decoder()
    for id in sorted(declared.keys() - known.keys()):
        token = declared[id]
        options = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in token}
        added = AddedToken(token["content"], special=token.get("special", False), **options)
        (backend.add_special_tokens if added.special else backend.add_tokens)([added])
        if backend.token_to_id(added.content) != id:
            raise ModelLoadError(
                f"tokenizer_config.json gives {added.content!r} the id {id}, tokenizer.json makes it "
                f"{backend.token_to_id(added.content)}; the files come from different models."
            )
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    plain = [token for token in names.values() if token not in added and backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in plain])


def _wrap(backend: Backend, config: dict[str, Any], names: dict[str, str]) -> None:
    """Applies an explicit add_bos_token / add_eos_token where tokenizer.json's own wrapping differs from it."""
    wrapped = backend.encode("", add_special_tokens=True).ids
    want, changed = {}, False
    for name, position in (("bos", 0), ("eos", -1)):
        token = names.get(f"{name}_token")
        id = backend.token_to_id(token) if token else None
        has = bool(wrapped) and id is not None and wrapped[position] == id
        flag = config.get(f"add_{name}_token")
        wanted = has if flag is None or id is None else bool(flag)
        changed |= wanted != has
        if wanted:
            want[name] = (token, id)
    if not changed:
        return
    template = [*([want["bos"][0]] if "bos" in want else []), "$A", *([want["eos"][0]] if "eos" in want else [])]
    pairs = list(dict.fromkeys(want.values()))
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=pairs)  # type: ignore


def _eos_ids(directory: Path, backend: Backend, names: dict[str, str]) -> frozenset[int]:
    """The union of config.json, its text_config, generation_config.json and the tokenizer's own EOS."""
    config = _json(directory / "config.json")
    sources = [config, config.get("text_config") or {}, _json(directory / "generation_config.json")]
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if "eos_token" in names:
        own = backend.token_to_id(names["eos_token"])
        ids.update([] if own is None else [own])
    return frozenset(int(id) for id in ids)


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    template = _json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default", next(iter(named.values()), None))
    return template
