"""The page with the model inside: it opens from a file, with no server and no Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchcaps.atomic import write_atomically
from torchcaps.errors import UserError
from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.layers.primary import ImageCapsules
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.routing.base import SharedRouting
from torchcaps.routing.dynamic import DynamicRouting
from torchcaps.serve import wire
from torchcaps.serve.app import PAGE, STATIC
from torchcaps.serve.gallery import Gallery
from torchcaps.serve.model import ServedModel, check_side_by_side

SERVER_SCRIPT = '<script src="server.js"></script>'
CHARSET = '<meta charset="utf-8">'
POLICY = "connect-src 'none'; form-action 'none'; object-src 'none'"
NOTHING_LEAVES = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
OWN_SCRIPTS = ("engine.js", "model.js", "static.js")
SAMPLES = 32
WRONG_SAMPLES = 12
LARGEST_HALF = 65504.0


def write_static(
    folder: Path, models: Sequence[ServedModel], *, gallery: Gallery | None, no_samples: str, bits: int = 16
) -> int:
    """Write the page to a folder that is new or empty.

    Args:
        folder: where to.
        models: the networks, one or two.
        gallery: test images, of which some are put into the page.
        no_samples: why there are none, if there are none.
        bits: of a weight, 16 or 8.

    Returns:
        bytes written
    """
    check_side_by_side(models)
    content = {
        "info": wire.info_of(list(models), None if gallery else no_samples),
        "samples": _pictures(gallery, SAMPLES),
        "wrong": [_pictures(gallery, WRONG_SAMPLES, model) for model in models],
        "networks": [network_content(model, bits) for model in models],
    }
    page = {name: (STATIC / name).read_bytes() for name in (*PAGE, "engine.js", "static.js") if name != "server.js"}
    scripts = "\n".join(f'<script src="{name}"></script>' for name in OWN_SCRIPTS)
    html = page["index.html"].decode().replace(SERVER_SCRIPT, scripts)
    page["index.html"] = html.replace(CHARSET, f"{CHARSET}\n{NOTHING_LEAVES}").encode()
    page["model.js"] = f'"use strict";\nwindow.TORCHCAPS = {_as_script(content)};\n'.encode()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not an empty folder: choose another one.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in page.items():
        write_atomically(folder / name, data)
    return sum(map(len, page.values()))


def network_content(model: ServedModel, bits: int = 16) -> dict[str, Any]:
    """A network as ``engine.js`` takes it."""
    network = model.original.folded()
    if not isinstance(network, CapsuleNetwork) or not isinstance(network.front, ImageCapsules):
        raise UserError(
            f"{model.name} is no capsnet with the paper's convolutions: only those run without Python. Use torchcaps "
            "serve without --static."
        )
    front = network.front
    first, second = front.first, front.second
    task = network.task
    return {
        "image_shape": task.image_shape,
        "mean": network.mean.flatten().tolist(),
        "std": network.std.flatten().tolist(),
        "standardise": task.standardise,
        "labels_per_image": task.labels_per_image,
        "classes": len(task.classes),
        "kernel": first.kernel_size[0],
        "padding": front.padding,
        "stride": front.STRIDE,
        "negative_slope": front.negative_slope,
        "map_shape": front.map_shape,
        "size": front.size,
        "kept": None if network.kept is None else network.kept.tolist(),
        "first": _affine(first.weight.permute(2, 3, 1, 0).flatten(0, 2), first.bias, bits),  # (k * k * C, O)
        "second": _affine(second.weight.permute(2, 3, 1, 0).flatten(0, 2), second.bias, bits),
        "layers": [_layer(cast(CapsuleLayer, layer), model.name, bits) for layer in network.layers],
        "decoder": None
        if network.decoder is None
        else [
            _affine(linear.weight.mT, linear.bias, bits)
            for linear in network.decoder.layers
            if isinstance(linear, nn.Linear)
        ],
    }


def _layer(layer: CapsuleLayer, name: str, bits: int) -> dict[str, Any]:
    I, D, J, E = layer.weight.shape
    if isinstance(layer.routing, DynamicRouting):
        iterations = layer.routing.iterations
    elif isinstance(layer.routing, SharedRouting):  # folded: a plain sum
        iterations = 0
    else:
        raise UserError(
            f"{name} uses {type(layer.routing).__name__}: only networks with shared coefficients or dynamic routing "
            "run without Python. Use torchcaps serve without --static."
        )
    return {
        "inputs": I,
        "input_size": D,
        "outputs": J,
        "output_size": E,
        "iterations": iterations,
        **_affine(layer.weight.reshape(I * D, J * E), None, bits),
    }


def _affine(matrix: Tensor, bias: Tensor | None, bits: int) -> dict[str, Any]:
    """A matrix (inputs, outputs) in few bits, with the scale of each output if they are whole numbers."""
    values = matrix.detach().float().cpu().contiguous()
    if not values.isfinite().all() or values.abs().max() > LARGEST_HALF:
        raise UserError("The network has weights that are too large or no numbers at all: it cannot be used.")
    content: dict[str, Any] = {"bits": bits, "bias": None if bias is None else wire.float_text(bias)}
    if bits == 16:
        return {**content, "weight": wire.as_text(values.numpy().astype("<f2"))}
    scales = (values.abs().amax(0) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    whole = (values / scales).round().to(torch.int8)
    return {**content, "weight": wire.as_text(whole.numpy()), "scales": wire.float_text(scales)}


def _pictures(gallery: Gallery | None, count: int, model: ServedModel | None = None) -> list[dict[str, Any]]:
    if gallery is None:
        return []
    samples = gallery.some(count) if model is None else gallery.wrong(count, model)
    return [wire.picture_of(sample) for sample in samples]


def _as_script(content: object) -> str:
    """JSON that is also a JavaScript expression, whatever the names of classes contain."""
    return json.dumps(content, allow_nan=False, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
