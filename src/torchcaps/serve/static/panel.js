"use strict";
/* What one network makes of the image. */

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function pictureButton(bytes, shape, words, onClick) {
  const button = element("button", "frame");
  button.type = "button";
  button.setAttribute("aria-label", words);
  const canvas = element("canvas");
  paint(canvas, bytes, shape);
  button.append(canvas);
  button.addEventListener("click", onClick);
  return button;
}

const inWords = (names) => (names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}`);

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

const STRIP_PAUSE = 120; // milliseconds between strips, so that strokes come first
const UNSURE_BELOW = 0.5; // length of a capsule
const HESITATES_WITHIN = 0.15; // of the second longest

/** Two decimals, and no minus before a zero. */
const short = (value) => (Math.abs(value) < 0.005 ? 0 : value).toFixed(2);

class Panel {
  /** number is the model's; onChoose(label or null) is called when a class is chosen, null for the surest. */
  constructor(place, backend, info, number, { onChoose, onProblem }) {
    this.backend = backend;
    this.info = info;
    this.number = number;
    this.model = info.models[number];
    this.onChoose = onChoose;
    this.pose = null; // of the chosen class, as the sliders have it
    this.label = null;
    this.component = 0;
    this.root = document.getElementById("panel-template").content.firstElementChild.cloneNode(true);
    this.root.classList.add(`run-${number}`);
    place.append(this.root);
    const guarded = (work) => latestOnly((...given) => work(...given).catch((error) => onProblem(error.message)));
    this.askDrawing = guarded(() => this.showDrawing());
    this.askStrip = guarded(() => pause(STRIP_PAUSE).then(() => this.showStrip()));
    this.askStrips = guarded(() => pause(STRIP_PAUSE).then(() => this.showStrips()));
    this.fill();
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  fill() {
    const { model, info } = this;
    this.find(".name").textContent = model.name;
    const facts = [];
    if (model.routing) facts.push(`${model.routing} routing`);
    facts.push(`${model.numbers.toLocaleString("en")} learned numbers`);
    if (model.error_percent !== null) facts.push(`${model.error_percent.toFixed(2)} % of test images wrong`);
    this.find(".facts").textContent = facts.join(" · ");
    this.root.setAttribute("aria-label", `What ${model.name} sees`);
    for (const part of this.root.querySelectorAll(".with-decoder")) part.hidden = !model.has_decoder;
    this.find(".no-decoder").hidden = model.has_decoder;
    this.find(".map-part").hidden = !model.has_maps;
    this.find(".no-map").hidden = model.has_maps;
    this.bars = info.classes.map((name, label) => this.makeBar(name, label));
    this.sliders = Array.from({ length: model.pose_size }, (_, number) => this.makeSlider(number));
    this.find(".follow").addEventListener("click", () => {
      this.onChoose(null);
      this.bars[this.surest()].button.focus();
    });
    this.find(".reset").addEventListener("click", () => this.reset());
    this.find(".all").addEventListener("toggle", () => this.askStrips());
  }

  makeBar(name, label) {
    const button = element("button", "bar");
    button.type = "button";
    button.dataset.label = label;
    const fill = element("span", "fill");
    const track = element("span", "track");
    const value = element("span", "value");
    track.append(fill);
    button.append(element("span", "class-name", name), track, value);
    button.addEventListener("click", () => this.onChoose(label));
    const item = element("li");
    item.append(button);
    this.find(".bars").append(item);
    return { button, fill, value };
  }

  makeSlider(number) {
    const row = element("label", "slider");
    const slider = element("input");
    slider.type = "range";
    slider.step = "0.01";
    slider.disabled = !this.model.has_decoder;
    slider.setAttribute("aria-label", `Component ${number + 1}`);
    const value = element("span", "value");
    const holder = element("span", "holder");
    holder.append(slider, element("span", "mark"));
    row.append(element("span", "number", String(number + 1)), holder, value);
    slider.addEventListener("focus", () => this.choose(number));
    slider.addEventListener("input", () => {
      this.pose[number] = Number(slider.value);
      this.showValue(number);
      this.askDrawing();
      if (this.component === number) this.askStrip();
      else this.choose(number);
    });
    this.find(".sliders").append(row);
    return { row, slider, value };
  }

  /** Show an answer to an image: bytes (C, H, W). pinned is the class that the user chose, or null; so is truth, names. */
  show(answer, bytes, pinned, empty, truth = null) {
    this.answer = answer;
    this.bytes = bytes;
    this.label = pinned === null ? this.surest() : pinned;
    const { classes } = this.info;
    const names = answer.found.map((label) => classes[label]);
    this.verdict = this.inASentence(names, empty, truth);
    this.root.classList.toggle("empty", empty);
    this.find(".verdict").textContent = this.verdict;
    this.bars.forEach(({ button, fill, value }, label) => {
      const length = empty ? 0 : answer.lengths[label];
      fill.style.width = `${100 * Math.min(1, length)}%`;
      value.textContent = length.toFixed(2);
      button.classList.toggle("found", !empty && answer.found.includes(label));
      button.classList.toggle("true", Boolean(truth) && truth.includes(classes[label]));
      button.setAttribute("aria-pressed", String(label === this.label));
      const shown = button.classList.contains("true") ? ", which the test image shows" : "";
      button.setAttribute("aria-label", `${classes[label]}: length ${length.toFixed(2)}${shown}`);
    });
    this.find(".follow").hidden = pinned === null;
    for (const place of this.root.querySelectorAll(".chosen")) place.textContent = `“${classes[this.label]}”`;
    this.showRedrawn();
    this.showMap();
    this.reset();
  }

  inASentence(names, empty, truth) {
    if (empty) return "The image is empty: draw something, or take a test image.";
    const wrong = truth && inWords([...truth].sort()) !== inWords([...names].sort());
    const shows = wrong ? ` The test image shows ${truth.length ? inWords(truth) : "none of them"}.` : "";
    if (!names.length) return `It sees none of its classes.${shows}`;
    const { found, lengths } = this.answer;
    if (found.some((label) => lengths[label] < UNSURE_BELOW)) return `It is not sure: perhaps ${inWords(names)}.${shows}`;
    const [, second] = lengths.map((_, label) => label).sort((a, b) => lengths[b] - lengths[a]);
    if (found.length === 1 && lengths[found[0]] - lengths[second] < HESITATES_WITHIN) {
      return `It hesitates between ${names[0]} and ${this.info.classes[second]}.${shows}`;
    }
    return `It sees ${inWords(names)}.${shows}`;
  }

  surest() {
    return this.answer.lengths.indexOf(Math.max(...this.answer.lengths));
  }

  showRedrawn() {
    const { info, answer } = this;
    const place = this.find(".redrawn");
    const pictures = [["the image", this.bytes], ...answer.reconstructions.map((each) => [`drawn as ${info.classes[each.label]}`, each.image])];
    place.replaceChildren(
      ...pictures.map(([caption, bytes]) => {
        const figure = element("figure");
        const canvas = element("canvas");
        paint(canvas, bytes, info.image_shape);
        canvas.setAttribute("role", "img");
        canvas.setAttribute("aria-label", caption);
        figure.append(canvas, element("figcaption", "", caption));
        return figure;
      }),
    );
    const hint = this.find(".redrawn-hint");
    hint.textContent = this.model.has_decoder
      ? `Drawn again from ${this.model.pose_size} numbers, the components of the capsule of each class it sees.`
      : "This network has no decoder: it cannot draw the image again.";
  }

  showMap() {
    const { map } = this.answer;
    if (!map) return;
    const name = this.info.classes[map.label];
    const [adds, takes] = [map.adds.toFixed(2), Math.abs(map.takes).toFixed(2)];
    const maps = {
      together: [map.adds_map.map((value, place) => value + map.takes_map[place]), `in blue where the image adds to ${name}, in orange where it takes from it`],
      adds: [map.adds_map, `all that adds to ${name}: ${adds}`],
      takes: [map.takes_map, `all that takes from ${name}: ${takes}`],
    };
    const reach = (...all) => all.reduce((most, values) => values.reduce((far, value) => Math.max(far, Math.abs(value)), most), 1e-12);
    const apart = reach(map.adds_map, map.takes_map); // these two can be compared
    for (const [kind, [values, words]] of Object.entries(maps)) {
      const canvas = this.find(`.map-${kind} canvas`);
      const largest = kind === "together" ? reach(values) : apart;
      paintMap(canvas, values, largest, this.bytes, this.info.image_shape);
      canvas.setAttribute("aria-label", words);
    }
    this.find(".adds b").textContent = adds;
    this.find(".takes b").textContent = takes;
    const total = map.adds + map.takes;
    const squashed = (total * total) / (1 + total * total);
    const isBar = Math.abs(squashed - this.answer.lengths[map.label]) < 0.01; // not with every routing
    const bar = isBar ? ` Brought to between 0 and 1, that is the bar's ${squashed.toFixed(2)}.` : "";
    this.find(".sum").textContent = `${adds} − ${takes} = ${total.toFixed(2)}.${bar}`;
  }

  /** Back to the components that the image gave. */
  reset() {
    this.pose = [...this.answer.poses[this.label]];
    const largest = Math.max(...this.pose.map(Math.abs));
    this.limit = Math.max(0.6, Math.ceil(10 * (largest + this.info.sweep_reach)) / 10); // every frame of a sweep is on it
    this.sliders.forEach(({ slider }, number) => {
      slider.min = -this.limit;
      slider.max = this.limit;
      slider.value = this.pose[number];
      slider.parentElement.style.setProperty("--share", (this.pose[number] + this.limit) / (2 * this.limit));
      this.showValue(number);
    });
    if (!this.model.has_decoder) return;
    this.askDrawing();
    this.askStrip();
    if (this.find(".all").open) this.askStrips();
  }

  showValue(number) {
    this.sliders[number].value.textContent = short(this.pose[number]);
  }

  choose(number) {
    if (this.component === number) return;
    this.component = number;
    this.markComponent();
    this.askStrip();
  }

  markComponent() {
    this.sliders.forEach(({ row }, number) => row.classList.toggle("current", number === this.component));
  }

  async showDrawing() {
    const canvas = this.find(".decoded");
    const own = this.answer.reconstructions.find((each) => each.label === this.label);
    const untouched = this.answer.poses[this.label].every((value, number) => value === this.pose[number]);
    const image = own && untouched ? own.image : await this.backend.decode(this.number, this.label, this.pose);
    paint(canvas, image, this.info.image_shape);
    canvas.setAttribute("aria-label", `What the capsule for ${this.info.classes[this.label]} draws with these components`);
  }

  async showStrip() {
    const [component, label, pose] = [this.component, this.label, [...this.pose]];
    const [strip] = await this.backend.sweep(this.number, label, pose, component);
    this.find(".swept").textContent = component + 1;
    this.markComponent();
    this.fillStrip(this.find(".strip"), strip, component, pose[component]);
  }

  async showStrips() {
    if (!this.find(".all").open || !this.pose) return;
    const pose = [...this.pose];
    const strips = await this.backend.sweep(this.number, this.label, pose, null);
    this.find(".strips").replaceChildren(
      ...strips.map((strip, component) => {
        const row = element("div", "strip-row");
        const place = element("div", "strip");
        this.fillStrip(place, strip, component, pose[component]);
        row.append(element("span", "number", String(component + 1)), place);
        return row;
      }),
    );
  }

  /** Pictures as buttons that set the component to what they were drawn with. */
  fillStrip(place, strip, component, own) {
    const reach = this.info.sweep_reach;
    place.replaceChildren(
      ...strip.map((image, step) => {
        const value = own - reach + (2 * reach * step) / (strip.length - 1);
        const words = `Component ${component + 1} at ${short(value)}`;
        const button = pictureButton(image, this.info.image_shape, words, () => {
          this.setComponent(component, value);
          for (const frame of place.children) frame.classList.toggle("own", frame === button);
        });
        button.title = short(value);
        return button;
      }),
    );
    place.children[(strip.length - 1) / 2].classList.add("own");
  }

  setComponent(component, value) {
    const { slider } = this.sliders[component];
    slider.value = value;
    this.pose[component] = Number(slider.value);
    this.showValue(component);
    this.askDrawing();
  }
}
