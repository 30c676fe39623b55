"""The page in a real browser: nothing leaves this machine, and the console stays silent."""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from torchcaps import CapsuleNetwork, DynamicRouting, EMRouting, L1Routing, L2Routing
from torchcaps.data import ImageSplit
from torchcaps.serve.gallery import Gallery
from torchcaps.serve.guard import Limits
from torchcaps.serve.model import ServedModel
from torchcaps.serve.static_page import write_static

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
ARGUMENTS += ["--disable-sync", "--no-first-run"]
PATIENCE = 1000 * int(os.environ.get("TORCHCAPS_BROWSER_SECONDS", "60"))
SEVEN = [(0.3, 0.25), (0.7, 0.25), (0.55, 0.5), (0.45, 0.8)]
BOTH_PAGES = pytest.mark.parametrize("kind", ["server", "static"])
RELAXED = Limits(per_second=1e6, burst=10**6)


@pytest.fixture(scope="module")
def browser() -> Iterator[api.Browser]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: api.Browser) -> Iterator[Callable[..., api.Page]]:
    """Opens a page; at the end of the test nothing may have gone to another machine or to the console."""
    complaints: list[str] = []
    contexts: list[api.BrowserContext] = []

    def judge(route: api.Route) -> None:
        address = urlsplit(route.request.url)
        if address.scheme in ("file", "blob", "data") or address.hostname in ("127.0.0.1", "localhost"):
            route.continue_()
        else:
            complaints.append(f"a request to {route.request.url}")
            route.abort()

    def opened(address: str, **settings: object) -> api.Page:
        context = browser.new_context(**settings)
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        context.route("**/*", judge)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        page.wait_for_selector("body[data-ready][data-answers]")
        return page

    opened.complaints = complaints
    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def addresses(
    served: Callable[..., str], model: ServedModel, gallery: Gallery, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("static") / "page"
    write_static(folder, [model], gallery=gallery, no_samples="")
    return {"server": served([model], gallery=gallery, limits=RELAXED), "static": f"file://{folder}/index.html"}


def settled(page: api.Page) -> None:
    """Wait until the page has answered for what it shows."""
    page.wait_for_selector("#panels[aria-busy=false]")


def draw(page: api.Page, places: list[tuple[float, float]]) -> None:
    box = page.locator("#pad").bounding_box()
    points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in places]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=5)
    page.mouse.up()
    settled(page)


def lengths(page: api.Page) -> list[str]:
    return page.locator(".panel").first.locator(".bar .value").all_inner_texts()


def picture(page: api.Page, selector: str) -> str:
    return page.locator(selector).first.evaluate("canvas => canvas.toDataURL()")


def png(image: torch.Tensor) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image.numpy()).save(file, "PNG")
    return file.getvalue()


@BOTH_PAGES
def test_draw_a_digit_choose_a_class_and_move_a_slider(kind, addresses, open_page):
    page = open_page(addresses[kind])
    settled(page)
    assert page.locator("#sample-note").inner_text().startswith("A test image. It shows ")  # something to see at once
    page.get_by_role("button", name="Clear").click()
    settled(page)
    assert page.locator(".verdict").inner_text().startswith("The image is empty")
    assert set(lengths(page)) == {"0.00"}
    draw(page, SEVEN)
    assert page.locator(".verdict").inner_text() == "It sees 7."
    assert page.locator("#sample-note").inner_text() == ""
    assert page.locator(".redrawn figure").count() == 2

    page.locator(".bar").nth(4).click()
    settled(page)
    assert page.locator(".bar").nth(4).get_attribute("aria-pressed") == "true"
    assert page.locator(".map-part .chosen").inner_text() == "“4”"
    drawn = picture(page, ".decoded")
    slider = page.locator(".slider input").nth(6)
    slider.focus()
    for _ in range(8):
        page.keyboard.press("PageUp")
    settled(page)
    assert picture(page, ".decoded") != drawn
    assert page.locator(".swept").inner_text() == "7"
    assert page.locator(".sweep > .strip .frame").count() == 11
    page.get_by_role("button", name="Reset").click()
    settled(page)
    assert picture(page, ".decoded") == drawn

    page.locator(".sweep > .strip .frame").last.click()
    settled(page)
    assert picture(page, ".decoded") != drawn
    page.get_by_text("All components, swept").click()
    page.wait_for_function("() => document.querySelectorAll('.strips .frame').length === 16 * 11")
    page.get_by_role("button", name="Back to the surest class").click()
    settled(page)
    assert page.get_by_role("button", name="Back to the surest class").is_hidden()


