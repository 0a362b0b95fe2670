"""`hf:org/name[@revision][#file]`: the Hugging Face hub, through its own client and its own cache.

HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean everywhere.
"""

from __future__ import annotations

import re
from pathlib import Path

from polymux.core.errors import ModelError
from polymux.core.models.source import Located, ModelSource, Report

NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(#(?P<file>[^\\]+))?")

WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
UNWANTED = ["original/*", "consolidated*.safetensors", "onnx/*", "openvino/*"]


class HubSource(ModelSource):
    scheme = "hf"

    def resolve(self, name: str, *, sha256: str | None, report: Report) -> Located:
        match = NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"hf:{name} is not hf:org/name, hf:org/name@revision or hf:org/name#file.gguf")
        if sha256 is not None:
            raise ModelError(f"hf:{name}: pin a revision (hf:org/name@revision); sha256 is for wheels and files")
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        file = match["file"]
        try:
            snapshot = snapshot_download(
                match["repo"],
                revision=match["revision"],
                allow_patterns=[file] if file else WANTED,
                ignore_patterns=None if file else UNWANTED,
            )
        except LocalEntryNotFoundError as error:
            raise ModelError(
                f"hf:{name} is not in the local cache and the hub cannot be reached (offline, or HF_HUB_OFFLINE is "
                "set). Fetch it once with `polymux pull` where there is a network"
            ) from error
        except HFValidationError as error:
            raise ModelError(f"hf:{name}: {error}") from error
        except HfHubHTTPError as error:
            raise ModelError(f"hf:{name}: {explain(error)}") from error
        except OSError as error:
            raise ModelError(f"hf:{name} cannot be fetched: {error}") from error
        folder = Path(snapshot)
        path = folder / file if file else folder
        if not path.exists():
            raise ModelError(f"hf:{match['repo']} has no file {file!r}")
        if not file and not any(folder.rglob("*.safetensors")):
            raise ModelError(
                f"hf:{name} has no safetensors weights; pickled ones (.bin, .pt) are refused since unpickling runs "
                "code. Name a GGUF file with hf:org/name#file.gguf, or another revision"
            )
        return Located(path, f"{match['repo']}@{folder.name}" + (f"#{file}" if file else ""))

    def is_fetched(self, name: str, *, sha256: str | None) -> bool:
        from huggingface_hub import snapshot_download

        match = NAME.fullmatch(name)
        try:
            return bool(match and snapshot_download(match["repo"], revision=match["revision"], local_files_only=True))
        except (OSError, ValueError):
            return False


def explain(error: Exception) -> str:
    """What a failed download means for the user, by the kind of error that the hub's client raised."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return "the model is gated: accept its terms on the hub and set HF_TOKEN"
    if kind == "RevisionNotFoundError":
        return "there is no such revision"
    if kind == "RepositoryNotFoundError":
        return "there is no such model on the hub, or it is private and HF_TOKEN does not open it"
    return str(error).strip().splitlines()[0]
