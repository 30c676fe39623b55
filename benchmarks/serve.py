"""How long the page takes to answer a drawn stroke: the network in the box and the paper's whole MNIST network.

A stroke is one changed image: lengths, poses, reconstruction and contribution map come back, and in the browser are
shown. On a busy machine the least is the one to look at. Prints milliseconds and writes ``results/serve.csv``. Run:
``python benchmarks/serve.py [--threads N] [--strokes N]``. The browser is left out where there is none.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import torch
import uvicorn

import torchcaps
from torchcaps.cli.serve import listening_on
from torchcaps.data.datasets import load
from torchcaps.lab.results import table
from torchcaps.serve.app import make_app
from torchcaps.serve.guard import Limits
from torchcaps.serve.model import ServedModel
from torchcaps.serve.static_page import write_static
from torchcaps.training.host import cpu_name

RESULTS = Path(__file__).parent / "results"
WARM_UP = 5
IN_THE_PAGE = """async ([images, strokes]) => {
    const times = [];
    for (let stroke = 0; stroke < strokes; stroke++) {
        const bytes = Uint8Array.from(images[stroke % images.length]);
        const before = Number(document.body.dataset.answers);
        const started = performance.now();
        window.page.pad.load(bytes);
        while (Number(document.body.dataset.answers) === before) await new Promise((done) => setTimeout(done));
        times.push(performance.now() - started);
        while (document.getElementById("panels").getAttribute("aria-busy") === "true") {
            await new Promise((done) => setTimeout(done, 5));
        }
    }
    return times;
}"""


def images() -> np.ndarray:
    return load("digits").test.fetch(torch.arange(32)).images.numpy()


def through_the_server(address: str, strokes: int) -> Iterator[float]:
    texts = [base64.b64encode(image.tobytes()).decode() for image in images()]
    with httpx.Client(base_url=address, timeout=60) as client:
        for stroke in range(strokes):
            started = time.perf_counter()
            client.post("/api/analyse", json={"image": texts[stroke % len(texts)]}).raise_for_status()
            yield 1000 * (time.perf_counter() - started)


def in_the_browser(address: str, strokes: int) -> list[float]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector("body[data-ready][data-answers]", timeout=120_000)
        times: list[float] = page.evaluate(IN_THE_PAGE, [images().reshape(32, -1).tolist(), strokes])
        browser.close()
    return times


def served(model: ServedModel) -> str:
    listening = listening_on("127.0.0.1", 0)
    app = make_app([model], limits=Limits(per_second=1e6, burst=10**6))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
    threading.Thread(target=server.run, args=([listening],), daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def measured(model: ServedModel, strokes: int) -> Iterator[tuple[str, list[float]]]:
    """The ways to an answer, each with the milliseconds of its strokes."""
    address = served(model)
    yield "server", list(through_the_server(address, strokes))
    if not shutil.which("chromium"):
        return
    yield "browser and server", in_the_browser(address, strokes)
    with tempfile.TemporaryDirectory() as folder:
        write_static(Path(folder) / "page", [model], gallery=None, no_samples="no test images here")
        yield "static page", in_the_browser(f"file://{folder}/page/index.html", strokes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--strokes", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    networks = {"in the box": torchcaps.pretrained("mnist"), "whole": torchcaps.create_model("capsnet-mnist")}
    rows = [
        [name, way, given.threads, given.strokes, *np.percentile(times[WARM_UP:], [0, 50, 95]).round(1)]
        for name, network in networks.items()
        for way, times in measured(ServedModel("mnist", network), given.strokes + WARM_UP)
    ]
    RESULTS.mkdir(exist_ok=True)
    names = ["network", "way", "threads", "strokes", "least_ms", "median_ms", "p95_ms", "processor"]
    (RESULTS / "serve.csv").write_bytes(table(names, [[*row, cpu_name()] for row in rows]))
    for name, way, _, _, least, median, slow in rows:
        print(f"{name:10} {way:20} median {median:.1f} ms, least {least:.1f}, 95 % within {slow:.1f}")
    print(f"{given.strokes} strokes, {given.threads} threads, {cpu_name()}")


if __name__ == "__main__":
    main()