@BOTH_PAGES
def test_move_turn_thicken_erase_and_take_it_all_back(kind, addresses, open_page):
    page = open_page(addresses[kind])
    draw(page, SEVEN)
    seen = [picture(page, "#pad")]

    def changed(way: str) -> None:
        settled(page)
        seen.append(picture(page, "#pad"))
        assert seen[-1] != seen[-2], way

    page.locator("#turn").fill("20")
    changed("turned")
    page.locator("#thickness").fill("2")
    changed("thickened")
    page.locator("#thickness").fill("-1")
    changed("thinned")
    page.get_by_role("button", name="Move").click()
    draw(page, [(0.5, 0.5), (0.6, 0.6)])
    changed("moved")
    page.get_by_role("button", name="Erase").click()
    draw(page, [(0.3, 0.3), (0.8, 0.4)])
    changed("erased")
    page.get_by_role("button", name="Undo").click()
    settled(page)
    assert picture(page, "#pad") == seen[-2]
    page.get_by_role("button", name="Invert").click()
    changed("inverted")
    page.get_by_role("button", name="Clear").click()
    settled(page)
    assert page.locator(".verdict").inner_text().startswith("The image is empty")


@BOTH_PAGES
def test_a_picture_that_is_dark_on_bright_is_inverted(kind, addresses, open_page, gallery):
    page = open_page(addresses[kind])
    pixels = gallery.some(1)[0].pixels
    page.locator("#file").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": png(255 - pixels[0])})
    page.wait_for_function("() => document.getElementById('sample-note').textContent.includes('it was inverted')")
    assert page.evaluate("() => Array.from(window.page.pad.pixels())") == pixels.flatten().tolist()


@BOTH_PAGES
def test_upload_an_image_and_a_file_that_is_none(kind, addresses, open_page, gallery):
    page = open_page(addresses[kind])
    sample = gallery.some(1)[0]
    upload = page.locator("#file")
    upload.set_input_files({"name": "digit.png", "mimeType": "image/png", "buffer": png(sample.pixels[0])})
    page.wait_for_function("() => document.getElementById('sample-note').textContent.startsWith('Your picture')")
    settled(page)
    before = lengths(page)
    shown = page.evaluate("() => Array.from(window.page.pad.pixels())")
    assert shown == sample.pixels.flatten().tolist()
    upload.set_input_files({"name": "digit.png", "mimeType": "image/png", "buffer": b"no image at all"})
    page.wait_for_selector("#problem:not([hidden])")
    assert "not an image" in page.locator("#problem").inner_text()
    assert lengths(page) == before
    if kind == "server":  # the browser itself reports an answer of 400
        assert [text for text in open_page.complaints if "400" in text]
        open_page.complaints.clear()


@BOTH_PAGES
def test_paste_an_image(kind, addresses, open_page, gallery):
    page = open_page(addresses[kind])
    data = base64.b64encode(png(gallery.some(1)[0].pixels[0])).decode()
    page.evaluate(
        """data => {
            const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], "pasted.png", { type: "image/png" }));
            document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true }));
        }""",
        data,
    )
    page.wait_for_function("() => document.getElementById('sample-note').textContent.startsWith('Your picture')")
    settled(page)
    assert page.locator(".verdict").inner_text() != "The image is empty."


@BOTH_PAGES
def test_pick_test_images(kind, addresses, open_page, model, gallery):
    page = open_page(addresses[kind])
    page.get_by_role("button", name="Test image", exact=True).click()
    page.wait_for_function("() => document.getElementById('sample-note').textContent.startsWith('A test image')")
    settled(page)
    page.get_by_text("Choose from test images").click()
    page.wait_for_function("() => document.querySelectorAll('.album .frame').length === 24")
    page.locator(".album .frame").first.click()
    settled(page)
    if gallery.wrong(1, model):
        page.get_by_role("button", name="Clear").click()
        settled(page)
        before = picture(page, "#pad")
        page.get_by_role("button", name="One it gets wrong").click()
        page.wait_for_function("before => document.getElementById('pad').toDataURL() !== before", arg=before)
        settled(page)
        truth = page.locator("#sample-note").inner_text().split()[-1]
        verdict = page.locator(".verdict").inner_text()
        assert verdict.endswith(f" The test image shows {truth}")
        assert not verdict.startswith(f"It sees {truth}")


