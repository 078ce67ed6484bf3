"""A model that says what another one says, and takes several times as long: for draft models.

    python -m benchmarks.deepened smollm2-135m FOLDER --times 8

Layers are put behind those of the model, with random weights of their size, whose products are
computed and then multiplied by zeros: they add nothing to the residual stream. So the texts are a
real model's, and so is the share of guesses that are right, while a step reads so many times the
weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoengine.loading.find_model import resolve_model

ADDED = ("self_attn.o_proj", "mlp.down_proj")  # to the residual stream


def deepened(tensors: dict[str, Tensor], num_layers: int, times: int) -> dict[str, Tensor]:
    """The tensors with those of (times - 1) * num_layers further layers."""
    random = torch.Generator().manual_seed(0)
    made = dict(tensors)
    for index in range(num_layers, times * num_layers):
        prefix = f"model.layers.{index % num_layers}."
        for name, like in tensors.items():
            if not name.startswith(prefix):
                continue
            part = name.removeprefix(prefix)
            is_added = part.startswith(ADDED)
            weight = torch.zeros if is_added else torch.ones
            other = weight(like.shape, dtype=like.dtype)
            if not is_added and like.dim() == 2:
                other = (0.02 * torch.randn(like.shape, generator=random)).to(like.dtype)
            made[f"model.layers.{index}.{part}"] = other
    return made


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a Llama, such as smollm2-135m")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=8)
    args = parser.parse_args()
    source = resolve_model(args.model)
    shutil.copytree(source, args.folder)
    config = json.loads((source / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = args.times * num_layers
    (args.folder / "config.json").write_text(json.dumps(config))
    (path,) = args.folder.glob("*.safetensors")
    tensors = deepened(load_file(path), num_layers, args.times)
    save_file(tensors, path, {"format": "pt"})


if __name__ == "__main__":
    main()
