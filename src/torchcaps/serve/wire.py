"""What the page and the server say to each other."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from torchcaps.errors import UserError
from torchcaps.serve.gallery import Sample
from torchcaps.serve.model import SWEEP_REACH, SWEEP_STEPS, Analysis, ServedModel

LONGEST_POSE = 4096
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


class Model(BaseModel):
    name: str
    routing: str | None
    numbers: int
    pose_size: int
    has_decoder: bool
    has_maps: bool
    error_percent: float | None
    curves: dict[str, list[float | None]]


class Info(BaseModel):
    classes: list[str]
    image_shape: tuple[int, int, int]
    source_shape: tuple[int, int, int]
    """(C, H, W) that files are brought to; the middle of that is the image."""
    fit: str
    """How they are brought to it."""
    sweep_reach: float
    """How far a component is swept to either side,"""
    sweep_steps: int
    """and in how many pictures."""
    models: list[Model]
    no_samples: str | None
    """Why there are no test images to pick, if there are none."""


class Map(BaseModel):
    label: int
    adds: float
    takes: float
    adds_map: str
    """float32 (H, W), little end first, in base64."""
    takes_map: str


class Drawn(BaseModel):
    label: int
    image: str


class Answer(BaseModel):
    lengths: list[float]
    poses: list[list[float]]
    found: list[int]
    reconstructions: list[Drawn]
    map: Map | None


class Answers(BaseModel):
    answers: list[Answer]
    """One for each network."""


class Picture(BaseModel):
    image: str
    labels: list[int] = []


class Pictures(BaseModel):
    pictures: list[Picture]


class Strips(BaseModel):
    strips: list[list[str]]
    """For each component swept, its images."""


def info_of(models: list[ServedModel], no_samples: str | None) -> Info:
    task = models[0].network.task
    return Info(
        classes=list(task.classes),
        image_shape=task.image_shape,
        source_shape=task.source_shape or task.image_shape,
        fit=task.fit,
        sweep_reach=SWEEP_REACH,
        sweep_steps=SWEEP_STEPS,
        models=[model_of(model) for model in models],
        no_samples=no_samples,
    )


def model_of(model: ServedModel) -> Model:
    routing = model.original.routing_config().name if model.original.config.name == "capsnet" else None
    return Model(
        name=model.name,
        routing=routing,
        numbers=model.original.numbers(),
        pose_size=model.pose_size,
        has_decoder=model.has_decoder,
        has_maps=model.has_maps,
        error_percent=model.error_percent,
        curves={name: list(column) for name, column in model.curves.items()},
    )


def answer_of(analysis: Analysis) -> Answer:
    contributions = analysis.contributions
    return Answer(
        lengths=analysis.lengths.tolist(),
        poses=analysis.poses.tolist(),
        found=analysis.found,
        reconstructions=[
            Drawn(label=label, image=image_text(image)) for label, image in analysis.reconstructions.items()
        ],
        map=None
        if contributions is None
        else Map(
            label=contributions.label,
            adds=contributions.adds,
            takes=contributions.takes,
            adds_map=float_text(contributions.adds_map),
            takes_map=float_text(contributions.takes_map),
        ),
    )


def picture_of(sample: Sample) -> Picture:
    return Picture(image=as_text(sample.pixels.numpy()), labels=sample.labels)


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