def test_everything_works_with_the_keyboard_alone(addresses, open_page):
    page = open_page(addresses["server"])
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.className") == "skip"
    while page.evaluate("() => document.activeElement.id") != "pad":
        page.keyboard.press("Tab")
    page.keyboard.press(" ")
    for _ in range(8):
        page.keyboard.press("ArrowDown")
    page.keyboard.press(" ")
    page.keyboard.press("ArrowRight")
    settled(page)
    assert page.locator(".verdict").inner_text() != "The image is empty."
    inked = page.evaluate("() => Array.from(window.page.pad.pixels()).filter(value => value > 128).length")
    assert 8 <= inked <= 40
    page.wait_for_function("() => document.getElementById('spoken').textContent.startsWith('It ')")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.id || document.activeElement.className"))
    assert {"undo", "turn", "file", "bar", "reset"} <= reached


def test_names_are_text_whatever_they_say(served, open_page, tmp_path):
    evil = '<img src=x onerror="document.title=1">'
    network = CapsuleNetwork(
        (1, 20, 20), [evil, "</script><script>alert(1)</script>"], conv_channels=4, primary_capsules=2
    )
    model = ServedModel(evil, network)
    write_static(tmp_path / "page", [model], gallery=None, no_samples=evil)
    for address in (served([model], no_samples=evil, limits=RELAXED), f"file://{tmp_path}/page/index.html"):
        page = open_page(address)
        assert page.locator(".name").inner_text() == evil
        assert page.locator(".class-name").first.inner_text() == evil
        assert page.locator("img[src=x]").count() == 0
        assert page.get_by_role("button", name="Test image", exact=True).is_disabled()


def test_two_runs_side_by_side_one_of_them_without_a_decoder(served, open_page, model, dynamic_model, gallery):
    page = open_page(
        served([model, dynamic_model], gallery=gallery, limits=RELAXED), viewport={"width": 1500, "height": 900}
    )
    draw(page, SEVEN)
    panels = page.locator(".panel")
    assert panels.count() == 2
    assert panels.nth(0).locator(".no-decoder").is_hidden()
    assert "without a decoder" in panels.nth(1).locator(".no-decoder").inner_text()
    assert panels.nth(1).locator(".slider input").first.is_disabled()
    first, second = (panels.nth(number).bounding_box() for number in range(2))
    assert first["y"] == second["y"]
    assert page.locator("#charts path.run-1").count() >= 1
    panels.nth(1).locator(".bar").nth(3).click()
    settled(page)
    assert page.locator('.bar[data-label="3"][aria-pressed="true"]').count() == 2


def test_both_overlapping_digits_are_drawn(served, open_page):
    network = CapsuleNetwork((1, 36, 36), 10, conv_channels=4, primary_capsules=2, labels_per_image=2)
    page = open_page(served([ServedModel("overlapping", network)], limits=RELAXED))
    draw(page, SEVEN)
    assert page.locator(".redrawn figure").count() == 3
    assert " and " in page.locator(".verdict").inner_text()


def test_colour_pictures_are_uploaded_instead_of_drawn(served, open_page):
    network = CapsuleNetwork((3, 32, 32), ["cat", "dog"], conv_channels=4, primary_capsules=2, mean=(0.5,), std=(0.5,))
    page = open_page(served([ServedModel("pets", network)], limits=RELAXED))
    assert page.get_by_role("button", name="Draw").is_hidden()
    file = io.BytesIO()
    Image.effect_noise((90, 60), 80).convert("RGB").save(file, "JPEG")
    page.locator("#file").set_input_files({"name": "cat.jpg", "mimeType": "image/jpeg", "buffer": file.getvalue()})
    page.wait_for_function("() => document.getElementById('sample-note').textContent.startsWith('Your picture')")
    before = picture(page, "#pad")
    page.get_by_role("button", name="Cover").click()
    draw(page, [(0.2, 0.2), (0.8, 0.8)])
    assert picture(page, "#pad") != before


def test_the_pen_is_dark_where_test_images_are_dark_on_bright(served, open_page):
    images = torch.full((30, 1, 20, 20), 255, dtype=torch.uint8)
    images[:, :, 8:12, 5:15] = 10
    network = CapsuleNetwork((1, 20, 20), ["dash", "dot"], conv_channels=4, primary_capsules=2)
    gallery = Gallery(ImageSplit(images, torch.arange(30) % 2), (1, 20, 20))
    page = open_page(served([ServedModel("ink", network)], gallery=gallery, limits=RELAXED))
    draw(page, SEVEN)
    bright = page.locator("#pad").evaluate(
        """canvas => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return data.filter((value, place) => place % 4 === 0 && value > 127).length / (data.length / 4);
        }"""
    )
    assert 0.6 < bright < 0.99
    assert "empty" not in page.locator(".verdict").inner_text()
    page.get_by_role("button", name="Clear").click()
    settled(page)
    assert "empty" in page.locator(".verdict").inner_text()


