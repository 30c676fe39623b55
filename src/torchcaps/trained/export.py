"""A trained network in the formats that other programs run: ONNX, torch.export's pt2, and safetensors.

What is written takes ``image`` (B, C, H, W) and gives ``lengths`` (B, J) and ``poses`` (B, J, E) of the class capsules,
for any B. Shared coefficients are folded into the weights, and the normalisation of images is part of it. Every file is
read back and compared with the network before it gets its name.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import logging
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchcaps
from torchcaps.atomic import check_replaceable
from torchcaps.errors import UserError
from torchcaps.layers.stem import StemCapsules
from torchcaps.models.base import Network
from torchcaps.models.files import load
from torchcaps.models.packing import check_precision, pack, unpack
from torchcaps.routing.base import Routing
from torchcaps.routing.registry import ROUTINGS

FORMATS = {"onnx": ".onnx", "pt2": ".pt2", "safetensors": ".safetensors"}
"""Each format's ending."""
INPUT, OUTPUTS = "image", ("lengths", "poses")
METADATA = "torchcaps.json"
"""Name of the file inside a pt2 archive that holds the metadata."""
BOUND = 1e-3
"""The largest difference allowed between a network and its file, relative to the largest answer if that is above 1."""
RANDOM_IMAGES = 8
NEEDED = ("onnx", "onnxscript", "onnxruntime")
"""What the extra [export] brings."""
LARGEST_ONNX = 1_900_000_000  # bytes of weights: one file holds at most 2 GB

Answers = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Images (B, C, H, W) -> lengths (B, J) and poses (B, J, E)."""


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how well it repeats the network."""

    path: Path
    to: str
    precision: str
    bytes: int
    images: int
    """How many images both were compared on."""
    real_images: bool
    """Whether those were given, and not random."""
    largest_difference: float
    """Between answers of the file and of the network, over all lengths and poses."""
    rounding_difference: float
    """The same between the file and the network with its weights rounded as the file's are; the one that is bounded."""
    error_percent: tuple[float, float] | None = None
    """Test error before and after rounding the weights, where it was measured."""
    test_images: int = 0
    no_images: str = ""
    """Why it was compared on random images, if there should have been others."""


def export(
    network: Network, path: Path | str, *, to: str = "onnx", precision: str = "float32", images: Tensor | None = None
) -> ExportReport:
    """Write a network to a file for other programs, and compare the two.

    Args:
        network: any of torchcaps'. It is left as it is.
        path: of the file. One that is there is replaced, once the new one has been found right.
        to: "onnx", "pt2" (for ``torch.export.load``) or "safetensors" (for :func:`torchcaps.load`).
        precision: of the stored weights, "float32", "float16" or "int8". All computation is in float32.
        images: (B, C, H, W) in [0, 1], prepared for the network, to compare on; by default a few random ones.

    Raises:
        UserError: the network cannot be exported, or the file's answers are not the network's; no file is left.
    """
    check_choices(to, precision)
    path = Path(path)
    folded = network.folded().cpu().float()
    folded.decoder = folded.decoder if to == "safetensors" else None
    stored = rounded(folded, precision)
    real = images is not None
    if images is None:
        images = torch.rand(RANDOM_IMAGES, *network.image_shape, generator=torch.Generator().manual_seed(0))
    tried = images.cpu().float()
    if tuple(tried.shape[1:]) != network.image_shape or not len(tried):
        raise ValueError(f"images must have shape (B, {', '.join(map(str, network.image_shape))})")
    check_replaceable(path)
    if not path.parent.is_dir():
        raise UserError(f"Cannot write to {path.parent}: there is no such folder. Choose another.")
    unchecked = path.with_name(f".{secrets.token_hex(8)}.part{FORMATS[to]}")  # no link can wait there
    try:
        try:
            WRITERS[to](folded, unchecked, precision, metadata(network, precision))
        except OSError as error:
            raise UserError(f"Cannot write to {path.parent}: {error.strerror}. Choose another folder.") from error
        answer = READERS[to](unchecked, folded)
        original, expected = _answers(folded)(tried), _answers(stored)(tried)
        # One image by itself and the rest in one go: the number of images must not matter.
        got = [torch.cat(parts) for parts in zip(*(answer(part) for part in (tried[:1], tried[1:]) if len(part)))]
        off = _difference(got, expected)
        largest = max([1.0, *(float(tensor.abs().max()) for tensor in expected)])
        if not off <= BOUND * largest:  # or not a number
            raise UserError(
                f"The exported network differs from the original by {off:.2g} on {len(tried)} images, more than the "
                f"{BOUND * largest:.2g} that rounding explains. Nothing was written."
            )
        os.replace(unchecked, path)
    finally:
        unchecked.unlink(missing_ok=True)
    return ExportReport(
        path=path,
        to=to,
        precision=precision,
        bytes=path.stat().st_size,
        images=len(tried),
        real_images=real,
        largest_difference=_difference(got, original),
        rounding_difference=off,
    )


def export_path(folder: Path, to: str, precision: str) -> Path:
    """Where the network of a run folder is exported to if nothing else is asked for.

    >>> export_path(Path("run"), "onnx", "int8").as_posix()
    'run/export/model-int8.onnx'
    """
    return folder / "export" / f"model{'' if precision == 'float32' else f'-{precision}'}{FORMATS[to]}"


