"use strict";
/* Images as bytes, and on canvases. An image is {data: Uint8Array (C, H, W)} with a shape [C, H, W] beside it. */

function bytesOf(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

function textOf(bytes) {
  let letters = "";
  for (let start = 0; start < bytes.length; start += 8192) {
    letters += String.fromCharCode(...bytes.subarray(start, start + 8192));
  }
  return btoa(letters);
}

/** A canvas of a size, which nobody sees. */
function hiddenCanvas(width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  return canvas;
}

/** Bytes (C, H, W) of a network's image as the RGBA pixels of a canvas. */
function toImageData(bytes, [channels, height, width]) {
  const image = new ImageData(width, height);
  const plane = height * width;
  for (let place = 0; place < plane; place++) {
    for (let colour = 0; colour < 3; colour++) {
      image.data[4 * place + colour] = bytes[(channels === 1 ? 0 : colour) * plane + place];
    }
    image.data[4 * place + 3] = 255;
  }
  return image;
}

function paint(canvas, bytes, shape) {
  canvas.width = shape[2];
  canvas.height = shape[1];
  canvas.getContext("2d").putImageData(toImageData(bytes, shape), 0, 0);
}

/** The middle of a canvas as bytes (C, H, W), each the mean of scale x scale pixels. */
function fromCanvas(canvas, [channels, height, width], scale) {
  const left = Math.floor((canvas.width / scale - width) / 2) * scale;
  const top = Math.floor((canvas.height / scale - height) / 2) * scale;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const pixels = context.getImageData(left, top, width * scale, height * scale).data;
  const bytes = new Uint8Array(channels * height * width);
  const area = scale * scale;
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      const sums = [0, 0, 0];
      for (let y = row * scale; y < (row + 1) * scale; y++) {
        for (let x = column * scale; x < (column + 1) * scale; x++) {
          const place = 4 * (y * width * scale + x);
          for (let colour = 0; colour < 3; colour++) sums[colour] += pixels[place + colour];
        }
      }
      const place = row * width + column;
      if (channels === 1) {
        bytes[place] = Math.round((0.299 * sums[0] + 0.587 * sums[1] + 0.114 * sums[2]) / area);
      } else {
        for (let colour = 0; colour < 3; colour++) {
          bytes[colour * height * width + place] = Math.round(sums[colour] / area);
        }
      }
    }
  }
  return bytes;
}

const MAP_COLOURS = { adds: [59, 130, 246], takes: [245, 128, 11] };

/** Contributions (H, W) over a faint image: one colour adds, the other takes away, and `largest` has all of it. */
function paintMap(canvas, values, largest, bytes, shape) {
  const [channels, height, width] = shape;
  canvas.width = width;
  canvas.height = height;
  const image = new ImageData(width, height);
  for (let place = 0; place < height * width; place++) {
    let grey = 0;
    for (let channel = 0; channel < channels; channel++) grey += bytes[channel * height * width + place] / channels;
    const strength = Math.pow(Math.abs(values[place]) / largest, 0.8);
    const colour = MAP_COLOURS[values[place] >= 0 ? "adds" : "takes"];
    const under = 18 + 0.75 * grey;
    for (let part = 0; part < 3; part++) {
      image.data[4 * place + part] = under + (colour[part] - under) * 0.85 * strength;
    }
    image.data[4 * place + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

let working = 0;

/** The page says that it is at work while anything is asked for. */
function countWork(change) {
  working += change;
  document.getElementById("panels").setAttribute("aria-busy", String(working > 0));
}

/** An asynchronous function of which only the latest call matters: calls while it is busy replace each other. */
function latestOnly(work) {
  let busy = false;
  let next = null;
  return async function (...given) {
    next = given;
    if (busy) return;
    busy = true;
    countWork(1);
    try {
      while (next) {
        const current = next;
        next = null;
        await work(...current);
      }
    } finally {
      busy = false;
      countWork(-1);
    }
  };
}
