"use strict";
/* Puts the page together: the image on one side, what one or two networks make of it on the other. */

const SPEAK_AFTER = 700; // milliseconds of rest before a screen reader is told the answer
const ALBUM_SIZE = 24;
const DARK_BELOW = 64; // of 255: the mean of an image's edge
const BRIGHT_ABOVE = 191;
const DRAWN = 16; // of 255: how far from the ground a pixel is that counts as drawn
const FEWEST_DRAWN = 4; // pixels; with fewer the image is as good as empty

const byId = (id) => document.getElementById(id);

function showProblem(sentence) {
  byId("problem").textContent = sentence;
  byId("problem").hidden = !sentence;
}

class App {
  constructor(backend, info) {
    this.backend = backend;
    this.info = info;
    this.pinned = null;
    this.truth = null; // names of the classes that a test image shows
    this.darkGround = false; // whether test images are bright on dark
    this.loading = false;
    this.speaking = 0;
    this.pad = new Pad(byId("pad"), byId("pad-cursor"), info.image_shape, () => this.onImage());
    byId("panels").classList.toggle("two", info.models.length > 1);
    document.body.classList.toggle("two-runs", info.models.length > 1);
    this.panels = info.models.map(
      (_, number) =>
        new Panel(byId("panels"), backend, info, number, {
          onChoose: (label) => this.pin(label),
          onProblem: showProblem,
        }),
    );
    this.analyse = latestOnly(() => this.ask());
    byId("where").textContent = backend.where;
    byId("curves").hidden = !showCurves(byId("charts"), info.models);
    this.prepareInput();
    this.listen();
    this.onImage();
  }

  prepareInput() {
    const [channels, height, width] = this.info.image_shape;
    const drawing = channels === 1;
    const paper = `${width} × ${height} pixels`;
    byId("input-hint").textContent = drawing
      ? `Draw with the mouse, a finger or a pen. The network sees ${paper}.`
      : `Upload or paste a picture, or take a test image. The network sees ${paper} in colour.`;
    byId("pad").setAttribute("aria-label", drawing ? "Drawing area" : "The picture");
    document.querySelector('[data-tool="draw"]').hidden = !drawing;
    byId("pad-empty").textContent = drawing ? "Draw here" : "Upload, paste or pick a picture";
    if (!drawing) {
      document.querySelector('[data-tool="cover"]').textContent = "Cover";
      this.useTool("move");
    }
    const none = this.info.no_samples;
    for (const id of ["random", "wrong"]) byId(id).disabled = Boolean(none);
    byId("album").hidden = Boolean(none);
    byId("sample-note").textContent = none || "";
    if (this.info.models.length > 1) byId("wrong").textContent = `One ${this.info.models[0].name} gets wrong`;
  }