def rounded(network: Network, precision: str) -> Network:
    """A folded copy of a network whose weights are what a file of this precision stores: its answers are the file's."""
    folded = network.folded()
    if precision == "float32":
        return folded
    state = unpack(pack(folded.state_dict(), precision))
    return folded.copy_with(state).folded()  # again, for the speed


def metadata(network: Network, precision: str = "float32") -> dict[str, str]:
    """What somebody needs to know to feed an exported network and to read its answers, as texts.

    Lists and numbers are JSON. ``source_shape`` and ``fit`` say how an image file is brought to size before its centre
    of ``image_shape`` is cut out.
    """
    description = network.description()
    task = description.pop("task")
    facts = {
        **task,
        "source_shape": task["source_shape"] or task["image_shape"],
        "input_range": [0, 1],
        "normalised_inside": True,
        "precision": precision,
        **description,
    }
    texts = {name: json.dumps(value) for name, value in facts.items()}
    return texts | {"torchcaps_version": torchcaps.__version__}


class _Deployed(nn.Module):
    """Images to lengths and poses, from weights as they are stored.

    The network is no submodule: its weights are held here, packed, and handed to it in every pass.
    """

    def __init__(self, network: Network, precision: str) -> None:
        super().__init__()
        self._network = [network]
        packed = pack(network.state_dict(), precision)
        self._keys = {name: name.replace(".", "__") for name in packed}
        for name, key in self._keys.items():
            self.register_buffer(key, packed[name].contiguous())

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        state = unpack({name: getattr(self, key) for name, key in self._keys.items()})
        capsules = torch.func.functional_call(self._network[0], state, (image,)).capsules
        return capsules.activations, capsules.poses


def _program(network: Network, precision: str) -> torch.export.ExportedProgram:
    """The network as torch.export sees it, for any number of images."""
    example = torch.zeros(3, *network.image_shape)
    batch = torch.export.Dim("batch", min=1)
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(
                _Deployed(network, precision).eval(), (example,), dynamic_shapes={"image": {0: batch}}
            )
    except Exception as error:  # whatever a routing of the user's own does that cannot be traced
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise UserError(f"This network cannot be exported: {reason}") from error


def _write_onnx(network: Network, path: Path, precision: str, facts: dict[str, str]) -> None:
    if sum(tensor.numel() for tensor in network.state_dict().values()) * 4 > LARGEST_ONNX:
        raise UserError("This network is too large for one ONNX file of 2 GB: export it to pt2 or safetensors.")
    program = _program(network, precision)
    with _quiet():
        made = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[INPUT],
            output_names=list(OUTPUTS),
            dynamic_shapes={INPUT: {0: "batch"}},  # the name; the program knows the rest
            verbose=False,
        )
        assert made is not None
        made.model.metadata_props.update(facts)
        made.model.producer_name, made.model.producer_version = "torchcaps", torchcaps.__version__
        made.save(path, external_data=False)


def _write_pt2(network: Network, path: Path, precision: str, facts: dict[str, str]) -> None:
    program = _program(network, precision)
    with _quiet():
        torch.export.save(program, path, extra_files={METADATA: json.dumps(facts)})


def _write_safetensors(network: Network, path: Path, precision: str, facts: dict[str, str]) -> None:
    network.save(path, precision=precision)  # its description has the facts already


WRITERS: dict[str, Callable[[Network, Path, str, dict[str, str]], None]] = {
    "onnx": _write_onnx,
    "pt2": _write_pt2,
    "safetensors": _write_safetensors,
}


def _read_onnx(path: Path, network: Network) -> Answers:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def answer(images: Tensor) -> tuple[Tensor, Tensor]:
        lengths, poses = session.run(list(OUTPUTS), {INPUT: images.numpy()})
        return torch.from_numpy(lengths), torch.from_numpy(poses)

    return answer


def _read_pt2(path: Path, network: Network) -> Answers:
    with _quiet():
        module = torch.export.load(path).module()

    def answer(images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            lengths, poses = module(images)
        return lengths, poses

    return answer


def _read_safetensors(path: Path, network: Network) -> Answers:
    own = {type(module) for module in network.modules() if isinstance(module, Routing)} - set(ROUTINGS.values())
    front = getattr(network, "front", None)
    stem = copy.deepcopy(front.stem) if isinstance(front, StemCapsules) else None
    return _answers(load(path, routing=next(iter(own), None), backbone=stem).folded())


READERS: dict[str, Callable[[Path, Network], Answers]] = {
    "onnx": _read_onnx,
    "pt2": _read_pt2,
    "safetensors": _read_safetensors,
}


def check_choices(to: str, precision: str) -> None:
    """Raise :class:`UserError` for a format or precision that there is not, or that needs what is not installed."""
    if to not in FORMATS:
        raise UserError(f"There is no format {to!a}: choose one of {', '.join(FORMATS)}.")
    check_precision(precision)
    if to != "onnx":
        return
    try:
        for name in NEEDED:
            importlib.import_module(name)
    except ImportError as error:
        raise UserError("Export to ONNX needs more packages: pip install 'torchcaps[export]'.") from error


def _answers(network: Network) -> Answers:
    @torch.no_grad()
    def answer(images: Tensor) -> tuple[Tensor, Tensor]:
        capsules = network(images).capsules
        return capsules.activations, capsules.poses

    return answer


def _difference(given: Any, expected: Any) -> float:
    """The largest between pairs of tensors; NaN if there is one anywhere."""
    return float(torch.stack([(first - second).abs().max() for first, second in zip(given, expected)]).max())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings and notes of torch's exporters, which are about their own insides."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
