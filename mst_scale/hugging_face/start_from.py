"""Starts a run from existing weights (`--init`).

They come from a GPT-2 in a folder with config.json and safetensors (as transformers and `mst export` write them), from
a name on the Hugging Face hub (`gpt2` is OpenAI's checkpoint), or from the latest complete checkpoint of a run, dense
or sparse. The new run takes the shape of that model. Rank 0 reads the weights; DeepSpeed distributes them, under ZeRO-3
one parameter at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from mst_scale import zero_shards
from mst_scale.checkpoints import finding
from mst_scale.checkpoints.multiplied import multiplied_weights_of
from mst_scale.config import ModelConfig, read_of_run
from mst_scale.errors import Damaged, UserError
from mst_scale.hugging_face.names import MASK_BUFFERS, from_hugging_face, hugging_face_config
from mst_scale.models import shapes_of

FILES = ["config.json", "*.safetensors", "*.safetensors.index.json"]
# Keys of a config.json that must have the value that our GPT implements, or be absent.
SAME = ("activation_function", "layer_norm_epsilon", "scale_attn_weights")
NEVER = ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention", "quantization_config")
# Keys of the `model` block that the weights determine.
SHAPE = ("n_layer", "n_head", "n_embd", "d_ff", "seq_length", "vocab_size", "bias", "tied_head", "vocab_multiple")


def offline_unless_reachable() -> str | None:
    """Set HF_HUB_OFFLINE if the hub cannot be reached, so that its libraries use their cache without retrying.

    Returns:
        The host that cannot be reached; None if it can.
    """
    address = urllib.parse.urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if "HF_HUB_OFFLINE" in os.environ or "https" in urllib.request.getproxies():
        return None
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=10).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        return address.hostname
    return None


def folder_of(name: str) -> Path:
    """Return the folder of a model, which is downloaded from the hub if `name` is not a folder.

    Raises:
        UserError: if there is no such folder, and the hub cannot provide it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"--init {name}: there is no such folder")
    offline_unless_reachable()
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # no network, no such name: many classes
        raise UserError(
            f"--init {name}: there is no such folder, and it cannot be downloaded from the hub "
            f"({type(error).__name__}): check the name and the network, or pass a folder with its config.json and "
            "model.safetensors"
        ) from None


def model_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of the `model` block that describe the model in a folder.

    Raises:
        UserError: if our GPT cannot represent that model.
    """
    if (ours := _run(folder)) is not None:
        if ours["arch"] != "gpt":
            raise UserError(f"{folder}: --init requires a GPT, but this run trains a {ours['arch']!r}")
        return {key: ours[key] for key in SHAPE}
    raw = _config(folder)
    theirs = {**hugging_face_config(ModelConfig()), "scale_attn_weights": True}
    for key in SAME:
        if raw.get(key, theirs[key]) != theirs[key]:
            raise UserError(f"{folder}: its {key} is {raw[key]!r}, but our GPT has {theirs[key]!r}")
    for key in NEVER:
        if raw.get(key):
            raise UserError(f"{folder}: its {key} is {json.dumps(raw[key])}, which our GPT does not support")
    return {
        "n_layer": raw["n_layer"],
        "n_head": raw["n_head"],
        "n_embd": raw["n_embd"],
        "d_ff": raw.get("n_inner"),
        "seq_length": raw.get("n_positions", raw.get("n_ctx")),
        "vocab_size": raw["vocab_size"],
        "bias": (raw.get("mst_scale") or {}).get("bias", True) or _has_biases(folder),
        "tied_head": raw.get("tie_word_embeddings", True),
    }


def _has_biases(folder: Path) -> bool:
    """Return whether a bias is not 0: an exported model without biases may have been trained further."""
    for path in _weight_files(folder):
        with (
            contextlib.suppress(SafetensorError, FileNotFoundError),
            safe_open(path, framework="pt") as file,
        ):  # `read` reports damage
            biases = [name for name in file.keys() if name.endswith(".bias") and not name.endswith(MASK_BUFFERS)]  # noqa: SIM118  (no dict)
            if any(bool(file.get_tensor(name).any()) for name in biases):
                return True
    return False


def _run(folder: Path) -> dict[str, Any] | None:
    """Return the model block of a run; None if the folder is not a run."""
    path = folder / "config.json"
    if not path.is_file() or not (folder / "checkpoints").is_dir():
        return None
    model = read_of_run(path).get("model")
    return dict(model) if isinstance(model, dict) else None


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
        kind = raw["model_type"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{folder} has no config.json of transformers with a model_type, and is not a run: --init requires a GPT-2 "
            "or the folder of a run"
        ) from None
    if kind != "gpt2":
        raise UserError(f"{path}: --init requires a GPT-2, but this is {kind!r}")
    if missing := [key for key in ("n_layer", "n_head", "n_embd", "vocab_size") if key not in raw]:
        raise UserError(f"{path} is incomplete: it has no {missing[0]}")
    return dict(raw)


def read(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Read the weights of a folder under our names.

    Raises:
        UserError: if they do not have the shape of `config`.
        Damaged: if a file is truncated.
    """
    if _run(folder) is not None:
        return of_run(finding.locate(folder), config)
    found = _of_gpt2(folder, config)
    _check_shapes(found, config, folder)
    return found


@torch.no_grad()  # some files contain parameters, which must not be part of a graph
def of_run(checkpoint: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Read the weights of a run's checkpoint; raises the same errors as `read`."""
    weights = multiplied_weights_of(checkpoint)
    found = {name: weights.read(name) for name in weights.shapes}
    _check_shapes(found, config, checkpoint)
    return found


def _check_shapes(found: dict[str, torch.Tensor], config: ModelConfig, folder: Path) -> None:
    for name, shape in shapes_of(config).items():
        if name not in found:
            raise UserError(f"{folder} has no weights of {name}: it is of another model")
        if (theirs := tuple(found[name].shape)) != shape:
            raise UserError(f"{folder}: {name} has shape {theirs}, but according to its config.json {shape}")


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that save_pretrained has written, without others such as masks."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(f"{folder} has no model.safetensors: save the model with transformers' save_pretrained")
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Damaged(f"{index} is damaged ({error})") from None
    return [folder / name for name in sorted(names)]


def _of_gpt2(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for path in _weight_files(folder):
        try:
            state.update(load_file(path))
        except (SafetensorError, FileNotFoundError) as error:
            raise Damaged(f"{path} is damaged or truncated ({error})") from None
    try:
        return from_hugging_face(state, config)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def fill(model: torch.nn.Module, state: dict[str, torch.Tensor] | None) -> None:
    """Copy what `read` returned into a new model. A collective: ranks other than the first pass None."""
    for name, parameter in model.named_parameters():
        with zero_shards.whole(parameter) as writable, torch.no_grad():
            if writable and state is not None:
                parameter.copy_(state[name])
