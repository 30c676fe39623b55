"use strict";
/* The image that the network is shown, to be drawn, covered, moved, turned and thickened.

   It is kept several times as fine as the network sees it. `base` is the image before it is moved, turned and
   thickened, so that these can be taken back without loss; drawing on top makes what is seen the new base. */

const PAD_PIXELS = 280;
const UNDO_STEPS = 30;

class Pad {
  /** shape is the network's [C, H, W]; onChange is called whenever the image may have changed. */
  constructor(canvas, cursor, shape, onChange) {
    this.canvas = canvas;
    this.cursorMark = cursor;
    this.shape = shape;
    this.onChange = onChange;
    this.scale = Math.max(1, Math.round(PAD_PIXELS / Math.max(shape[1], shape[2])));
    canvas.width = shape[2] * this.scale;
    canvas.height = shape[1] * this.scale;
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.base = hiddenCanvas(canvas.width, canvas.height);
    this.history = [];
    this.tool = "draw";
    this.bright = false; // whether the ground is, and the pen dark
    this.startAnew = false; // whether the first stroke wipes what is there
    this.pen = { x: canvas.width / 2, y: canvas.height / 2, down: false };
    this.forgetChanges();
    this.wipe(this.base);
    this.render();
    this.listen();
  }

  forgetChanges() {
    this.shift = { x: 0, y: 0 };
    this.angle = 0;
    this.thickness = 0;
  }

  /** The colour of the ground, or of the pen. */
  colour(ground) {
    return ground === this.bright ? "#fff" : "#000";
  }

  wipe(canvas) {
    const context = canvas.getContext("2d");
    context.fillStyle = this.colour(true);
    context.fillRect(0, 0, canvas.width, canvas.height);
  }

  /** Bytes (C, H, W) as the network takes them. */
  pixels() {
    return fromCanvas(this.canvas, this.shape, this.scale);
  }

