"""Trained networks as folders in the convention of the Hugging Face hub: extra [hub].

``network.save_pretrained(folder)`` and ``Network.from_pretrained(folder)`` are the short way; for a folder nothing is
sent or fetched. :class:`Pretrained` has what else the hub offers, ``push_to_hub`` first of all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

import torchcaps
from torchcaps.atomic import write_json
from torchcaps.errors import UserError
from torchcaps.models.base import Network
from torchcaps.models.files import MODEL_FILE, load
from torchcaps.models.packing import check_precision
from torchcaps.routing.base import Routing
from torchcaps.trained.card import card, write_card

try:
    from huggingface_hub import ModelHubMixin, hf_hub_download
except ImportError as error:
    raise UserError("The hub's conventions need another package: pip install 'torchcaps[hub]'.") from error

CONFIG = "config.json"
OF_THE_HUB = {"revision", "cache_dir", "token", "force_download", "local_files_only"}
OPTIONS = {"routing", "backbone", "device", *OF_THE_HUB}


class Pretrained(ModelHubMixin, library_name="torchcaps", pipeline_tag="image-classification"):
    """A network with the hub's way of saving and loading.

    Args:
        network: the trained network; ``pretrained.network`` is where it is again.
        precision: of the stored weights: "float32", "float16" or "int8".

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Pretrained(torchcaps.CapsuleNetwork((1, 28, 28), ["cat", "dog"])).save_pretrained(folder)
    ...     Pretrained.from_pretrained(folder).network.classes
    ('cat', 'dog')
    """

    def __init__(self, network: Network, *, precision: str = "float32") -> None:
        check_precision(precision)
        self.network = network
        self._precision = precision

    def _save_pretrained(self, save_directory: Path) -> None:
        self.network.save(save_directory / MODEL_FILE, precision=self._precision)
        settings = {"library": "torchcaps", "version": torchcaps.__version__, **self.network.description()}
        write_json(save_directory / CONFIG, settings)
        write_card(save_directory, card(self.network, files={MODEL_FILE: ""}))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        """The network of a folder, or of a repository on the hub.

        Args:
            pretrained_model_name_or_path: a folder that :meth:`save_pretrained` made, or ``owner/name``.
            options: ``routing`` and ``backbone`` of your own, ``device``, and those of the hub: ``revision``,
                ``cache_dir``, ``token``, ``force_download``, ``local_files_only``.
        """
        place = str(pretrained_model_name_or_path)
        if unknown := options.keys() - OPTIONS:
            raise UserError(f"from_pretrained has no option {', '.join(sorted(unknown))}.")
        try:
            return super().from_pretrained(place, **options)
        except UserError:
            raise
        except Exception as error:  # no such repository, no connection, a description that is none
            reason = (str(error).strip() or type(error).__name__).split("\n")[0][:300]
            raise UserError(f"There is no network to be had from {place!a}: {reason}") from error

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        routing: type[Routing] | None = None,
        backbone: Callable[[], nn.Module] | None = None,
        device: torch.device | str = "cpu",
        **others: Any,  # those of the hub, and what the description of a network says
    ) -> Self:
        file = Path(model_id) / MODEL_FILE
        if not Path(model_id).is_dir():
            asked = {name: value for name, value in others.items() if name in OF_THE_HUB}
            file = Path(hf_hub_download(repo_id=model_id, filename=MODEL_FILE, **asked))
        return cls(load(file, routing=routing, backbone=backbone, device=device))
