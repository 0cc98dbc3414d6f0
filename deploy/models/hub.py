"""Weights from the Hugging Face hub."""

import shutil
from pathlib import Path

from engine.checkpoint.layout import check
from engine.errors import HeliosError
from engine.spec import ModelSpec

from .steps import Report, Unreachable

TEXT_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "LICENSE*"]
WEIGHT_FILES = ["*.safetensors"]
SUBFOLDERS = ["*/*"]
"""Other formats of the same weights (ONNX, original); never wanted."""


def download_from_hub(hub_id: str, directory: Path, report: Report) -> None:
    """Download a repository's config, tokenizer and safetensors into ``directory`` and check them.

    The config comes first, so that an unsupported model is refused before its weights are downloaded. Raises
    Unreachable if the hub cannot be reached, HeliosError if it refuses, CheckpointError for what it sent.
    """
    from engine.checkpoint.index import Checkpoint

    report(f"downloading the config of {hub_id}", 0, 0)
    _download(hub_id, directory, TEXT_FILES)
    spec = ModelSpec.from_directory(directory)
    report(f"downloading the weights of {hub_id}", 0, 0)
    _download(hub_id, directory, WEIGHT_FILES)
    shutil.rmtree(directory / ".cache", ignore_errors=True)  # the hub client's bookkeeping
    check(Checkpoint(directory), spec)


def _download(hub_id: str, directory: Path, patterns: list[str]) -> None:
    import httpx
    from huggingface_hub import errors, snapshot_download

    try:
        snapshot_download(hub_id, local_dir=directory, allow_patterns=patterns, ignore_patterns=SUBFOLDERS)
    except errors.GatedRepoError:
        raise HeliosError(f"{hub_id} asks for its terms to be accepted; do so on its page and set HF_TOKEN") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise HeliosError(f"the hub has no public model '{hub_id}'; check the id, or set HF_TOKEN if private") from None
    except (httpx.TransportError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        raise Unreachable(
            f"the hub cannot be reached for {hub_id} ({type(error).__name__}); check the network, or HF_ENDPOINT"
        ) from error
