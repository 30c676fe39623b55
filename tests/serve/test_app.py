"""The server, with friends and enemies."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import re
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest
import torch
from PIL import Image

from torchcaps import CapsuleNetwork
from torchcaps.cli.serve import listening_on
from torchcaps.models.config import CapsNetConfig, TaskConfig
from torchcaps.serve import connection
from torchcaps.serve.app import PAGE
from torchcaps.serve.guard import Hosts, Limits, Rate
from torchcaps.serve.model import ServedModel

BLANK = base64.b64encode(bytes(784)).decode()


@pytest.fixture(scope="module")
def client_of(served) -> Iterator[Callable[..., httpx.Client]]:
    """Serves models and returns a client that speaks to them."""
    with contextlib.ExitStack() as clients:
        yield lambda *models, **settings: clients.enter_context(
            httpx.Client(base_url=served(list(models), **settings), timeout=60)
        )


@pytest.fixture(scope="module")
def client(client_of, model, gallery) -> httpx.Client:
    return client_of(model, gallery=gallery, limits=Limits(per_second=1e6, burst=10**6))


def sentence(answer) -> str:
    """What a refusal says: always one sentence in JSON, never a traceback."""
    assert 400 <= answer.status_code < 500
    content = answer.json()
    assert list(content) == ["error"]
    assert "Traceback" not in content["error"]
    return content["error"]


def png(size=(40, 30), mode="L") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, 200 if mode == "L" else (200, 10, 10)).save(file, "PNG")
    return file.getvalue()


def test_the_page_and_its_parts_are_there_and_load_nothing_from_elsewhere(client):
    for name in PAGE:
        text = client.get(f"/{name}").raise_for_status().text
        links = [link for link in re.findall(r"https?://[^\s\"'`]+", text) if "www.w3.org/2000/svg" not in link]
        assert links == []
    page = client.get("/").raise_for_status()
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", page.text)


def test_answers_carry_headers_that_lock_the_page_up(client):
    for answer in (client.get("/"), client.get("/nothing"), client.post("/api/analyse", content=b"x")):
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"


def test_info(client, model):
    info = client.get("/api/info").raise_for_status().json()
    assert info["classes"] == list(map(str, range(10)))
    assert info["image_shape"] == [1, 28, 28]
    [served] = info["models"]
    assert served["name"] == "mnist"
    assert served["has_decoder"]
    assert served["has_maps"]
    assert len(served["curves"]["step"]) == len(served["curves"]["loss"]) > 1
    assert 0 <= served["error_percent"] < 60


def test_analyse_decode_sweep(client, gallery):
    sample = gallery.some(1)[0]
    image = base64.b64encode(sample.pixels.numpy().tobytes()).decode()
    [answer] = client.post("/api/analyse", json={"image": image, "label": 4}).raise_for_status().json()["answers"]
    assert len(answer["lengths"]) == 10
    assert answer["map"]["label"] == 4
    assert len(base64.b64decode(answer["map"]["adds_map"])) == 784 * 4
    label = answer["found"][0]
    asked = {"model": 0, "label": label, "pose": answer["poses"][label]}
    picture = client.post("/api/decode", json=asked).raise_for_status().json()["image"]
    assert picture == answer["reconstructions"][0]["image"]
    strips = client.post("/api/sweep", json={**asked, "component": 3}).raise_for_status().json()["strips"]
    assert [len(strip) for strip in strips] == [11]
    strips = client.post("/api/sweep", json=asked).raise_for_status().json()["strips"]
    assert [len(strip) for strip in strips] == [11] * 16


def test_samples(client):
    pictures = client.get("/api/samples?count=7").raise_for_status().json()["pictures"]
    assert len(pictures) == 7
    assert len(base64.b64decode(pictures[0]["image"])) == 784
    wrong = client.get("/api/samples?kind=wrong")
    assert wrong.status_code == 200 or "none wrong" in sentence(wrong)


def test_without_test_images_the_page_is_told_why(client_of, model):
    client = client_of(model, no_samples="The data are gone.")
    assert client.get("/api/info").json()["no_samples"] == "The data are gone."
    assert sentence(client.get("/api/samples")) == "The data are gone."


def test_two_networks_answer_for_the_same_image(client_of, model, dynamic_model):
    client = client_of(model, dynamic_model)
    answers = client.post("/api/analyse", json={"image": BLANK}).raise_for_status().json()["answers"]
    assert [bool(answer["reconstructions"]) for answer in answers] == [True, False]
    answer = client.post("/api/decode", json={"model": 1, "label": 0, "pose": [0.0] * 16})
    assert "no decoder" in sentence(answer)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_upload(client, mode):
    answer = client.post("/api/upload", content=png(mode=mode)).raise_for_status()
    assert len(base64.b64decode(answer.json()["image"])) == 784


@pytest.mark.parametrize(
    "data",
    [b"", b"no image", b"<svg xmlns='http://www.w3.org/2000/svg'/>", png()[:60], b"%!PS-Adobe", b"\x89PNG\r\n\x1a\n"],
    ids=["nothing", "text", "svg", "cut", "postscript", "header"],
)
def test_files_that_are_no_images_are_refused_in_a_sentence(client, data):
    assert sentence(client.post("/api/upload", content=data)).startswith("The file")


def test_an_image_of_far_too_many_pixels_is_refused(client):
    file = bytearray(png())
    file[16:24] = (60_000).to_bytes(4, "big") * 2  # what its header says
    assert sentence(client.post("/api/upload", content=bytes(file))).startswith("The file")


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
        *(
            "localhost@evil.example",
            "10.0.0.1",
            "[::1",
            "localhost:port",
            "",
            "localhost/x",
            "LOCALHOST.",
            "localhost a",
        ),
    ],
)
def test_other_host_names_are_refused(client, host):
    for path in ("/", "/api/info"):
        assert "host name" in sentence(client.get(path, headers={"host": host}))


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1:8000", "[::1]:8000", "LocalHost:8000"])
def test_own_host_names_are_answered(client, host):
    assert client.get("/api/info", headers={"host": host}).status_code == 200


def test_listening_further_allows_addresses_and_names_that_were_given():
    hosts = Hosts.listening_on("0.0.0.0", ["lab.example"])
    assert all(hosts.allow(host) for host in ("192.168.1.5:8642", "lab.example", "localhost", "[fe80::1]:80"))
    assert not hosts.allow("evil.example")


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1:9", "https://localhost", "file://", "http://127.0.0.1.evil"],
)
def test_requests_of_other_sites_are_refused(client, origin):
    answer = client.post("/api/analyse", json={"image": BLANK}, headers={"origin": origin})
    assert "other web sites" in sentence(answer)


def test_requests_that_a_browser_calls_cross_site_are_refused(client):
    for site in ("cross-site", "same-site"):
        assert "other web sites" in sentence(client.get("/api/info", headers={"sec-fetch-site": site}))
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200  # a link to the page
    own = {"origin": str(client.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}
    assert client.post("/api/analyse", json={"image": BLANK}, headers=own).status_code == 200


POSE = [0.0] * 16
HOSTILE = {
    "nothing": b"",
    "no json": b"{",
    "a list": b"[]",
    "null": b"null",
    "not utf-8": b"\xff\xfe{}",
    "deep": b"[" * 200_000,
    "deep in a field": b'{"image": ' + b'{"a":' * 50_000,
    "unknown field": json.dumps({"image": BLANK, "path": "/etc/passwd"}).encode(),
    "image is a number": b'{"image": 5}',
    "image is no base64": '{"image": "ä!"}'.encode(),
    "image too short": json.dumps({"image": BLANK[:-4]}).encode(),
    "image too long": json.dumps({"image": BLANK + "AAAA"}).encode(),
    "label is true": json.dumps({"image": BLANK, "label": True}).encode(),
    "label is text": json.dumps({"image": BLANK, "label": "3"}).encode(),
    "label negative": json.dumps({"image": BLANK, "label": -1}).encode(),
    "label too large": json.dumps({"image": BLANK, "label": 10}).encode(),
    "label huge": b'{"image": "' + BLANK.encode() + b'", "label": 1' + b"0" * 5000 + b"}",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_images_are_refused_in_a_sentence(client, body):
    sentence(client.post("/api/analyse", content=body, headers={"content-type": "application/json"}))


@pytest.mark.parametrize(
    "change",
    [
        {"model": 1},
        {"model": -1},
        {"label": 10},
        {"pose": POSE[:15]},
        {"pose": [*POSE, 0.0]},
        {"pose": [0.0] * 100_000},
        {"pose": [*POSE[:15], float("nan")]},
        {"pose": [*POSE[:15], float("inf")]},
        {"pose": [*POSE[:15], 1e300]},
        {"pose": [*POSE[:15], None]},
        {"pose": [*POSE[:15], [0.0]]},
        {"pose": {}},
        {"component": 16},
        {"component": -1},
    ],
    ids=str,
)
def test_hostile_poses_are_refused_in_a_sentence(client, change):
    body = json.dumps({"model": 0, "label": 0, "pose": POSE, "component": 0, **change})
    sentence(client.post("/api/sweep", content=body, headers={"content-type": "application/json"}))


@pytest.mark.parametrize("query", ["count=0", "count=1000", "count=x", "kind=all", "model=9", "model=-1", "count=1e9"])
def test_hostile_queries_are_refused_in_a_sentence(client, query):
    sentence(client.get(f"/api/samples?{query}"))


@pytest.mark.parametrize(
    "path",
    [
        *("/../app.py", "/..%2fapp.py", "/%2e%2e/app.py", "/static/app.js", "//etc/passwd", "/index.html/", "/docs"),
        *("/openapi.json", "/engine.js", "/app.js%00", "/..\\app.py", "/api", "/api/"),
    ],
)
def test_nothing_but_the_page_is_sent(client, path):
    sentence(client.get(path))


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused(client, method):
    sentence(client.request(method, "/api/info"))


def test_bodies_that_are_too_large_are_refused(client_of, model):
    client = client_of(model, limits=Limits(body_bytes=3000, upload_bytes=5000))
    assert client.post("/api/analyse", json={"image": BLANK}).status_code == 200
    assert "too large" in sentence(client.post("/api/analyse", content=b" " * 3001))
    assert "too large" in sentence(client.post("/api/upload", content=b" " * 5001))
    assert "too large" in sentence(
        client.post("/api/upload", content=(b" " * 1000 for _ in range(6)))
    )  # no length given
    assert "too large" in sentence(client.request("GET", "/api/info", content=b"x"))


@pytest.mark.parametrize(
    "request_lines",
    [
        "POST /api/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999",
        "POST /api/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1",
        "GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost",
        "GET / HTTP/1.1\r\nAccept: */*",
        "GET / HTTP/1.0",
        "GET http://evil.example/ HTTP/1.1\r\nHost: evil.example",
        "NONSENSE",
    ],
)
def test_requests_that_no_browser_sends_are_refused(client, request_lines):
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=30) as connection:
        connection.sendall(f"{request_lines}\r\n\r\n".encode())
        assert re.match(rb"HTTP/1\.1 4\d\d ", connection.recv(4096))


def test_too_many_requests_are_refused(client_of, model):
    client = client_of(model, limits=Limits(per_second=0.001, burst=3))
    assert [client.get("/api/info").status_code for _ in range(5)] == [200, 200, 200, 429, 429]
    assert "wait" in sentence(client.get("/"))


def test_a_rate_is_each_client_s_own_and_comes_back_with_time():
    now = 0.0
    rate = Rate(per_second=2, burst=2, clock=lambda: now)
    assert [rate.admit("a") for _ in range(3)] == [True, True, False]
    assert rate.admit("b")
    now = 0.5
    assert [rate.admit("a") for _ in range(2)] == [True, False]
    for client in range(5000):
        rate.admit(str(client))
    assert len(rate._buckets) <= 1024


def test_mistakes_of_ours_are_told_without_details(client_of, model, monkeypatch):
    def fail(*given: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(model, "analyse", fail)
    client = client_of(model)
    answer = client.post("/api/analyse", json={"image": BLANK})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "default-src" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("first", [b"", b"GET /api/info HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.parametrize("then", [b"", b"G"])
def test_a_connection_that_says_nothing_more_is_closed(first, then, client, monkeypatch):
    monkeypatch.setattr(connection, "PATIENCE", 0.5)
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=30) as talk:
        if first:
            talk.sendall(first)
            assert talk.recv(2**16).startswith(b"HTTP/1.1 200")
        if then:
            talk.sendall(then)
        while talk.recv(2**16):  # the rest of the answer, then the end
            pass


def test_a_connection_is_used_again(client):
    request = b"GET /api/info HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=30) as talk:
        for _ in range(3):
            talk.sendall(request)
            answer = http.client.HTTPResponse(talk)
            answer.begin()
            assert json.loads(answer.read())["models"]


def test_a_network_of_standardised_images_is_served(client_of):
    task = TaskConfig(image_shape=(1, 20, 20), classes=("a", "b"), standardise=True)
    network = CapsuleNetwork.from_config(CapsNetConfig(conv_channels=4, primary_capsules=2), task)
    model = ServedModel("standardised", network)
    pixels = torch.randint(256, (1, 20, 20), dtype=torch.uint8)
    expected = network.predict(network.prepare(pixels)).lengths[0]
    torch.testing.assert_close(model.analyse(pixels).lengths, expected, rtol=1e-4, atol=1e-5)


def test_answers_do_not_wait_for_acknowledgements():
    with listening_on("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP  # what asyncio looks at before it sets TCP_NODELAY