  /** Show another image: bytes (C, H, W). */
  load(bytes) {
    this.startAnew = false;
    this.remember();
    const small = hiddenCanvas(this.shape[2], this.shape[1]);
    paint(small, bytes, this.shape);
    const context = this.base.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, this.base.width, this.base.height);
    this.forgetChanges();
    this.changed();
  }

  clear() {
    this.remember();
    this.wipe(this.base);
    this.forgetChanges();
    this.changed();
  }

  undo() {
    const before = this.history.pop();
    if (!before) return;
    this.base = before.base;
    Object.assign(this, before.changes);
    this.changed();
  }

  invert() {
    this.settle();
    const context = this.base.getContext("2d");
    context.globalCompositeOperation = "difference";
    context.fillStyle = "#fff";
    context.fillRect(0, 0, this.base.width, this.base.height);
    context.globalCompositeOperation = "source-over";
    this.changed();
  }

  /** Move the centre of mass of what is drawn to the middle. */
  centre() {
    const [channels, height, width] = this.shape;
    const bytes = this.pixels();
    let mass = 0;
    let x = 0;
    let y = 0;
    for (let place = 0; place < channels * height * width; place++) {
      const drawn = this.bright ? 255 - bytes[place] : bytes[place];
      mass += drawn;
      x += drawn * (place % width);
      y += drawn * (Math.floor(place / width) % height);
    }
    if (mass === 0) return;
    this.remember();
    this.shift.x += Math.round((width - 1) / 2 - x / mass) * this.scale;
    this.shift.y += Math.round((height - 1) / 2 - y / mass) * this.scale;
    this.changed();
  }

  moveBy(x, y) {
    this.remember();
    this.shift.x += x;
    this.shift.y += y;
    this.changed();
  }

  setAngle(degrees) {
    this.angle = degrees;
    this.changed();
  }

  setThickness(steps) {
    this.thickness = steps;
    this.changed();
  }

  changed() {
    this.startAnew = false;
    this.render();
    this.onChange();
  }

  remember() {
    const copy = hiddenCanvas(this.base.width, this.base.height);
    copy.getContext("2d").drawImage(this.base, 0, 0);
    const changes = { shift: { ...this.shift }, angle: this.angle, thickness: this.thickness };
    this.history.push({ base: copy, changes });
    if (this.history.length > UNDO_STEPS) this.history.shift();
  }

  /** Make what is seen the new base. */
  settle() {
    this.remember();
    if (this.startAnew && this.tool === "draw") this.wipe(this.base);
    else this.base.getContext("2d").drawImage(this.canvas, 0, 0);
    this.forgetChanges();
  }

  render() {
    const { width, height } = this.canvas;
    const context = this.context;
    context.setTransform(1, 0, 0, 1, 0, 0);
    this.wipe(this.canvas);
    context.translate(width / 2 + this.shift.x, height / 2 + this.shift.y);
    context.rotate((this.angle * Math.PI) / 180);
    context.imageSmoothingEnabled = this.angle !== 0;
    context.drawImage(this.base, -width / 2, -height / 2);
    context.setTransform(1, 0, 0, 1, 0, 0);
    if (this.thickness) this.grow(Math.abs(this.thickness) * 0.4 * this.scale, this.thickness > 0 !== this.bright);
  }

  /** Spread what is bright, or what is dark, by a radius: the image on itself, a little to every side. */
  grow(radius, bright) {
    const copy = hiddenCanvas(this.canvas.width, this.canvas.height);
    copy.getContext("2d").drawImage(this.canvas, 0, 0);
    this.context.globalCompositeOperation = bright ? "lighten" : "darken";
    const directions = 16;
    for (let direction = 0; direction < directions; direction++) {
      const turn = (2 * Math.PI * direction) / directions;
      for (const reach of [radius, radius / 2]) {
        this.context.drawImage(copy, reach * Math.cos(turn), reach * Math.sin(turn));
      }
    }
    this.context.globalCompositeOperation = "source-over";
  }

  stroke(from, to) {
    const unit = Math.max(this.canvas.width, this.canvas.height) / 28;
    const context = this.base.getContext("2d");
    context.strokeStyle = this.colour(this.tool !== "draw");
    context.lineWidth = unit * (this.tool === "draw" ? 2.3 : 4);
    context.lineCap = "round";
    context.lineJoin = "round";
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.lineTo(to.x + 0.01, to.y);
    context.stroke();
  }

  listen() {
    let last = null;
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return {
        x: ((event.clientX - box.left) * this.canvas.width) / box.width,
        y: ((event.clientY - box.top) * this.canvas.height) / box.height,
      };
    };
    const goTo = (here) => {
      if (this.tool === "move") {
        this.shift.x += here.x - last.x;
        this.shift.y += here.y - last.y;
      } else {
        this.stroke(last, here);
      }
      last = here;
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || last) return;
      this.canvas.setPointerCapture(event.pointerId);
      last = place(event);
      if (this.tool === "move") this.remember();
      else this.settle();
      goTo(last);
      this.changed();
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!last || !this.canvas.hasPointerCapture(event.pointerId)) return;
      const all = event.getCoalescedEvents ? event.getCoalescedEvents() : [];
      for (const each of all.length ? all : [event]) goTo(place(each));
      this.changed();
    });
    const stop = () => {
      if (!last) return;
      last = null;
      this.shift = { x: Math.round(this.shift.x), y: Math.round(this.shift.y) };
      this.changed();
    };
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) this.canvas.addEventListener(name, stop);
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.canvas.addEventListener("focus", () => this.showCursor());
    this.canvas.addEventListener("blur", () => {
      this.pen.down = false;
      this.showCursor();
    });
  }

  onKey(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in steps) {
      const [x, y] = steps[event.key].map((step) => step * this.scale);
      if (this.tool === "move") this.moveBy(x, y);
      else this.movePen(x, y);
    } else if (event.key === " " && this.tool !== "move") {
      this.pen.down = !this.pen.down;
      if (this.pen.down) {
        this.settle();
        this.movePen(0, 0);
      }
    } else if (event.key === "Delete" || event.key === "Backspace") {
      this.clear();
    } else {
      return;
    }
    event.preventDefault();
    this.showCursor();
  }

  movePen(x, y) {
    const before = { x: this.pen.x, y: this.pen.y };
    this.pen.x = Math.min(this.canvas.width, Math.max(0, this.pen.x + x));
    this.pen.y = Math.min(this.canvas.height, Math.max(0, this.pen.y + y));
    if (!this.pen.down) return;
    this.stroke(before, this.pen);
    this.changed();
  }

  showCursor() {
    const focused = document.activeElement === this.canvas && this.canvas.matches(":focus-visible");
    this.cursorMark.hidden = !focused || this.tool === "move";
    this.cursorMark.classList.toggle("down", this.pen.down);
    this.cursorMark.style.left = `${(100 * this.pen.x) / this.canvas.width}%`;
    this.cursorMark.style.top = `${(100 * this.pen.y) / this.canvas.height}%`;
  }
}
