"""What the page and the server say to each other."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from torchcaps.data.files import shown
from torchcaps.errors import UserError
from torchcaps.serve.gallery import Sample
from torchcaps.serve.model import SWEEP_REACH, SWEEP_STEPS, Analysis, ServedModel

LONGEST_POSE = 4096
Content = dict[str, Any]
"""What JSON is made of."""
Component = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]


class Request(BaseModel):
    """Nothing but what is named is accepted, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class AnalyseRequest(Request):
    image: str
    """Bytes (C, H, W) in base64."""
    label: int | None = Field(None, ge=0)
    """The class to explain; by default the one a network is surest of."""


class DecodeRequest(Request):
    model: int = Field(ge=0)
    label: int = Field(ge=0)
    pose: list[Component] = Field(max_length=LONGEST_POSE)


class SweepRequest(DecodeRequest):
    component: int | None = Field(None, ge=0)
    """By default all of them."""


def info_of(models: list[ServedModel], no_samples: str | None) -> Content:
    """What the page shows before any image. ``no_samples`` says why there are no test images, if there are none."""
    task = models[0].network.task
    return {
        "classes": [shown(name) for name in task.classes],
        "image_shape": task.image_shape,
        "source_shape": task.source_shape or task.image_shape,  # that files are brought to; its middle is the image
        "fit": task.fit,
        "sweep_reach": SWEEP_REACH,  # how far a component is swept to either side,
        "sweep_steps": SWEEP_STEPS,  # and in how many pictures
        "models": [model_of(model) for model in models],
        "no_samples": no_samples,
    }


def model_of(model: ServedModel) -> Content:
    return {
        "name": model.name,
        "routing": model.original.routing_config().name if model.original.config.name == "capsnet" else None,
        "numbers": model.original.numbers(),
        "pose_size": model.pose_size,
        "has_decoder": model.has_decoder,
        "has_maps": model.has_maps,
        "error_percent": model.error_percent,
        "curves": model.curves,
    }


def answer_of(analysis: Analysis) -> Content:
    contributions = analysis.contributions
    return {
        "lengths": analysis.lengths.tolist(),
        "poses": analysis.poses.tolist(),
        "found": analysis.found,
        "reconstructions": [
            {"label": label, "image": image_text(image)} for label, image in analysis.reconstructions.items()
        ],
        "map": None
        if contributions is None
        else {
            "label": contributions.label,
            "adds": contributions.adds,
            "takes": contributions.takes,
            "adds_map": float_text(contributions.adds_map),  # float32 (H, W), little end first, in base64
            "takes_map": float_text(contributions.takes_map),
        },
    }


def picture_of(sample: Sample) -> Content:
    return {"image": as_text(sample.pixels.numpy()), "labels": sample.labels}


def as_text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def float_text(tensor: Tensor) -> str:
    return as_text(tensor.detach().float().cpu().numpy().astype("<f4"))


def image_text(image: Tensor) -> str:
    """Numbers in [0, 1] as bytes in base64."""
    return as_text(image.mul(255).round().clamp(0, 255).to(torch.uint8).cpu().numpy())


def pixels_of(text: str, image_shape: tuple[int, int, int]) -> Tensor:
    """Bytes in base64 as an image (C, H, W)."""
    expected = image_shape[0] * image_shape[1] * image_shape[2]
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):  # ValueError: letters beyond ASCII
        raise UserError("The image is not base64.") from None
    if len(data) != expected:
        raise UserError(f"The image has {len(data)} bytes, and should have {expected}.")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(image_shape)
