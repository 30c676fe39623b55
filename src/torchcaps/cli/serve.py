"""``torchcaps serve``"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import socket
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps.cli.shared import add_computing, add_data_folder, open_run, pretrained_folder, whole
from torchcaps.errors import UserError

if TYPE_CHECKING:
    from torchcaps.serve.gallery import Gallery
    from torchcaps.serve.model import ServedModel

NEEDED = ("fastapi", "uvicorn")
"""What the extra [serve] brings."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="the folder of a finished run, or two to compare [one that comes along]",
    )
    parser.add_argument("--static", type=Path, metavar="DIR", help="write the page with the model inside, and stop")
    parser.add_argument(
        "--bits", type=int, choices=(16, 8), default=16, help="of a weight in the page that --static writes [16]"
    )
    parser.add_argument(
        "--host", type=_host, default="127.0.0.1", help="where to listen [127.0.0.1: this machine only]"
    )
    parser.add_argument("--port", type=whole(0, 65535), default=8642, help="[8642]; 0 for any that is free")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another host name by which the page may be asked for; can be given several times",
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open the page")
    add_computing(parser)
    add_data_folder(parser)


def run(arguments: argparse.Namespace) -> None:
    if any(importlib.util.find_spec(module) is None for module in NEEDED):
        raise UserError("The page needs more packages: pip install 'torchcaps[serve]'.")
    if len(arguments.runs) > 2:
        raise UserError("Give one run, or two to compare them.")
    models, gallery, no_samples = _opened(arguments)
    if arguments.static is not None:
        from torchcaps.serve.static_page import write_static

        size = write_static(arguments.static, models, gallery=gallery, no_samples=no_samples, bits=arguments.bits)
        print(f"Wrote {size / 1e6:.1f} MB. Open {arguments.static / 'index.html'}")
        return
    _serve(arguments, models, gallery, no_samples)


def _opened(arguments: argparse.Namespace) -> tuple[list[ServedModel], Gallery | None, str]:
    """The networks, their test images, and why there are none if there are none."""
    from torchcaps.serve.gallery import Gallery
    from torchcaps.serve.model import ServedModel

    runs = [open_run(path, arguments) for path in arguments.runs or [pretrained_folder("mnist")]]
    models = [ServedModel.of_run(trained) for trained in runs]
    try:
        return models, Gallery.of_run(runs[0], data_folder=arguments.data_dir), ""
    except UserError as error:
        return models, None, f"There are no test images to pick from: {error}"


def _serve(arguments: argparse.Namespace, models: list[ServedModel], gallery: Gallery | None, no_samples: str) -> None:
    import uvicorn

    from torchcaps.serve.app import make_app
    from torchcaps.serve.connection import Impatient
    from torchcaps.serve.guard import Hosts

    hosts = Hosts.listening_on(arguments.host, arguments.allow_host)
    app = make_app(models, gallery=gallery, no_samples=no_samples, hosts=hosts)
    listening = listening_on(arguments.host, arguments.port)
    name = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    shown = "localhost" if arguments.host in ("0.0.0.0", "::") else name
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    print(f"The page is at {address}  (stop with Ctrl-C)", flush=True)
    if hosts.any_address:
        print("Everybody who can reach this machine can use it.", flush=True)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        http=Impatient,
        limit_concurrency=128,
        timeout_graceful_shutdown=2,
    )
    if not arguments.no_browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    with contextlib.suppress(KeyboardInterrupt), listening:
        uvicorn.Server(config).run([listening])


def listening_on(host: str, port: int) -> socket.socket:
    """A socket that listens on this address and port; 0 for any port that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends answers at once; otherwise each waits 40 ms for an acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise UserError(
            f"Cannot listen on {host}, port {port}: {error.strerror}. Choose another with --port or --host."
        ) from None
    return listening


def _host(text: str) -> str:
    try:
        if text and text.encode("idna"):
            return text
    except UnicodeError:  # a part of it is too long, or empty
        pass
    raise argparse.ArgumentTypeError(f"must be an address or a host name, not {text[:60]!a}")
