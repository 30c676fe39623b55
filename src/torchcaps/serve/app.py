"""The server of the page."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Annotated, Literal, TypeVar

import torch
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from torchcaps.data.images import decode_image
from torchcaps.errors import UserError
from torchcaps.serve import wire
from torchcaps.serve.gallery import Gallery, centre
from torchcaps.serve.guard import Guard, Hosts, Limits
from torchcaps.serve.model import ServedModel, check_side_by_side

T = TypeVar("T")
UPLOAD = "/api/upload"
NO_SAMPLES = "There are no test images here: draw, or give an image of your own."
STATIC = files("torchcaps.serve") / "static"
PAGE: dict[str, str] = {
    "index.html": "text/html",
    "style.css": "text/css",
    "pictures.js": "text/javascript",
    "pad.js": "text/javascript",
    "panel.js": "text/javascript",
    "curves.js": "text/javascript",
    "server.js": "text/javascript",
    "app.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
"""The files of the page. No others are ever sent."""


def make_app(
    models: Sequence[ServedModel],
    *,
    gallery: Gallery | None = None,
    no_samples: str = NO_SAMPLES,
    hosts: Hosts | None = None,
    limits: Limits | None = None,
) -> FastAPI:
    """The page for one network, or for two side by side.

    Args:
        models: the networks.
        gallery: test images to pick from.
        no_samples: why there are none, if there are none.
        hosts: names that the server answers to, by default those of localhost.
        limits: what it accepts.
    """
    check_side_by_side(models)
    network = models[0].network
    limits = limits or Limits(body_bytes=max(1 << 20, 2 * math.prod(network.image_shape)))
    desk = _Desk(limits.waiting)
    info = wire.info_of(list(models), None if gallery else no_samples)
    source_shape = network.task.source_shape or network.image_shape
    page = {name: (STATIC / name).read_bytes() for name in PAGE}
    app = FastAPI(title="torchcaps", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, hosts=hosts or Hosts(), limits=limits, upload_path=UPLOAD)
    _add_error_handlers(app)

    def model_number(number: int) -> ServedModel:
        if number >= len(models):
            raise UserError(f"There is no network number {number}.")
        return models[number]

    def check_label(label: int | None) -> None:
        if label is not None and label >= len(network.classes):
            raise UserError(f"There is no class number {label}.")

    def pose_of(given: wire.DecodeRequest) -> tuple[ServedModel, torch.Tensor]:
        model = model_number(given.model)
        check_label(given.label)
        if len(given.pose) != model.pose_size:
            raise UserError(f"A class capsule has {model.pose_size} components, not {len(given.pose)}.")
        return model, torch.tensor(given.pose, dtype=torch.float32)

    @app.get("/api/info")
    async def get_info() -> wire.Content:
        return info

    @app.get("/api/samples")
    async def get_samples(
        kind: Literal["any", "wrong"] = "any",
        count: Annotated[int, Query(ge=1, le=64)] = 1,
        model: Annotated[int, Query(ge=0)] = 0,
    ) -> wire.Content:
        if gallery is None:
            raise HTTPException(404, no_samples)
        asked = model_number(model)
        samples = await desk.turn(lambda: gallery.some(count) if kind == "any" else gallery.wrong(count, asked))
        if not samples:
            looked_at, more = gallery.looked_at(asked)
            again = " Ask again for more." if more else ""
            raise HTTPException(404, f"Of {looked_at} test images, {asked.name} got none wrong.{again}")
        return {"pictures": [wire.picture_of(sample) for sample in samples]}

    @app.post("/api/analyse")
    async def analyse(given: wire.AnalyseRequest) -> wire.Content:
        check_label(given.label)
        pixels = wire.pixels_of(given.image, network.image_shape)
        answers = await desk.turn(lambda: [wire.answer_of(model.analyse(pixels, given.label)) for model in models])
        return {"answers": answers}  # one for each network

    @app.post("/api/decode")
    async def decode(given: wire.DecodeRequest) -> wire.Content:
        model, pose = pose_of(given)
        image = await desk.turn(lambda: model.decode(pose[None], [given.label])[0])
        return {"image": wire.image_text(image)}

    @app.post("/api/sweep")
    async def sweep(given: wire.SweepRequest) -> wire.Content:
        model, pose = pose_of(given)
        if given.component is not None and given.component >= model.pose_size:
            raise UserError(f"There is no component number {given.component}.")
        strips = await desk.turn(lambda: model.sweep(pose, given.label, given.component))
        return {"strips": [[wire.image_text(image) for image in strip] for strip in strips]}

    @app.post(UPLOAD)
    async def upload(request: Request) -> wire.Content:
        data = await request.body()

        def decoded() -> torch.Tensor:
            pixels = decode_image(data, image_shape=source_shape, fit=network.task.fit, name="The file")
            return centre(pixels, network.image_shape)

        return {"image": wire.as_text((await desk.turn(decoded)).numpy())}

    @app.get("/{name:path}")
    async def get_page(name: str) -> Response:
        name = name or "index.html"
        if name not in page:
            raise HTTPException(404, "There is no such page.")
        return Response(page[name], media_type=PAGE[name])

    return app


class _Desk:
    """One thread that does all the work, one request after the other, so that its cores are not shared."""

    def __init__(self, most_waiting: int) -> None:
        self._worker = ThreadPoolExecutor(1, "network")
        self._most_waiting = most_waiting
        self._waiting = 0

    async def turn(self, work: Callable[[], T]) -> T:
        """Do it when it is its turn."""
        if self._waiting >= self._most_waiting:
            raise HTTPException(503, "The server is busy: try again in a second.")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        finally:
            self._waiting -= 1


def _add_error_handlers(app: FastAPI) -> None:
    """What was wrong with a request is answered with one sentence; mistakes of ours are left to the guard."""

    def sentence(status: int, text: str) -> JSONResponse:
        return JSONResponse({"error": text}, status)

    @app.exception_handler(RequestValidationError)
    async def on_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = error.errors()
        where = ".".join(str(part) for part in problems[0]["loc"][1:3] if isinstance(part, str)) if problems else ""
        what = problems[0]["msg"] if problems else "not what was expected"
        return sentence(422, f"The request was not understood: {where[:40] or 'the body'}: {what[:200]}.")

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        return sentence(error.status_code, str(error.detail))

    @app.exception_handler(UserError)
    async def on_user_error(request: Request, error: UserError) -> JSONResponse:
        return sentence(400, str(error))