  listen() {
    for (const button of document.querySelectorAll("[data-tool]")) {
      button.addEventListener("click", () => this.useTool(button.dataset.tool));
    }
    byId("undo").addEventListener("click", () => this.pad.undo());
    byId("clear").addEventListener("click", () => {
      this.note("");
      this.pad.clear();
    });
    byId("centre").addEventListener("click", () => this.pad.centre());
    byId("invert").addEventListener("click", () => this.pad.invert());
    for (const dial of [byId("turn"), byId("thickness")]) {
      dial.addEventListener("pointerdown", () => this.pad.remember());
      dial.addEventListener("keydown", (event) => {
        if (/^(Arrow|Page|Home|End)/.test(event.key) && !event.repeat) this.pad.remember();
      });
    }
    byId("turn").addEventListener("input", () => this.pad.setAngle(Number(byId("turn").value)));
    byId("thickness").addEventListener("input", () => this.pad.setThickness(Number(byId("thickness").value)));
    byId("file").addEventListener("change", () => {
      const [file] = byId("file").files;
      byId("file").value = "";
      if (file) this.take(file);
    });
    byId("paste").addEventListener("click", () => this.pasteButton());
    byId("random").addEventListener("click", () => this.takeSample("any"));
    byId("wrong").addEventListener("click", () => this.takeSample("wrong"));
    byId("album").addEventListener("toggle", () => {
      if (byId("album").open && !byId("album-pictures").children.length) this.fillAlbum();
    });
    byId("album-more").addEventListener("click", () => this.fillAlbum());
    document.addEventListener("paste", (event) => this.takeFrom(event.clipboardData, event));
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => this.takeFrom(event.dataTransfer, event));
    document.addEventListener("keydown", (event) => {
      if ((event.ctrlKey || event.metaKey) && event.key === "z") this.pad.undo();
    });
  }

  useTool(tool) {
    this.pad.tool = tool;
    byId("pad").dataset.tool = tool;
    for (const button of document.querySelectorAll("[data-tool]")) {
      button.setAttribute("aria-pressed", String(button.dataset.tool === tool));
    }
  }

  note(sentence) {
    byId("sample-note").textContent = sentence;
  }

  /** Put another image on the pad; what is known about it holds until it is changed. */
  load(bytes, note, truth = null) {
    this.loading = true;
    this.truth = truth;
    this.pad.load(bytes);
    this.loading = false;
    this.note(note);
  }

  onImage() {
    if (!this.loading && !this.info.no_samples) this.note("");
    if (!this.loading) this.truth = null;
    byId("turn").value = this.pad.angle;
    byId("turn-value").textContent = `${this.pad.angle}°`;
    byId("thickness").value = this.pad.thickness;
    byId("thickness-value").textContent = String(this.pad.thickness);
    byId("undo").disabled = !this.pad.history.length;
    this.analyse();
  }

  pin(label) {
    this.pinned = label;
    this.analyse();
  }

  async ask() {
    const bytes = this.pad.pixels();
    const empty = this.isEmpty(bytes);
    byId("pad-empty").hidden = !empty;
    const pinned = this.pinned;
    try {
      const answers = await this.backend.analyse(bytes, pinned);
      answers.forEach((answer, number) => this.panels[number].show(answer, bytes, pinned, empty, this.truth));
      showProblem("");
      byId("glance").textContent = this.verdict();
      document.body.dataset.answers = Number(document.body.dataset.answers || 0) + 1;
      this.speak();
    } catch (error) {
      showProblem(error.message);
    }
  }

  isEmpty(bytes) {
    if (this.info.image_shape[0] > 1) return bytes.every((value) => value === 0);
    const ground = this.pad.bright ? 255 : 0;
    return bytes.filter((value) => Math.abs(value - ground) > DRAWN).length < FEWEST_DRAWN;
  }

  verdict() {
    const several = this.panels.length > 1;
    return this.panels.map((panel) => (several ? `${panel.model.name}: ${panel.verdict}` : panel.verdict)).join("\n");
  }

  speak() {
    clearTimeout(this.speaking);
    this.speaking = setTimeout(() => {
      byId("spoken").textContent = this.verdict();
    }, SPEAK_AFTER);
  }

  async attempt(work) {
    showProblem("");
    try {
      await work();
    } catch (error) {
      showProblem(error.message);
    }
  }

  take(file) {
    return this.attempt(async () => {
      const bytes = await this.backend.upload(file);
      const turned = this.darkGround && edge(bytes, this.info.image_shape) > 127;
      const inverted = "Your picture. It was dark on bright, so it was inverted; Invert takes that back.";
      this.load(turned ? bytes.map((value) => 255 - value) : bytes, turned ? inverted : "Your picture.");
    });
  }

  takeFrom(transfer, event) {
    const file = transfer && [...transfer.files][0];
    if (!file) return;
    event.preventDefault();
    this.take(file);
  }

  pasteButton() {
    return this.attempt(async () => {
      if (!navigator.clipboard || !navigator.clipboard.read) throw new Error("Press Ctrl+V (or ⌘V) to paste an image.");
      let items;
      try {
        items = await navigator.clipboard.read();
      } catch {
        throw new Error("The browser did not let this page look: press Ctrl+V (or ⌘V) to paste an image.");
      }
      for (const item of items) {
        const type = item.types.find((each) => each.startsWith("image/"));
        if (type) return this.take(await item.getType(type));
      }
      throw new Error("There is no image to paste: copy one first.");
    });
  }

  show(sample) {
    const names = sample.labels.map((label) => this.info.classes[label]);
    this.load(sample.image, `A test image. It shows ${names.length ? inWords(names) : "none of the classes"}.`, names);
  }

  takeSample(kind) {
    return this.attempt(async () => this.show((await this.backend.samples(kind, 1, 0))[0]));
  }

  /** Something to see at once: a test image, which the first stroke of a pen replaces. */
  async open() {
    if (this.info.no_samples) return;
    const samples = await this.backend.samples("any", ALBUM_SIZE, 0);
    const shape = this.info.image_shape;
    const edges = samples.map((sample) => edge(sample.image, shape));
    const mean = edges.reduce((sum, value) => sum + value, 0) / edges.length;
    this.darkGround = shape[0] === 1 && mean < DARK_BELOW;
    this.pad.bright = shape[0] === 1 && mean > BRIGHT_ABOVE;
    this.show(samples[0]);
    this.pad.startAnew = true;
  }

  fillAlbum() {
    return this.attempt(async () => {
      const samples = await this.backend.samples("any", ALBUM_SIZE, 0);
      byId("album-pictures").replaceChildren(
        ...samples.map((sample) => {
          const words = inWords(sample.labels.map((label) => this.info.classes[label]));
          return pictureButton(sample.image, this.info.image_shape, words, () => this.show(sample));
        }),
      );
    });
  }
}

/** The mean brightness of an image's outermost pixels. */
function edge(bytes, [channels, height, width]) {
  const outer = Array.from(bytes).filter((_, place) => {
    const [row, column] = [Math.floor(place / width) % height, place % width];
    return row === 0 || column === 0 || row === height - 1 || column === width - 1;
  });
  return outer.reduce((sum, value) => sum + value, 0) / outer.length;
}

function prepareTheme() {
  const button = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const show = () => {
    const dark = chosen === null ? system.matches : chosen === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-label", `${button.textContent} colours`);
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  show();
}

async function start() {
  prepareTheme();
  try {
    const backend = makeBackend();
    window.page = new App(backend, await backend.info());
    await window.page.open();
    document.body.dataset.ready = "yes";
  } catch (error) {
    showProblem(error.message);
  }
}

start();