def test_large_images_and_lengths_that_are_no_squash(served, open_page):
    network = CapsuleNetwork(
        (1, 256, 256), ["a", "b"], EMRouting(), stem="small", conv_channels=8, primary_capsules=2, reconstruction=False
    )
    page = open_page(served([ServedModel("large", network)], limits=RELAXED))
    draw(page, SEVEN)
    told = page.locator(".sum").inner_text()
    assert "=" in told
    assert "the bar's" not in told


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_can_show_it_without_scrolling_sideways(scheme, addresses, open_page):
    page = open_page(addresses["server"], viewport={"width": 360, "height": 740}, has_touch=True, color_scheme=scheme)
    page.get_by_text("Choose from test images").click()
    page.get_by_text("All components, swept").click()
    page.locator("#pad").tap()
    settled(page)
    assert page.locator("#glance").is_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    assert page.evaluate("() => document.documentElement.dataset.theme") == scheme
    page.locator("#theme").click()
    assert page.evaluate("() => document.documentElement.dataset.theme") != scheme


NETWORKS = {
    "dynamic": {"routing": DynamicRouting},
    "colour": {"image_shape": (3, 24, 26), "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4), "negative_slope": 0.2},
    "two layers": {"layers": ((5, 4),)},
    "kept": {"kept_capsules": tuple(range(0, 40, 3)), "routing": L1Routing},
    "no decoder": {"reconstruction": False},
}


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("settings", NETWORKS.values(), ids=NETWORKS.keys())
def test_javascript_agrees_with_python(settings, bits, open_page, tmp_path):
    shape = settings.get("image_shape", (1, 28, 28))
    routing = settings.get("routing", L2Routing)()
    rest = {name: value for name, value in settings.items() if name not in ("image_shape", "routing")}
    network = CapsuleNetwork(
        shape, ["a", "b", "c"], routing, conv_channels=6, primary_capsules=2, weight_std=0.2, **rest
    )
    model = ServedModel("x", network)
    write_static(tmp_path / "page", [model], gallery=None, no_samples="none", bits=bits)
    page = open_page(f"file://{tmp_path}/page/index.html")
    image = torch.randint(0, 256, shape, dtype=torch.uint8)
    [answer] = page.evaluate(
        """async bytes => {
            const answers = await window.page.backend.analyse(Uint8Array.from(bytes), 1);
            const plain = answer => ({
                ...answer,
                reconstructions: answer.reconstructions.map(each => ({ ...each, image: [...each.image] })),
                map: answer.map && {
                    ...answer.map, adds_map: [...answer.map.adds_map], takes_map: [...answer.map.takes_map]
                },
            });
            return answers.map(plain);
        }""",
        image.flatten().tolist(),
    )
    expected = model.analyse(image, 1)
    close = {"rtol": 0, "atol": 2e-3 if bits == 16 else 5e-2}
    assert_close(torch.tensor(answer["lengths"]), expected.lengths, **close)
    assert_close(torch.tensor(answer["poses"]), expected.poses, **close)
    if bits == 16:
        assert answer["found"] == expected.found
    assert [drawing["label"] for drawing in answer["reconstructions"]] == (answer["found"] if model.has_decoder else [])
    for drawing in answer["reconstructions"]:
        drawn = torch.tensor(drawing["image"]) / 255
        pose = torch.tensor(answer["poses"][drawing["label"]])[None]
        assert_close(drawn, model.decode(pose, [drawing["label"]])[0].flatten(), rtol=0, atol=0.01)
    assert (answer["map"] is None) == (expected.contributions is None)
    if expected.contributions is not None:
        contributions = expected.contributions
        scale = 2e-2 if bits == 16 else 2e-1
        assert_close(answer["map"]["adds"], contributions.adds, rtol=scale, atol=scale)
        assert_close(answer["map"]["takes"], contributions.takes, rtol=scale, atol=scale)
        for name in ("adds_map", "takes_map"):
            given, wanted = torch.tensor(answer["map"][name]), getattr(contributions, name).flatten()
            assert_close(given, wanted, rtol=0, atol=scale * float(wanted.abs().max()))
