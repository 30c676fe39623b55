"use strict";
/* A capsule network in plain JavaScript: convolutions, squash, routing, decoder and exact contributions.

   `capsuleEngine` needs nothing from outside but `bytesOf`, so that its text can be given to a worker. The letters are those
   of the library: I input capsules with D components, J output capsules with E components. */

function capsuleEngine() {
  let halves = null;

  /** All 65,536 half-precision numbers. */
  function halfTable() {
    const table = new Float32Array(65536);
    for (let code = 0; code < 65536; code++) {
      const exponent = (code >> 10) & 31;
      const fraction = code & 1023;
      const size = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
      table[code] = code & 32768 ? -size : size;
    }
    return table;
  }

  const floatsOf = (text) => new Float32Array(bytesOf(text).buffer);

  /** A matrix (inputs, outputs) and a bias from what the page has in it. */
  function unpack(stored) {
    const bytes = bytesOf(stored.weight);
    const bias = stored.bias === null ? null : floatsOf(stored.bias);
    if (stored.bits === 16) {
      halves = halves || halfTable();
      const codes = new Uint16Array(bytes.buffer);
      const weight = new Float32Array(codes.length);
      for (let i = 0; i < codes.length; i++) weight[i] = halves[codes[i]];
      return { weight, bias };
    }
    const scales = floatsOf(stored.scales);
    const whole = new Int8Array(bytes.buffer);
    const weight = new Float32Array(whole.length);
    for (let i = 0; i < whole.length; i++) weight[i] = whole[i] * scales[i % scales.length];
    return { weight, bias };
  }

  /** Add sum over k of values[k] * weight[rows[k]] to a row of totals; four rows of the weight at a time. */
  function addRows(totals, start, width, values, rows, count, weight) {
    let k = 0;
    for (; k + 4 <= count; k += 4) {
      const [a, b, c, d] = [values[k], values[k + 1], values[k + 2], values[k + 3]];
      const [p, q, r, s] = [rows[k] * width, rows[k + 1] * width, rows[k + 2] * width, rows[k + 3] * width];
      for (let o = 0; o < width; o++) {
        totals[start + o] += a * weight[p + o] + b * weight[q + o] + c * weight[r + o] + d * weight[s + o];
      }
    }
    for (; k < count; k++) {
      const value = values[k];
      const row = rows[k] * width;
      for (let o = 0; o < width; o++) totals[start + o] += value * weight[row + o];
    }
  }

  /** Channels-last (rows, columns, channels) -> (rows', columns', outputs), which is returned with its size. */
  function convolve(input, [rows, columns, channels], { weight, bias }, kernel, stride, padding) {
    const outputs = bias.length;
    const high = Math.floor((rows + 2 * padding - kernel) / stride) + 1;
    const wide = Math.floor((columns + 2 * padding - kernel) / stride) + 1;
    const totals = new Float32Array(high * wide * outputs);
    for (let place = 0; place < high * wide; place++) totals.set(bias, place * outputs);
    const values = new Float64Array(channels);
    const taken = new Int32Array(channels);
    // One tap of the kernel after the other: its weights stay in the cache while all places use them.
    for (let y = 0; y < kernel; y++) {
      for (let x = 0; x < kernel; x++) {
        const tap = (y * kernel + x) * channels;
        for (let row = 0; row < high; row++) {
          const above = row * stride + y - padding;
          if (above < 0 || above >= rows) continue;
          for (let column = 0; column < wide; column++) {
            const beside = column * stride + x - padding;
            if (beside < 0 || beside >= columns) continue;
            const from = (above * columns + beside) * channels;
            let count = 0;
            for (let channel = 0; channel < channels; channel++) {
              const value = input[from + channel];
              if (value !== 0) {
                values[count] = value;
                taken[count++] = tap + channel;
              }
            }
            if (count) addRows(totals, (row * wide + column) * outputs, outputs, values, taken, count, weight);
          }
        }
      }
    }
    return [totals, [high, wide, outputs]];
  }

  function norm(vectors, start, size) {
    let sum = 0;
    for (let e = 0; e < size; e++) sum += vectors[start + e] ** 2;
    return Math.sqrt(sum);
  }

  /** Shrink each vector of `size` numbers to a length below 1, in a new array. */
  function squash(totals, size) {
    const poses = new Float32Array(totals.length);
    for (let start = 0; start < totals.length; start += size) {
      const length = norm(totals, start, size);
      const factor = length / (1 + length * length);
      for (let e = 0; e < size; e++) poses[start + e] = totals[start + e] * factor;
    }
    return poses;
  }

  /** Capsules (I, D) through a layer -> totals (J, E) and, where images have their own, coefficients (I, J). */
  function route(layer, poses) {
    const { inputs: I, input_size: D, outputs: J, output_size: E, iterations, weight } = layer;
    const totals = new Float64Array(J * E);
    if (!iterations) {
      for (let k = 0; k < I * D; k++) {
        const value = poses[k];
        if (value === 0) continue;
        for (let o = 0; o < J * E; o++) totals[o] += value * weight[k * J * E + o];
      }
      return { totals, coefficients: null };
    }
    const votes = new Float32Array(I * J * E);
    for (let i = 0; i < I; i++) {
      for (let d = 0; d < D; d++) {
        const value = poses[i * D + d];
        const row = (i * D + d) * J * E;
        for (let o = 0; o < J * E; o++) votes[i * J * E + o] += value * weight[row + o];
      }
    }
    const logits = new Float64Array(I * J);
    const coefficients = new Float64Array(I * J).fill(1 / J);
    for (let iteration = 1; ; iteration++) {
      totals.fill(0);
      for (let pair = 0; pair < I * J; pair++) {
        const j = pair % J;
        for (let e = 0; e < E; e++) totals[j * E + e] += coefficients[pair] * votes[pair * E + e];
      }
      if (iteration === iterations) return { totals, coefficients };
      const outputs = squash(totals, E);
      for (let pair = 0; pair < I * J; pair++) {
        const j = pair % J;
        for (let e = 0; e < E; e++) logits[pair] += votes[pair * E + e] * outputs[j * E + e];
      }
      for (let i = 0; i < I; i++) softmax(logits.subarray(i * J, (i + 1) * J), coefficients.subarray(i * J, (i + 1) * J));
    }
  }

  function softmax(logits, shares) {
    const largest = Math.max(...logits);
    let sum = 0;
    for (let j = 0; j < logits.length; j++) sum += shares[j] = Math.exp(logits[j] - largest);
    for (let j = 0; j < logits.length; j++) shares[j] /= sum;
  }

  class Network {
    constructor(stored) {
      this.is = stored;
      this.first = unpack(stored.first);
      this.second = unpack(stored.second);
      this.layers = stored.layers.map((layer) => ({ ...layer, ...unpack(layer) }));
      this.decoder = stored.decoder && stored.decoder.map(unpack);
      this.top = this.layers[this.layers.length - 1];
    }

    /** What the network makes of bytes (C, H, W), with the map of a class; by default of the surest. */
    analyse(bytes, label) {
      let poses = this.primary(bytes);
      let routed = null;
      let below = poses;
      for (const layer of this.layers) {
        below = poses;
        routed = route(layer, poses);
        poses = squash(routed.totals, layer.output_size);
      }
      const { outputs: J, output_size: E } = this.top;
      const lengths = Array.from({ length: J }, (_, j) => norm(poses, j * E, E));
      const order = lengths.map((_, j) => j).sort((one, other) => lengths[other] - lengths[one]);
      const { labels_per_image: shown } = this.is;
      const found = shown ? order.slice(0, shown) : order.filter((j) => lengths[j] > 0.5);
      const poseOf = (j) => Array.from(poses.subarray(j * E, (j + 1) * E));
      return {
        lengths,
        poses: lengths.map((_, j) => poseOf(j)),
        found,
        reconstructions: this.decoder ? found.map((j) => ({ label: j, image: this.decode(j, poseOf(j)) })) : [],
        map: this.layers.length > 1 ? null : this.map(below, routed, label === null ? order[0] : label),
      };
    }

    /** Primary capsules (I, D) of bytes (C, H, W). */
    primary(bytes) {
      const { image_shape, mean, std, kernel, stride, padding, negative_slope, size, kept } = this.is;
      const [channels, height, width] = image_shape;
      const plane = height * width;
      const image = new Float32Array(channels * plane);
      const values = this.standardised(bytes);
      for (let channel = 0; channel < channels; channel++) {
        const centre = mean[channel % mean.length];
        const spread = std[channel % std.length];
        for (let place = 0; place < plane; place++) {
          image[place * channels + channel] = (values[channel * plane + place] - centre) / spread;
        }
      }
      const [hidden, hiddenSize] = convolve(image, [height, width, channels], this.first, kernel, 1, padding);
      for (let i = 0; i < hidden.length; i++) if (hidden[i] < 0) hidden[i] *= negative_slope;
      const [totals] = convolve(hidden, hiddenSize, this.second, kernel, stride, padding);
      const capsules = squash(totals, size);
      if (!kept) return capsules;
      const chosen = new Float32Array(kept.length * size);
      kept.forEach((capsule, i) => chosen.set(capsules.subarray(capsule * size, (capsule + 1) * size), i * size));
      return chosen;
    }

    standardised(bytes) {
      const values = Float64Array.from(bytes, (value) => value / 255);
      if (!this.is.standardise) return values;
      let sum = 0;
      let squares = 0;
      for (const value of values) sum += value;
      const centre = sum / values.length;
      for (const value of values) squares += (value - centre) ** 2;
      const spread = Math.max(Math.sqrt(squares / values.length), 1 / (255 * Math.sqrt(values.length)));
      return values.map((value) => (value - centre) / spread);
    }

    /** What each place adds to and takes from class j, spread over the pixels it comes from. */
    map(poses, { totals, coefficients }, j) {
      const { inputs: I, input_size: D, outputs: J, output_size: E, weight } = this.top;
      const { map_shape, kept } = this.is;
      const [rows, columns, types] = map_shape;
      const length = Math.max(norm(totals, j * E, E), 1e-30);
      const places = { adds: new Float64Array(rows * columns), takes: new Float64Array(rows * columns) };
      for (let i = 0; i < I; i++) {
        let share = 0;
        for (let d = 0; d < D; d++) {
          const row = ((i * D + d) * J + j) * E;
          let vote = 0;
          for (let e = 0; e < E; e++) vote += weight[row + e] * totals[j * E + e];
          share += poses[i * D + d] * vote;
        }
        share *= (coefficients ? coefficients[i * J + j] : 1) / length;
        places[share > 0 ? "adds" : "takes"][Math.floor((kept ? kept[i] : i) / types)] += share;
      }
      const sum = (values) => values.reduce((total, value) => total + value, 0);
      return {
        label: j,
        adds: sum(places.adds),
        takes: sum(places.takes),
        adds_map: this.overPixels(places.adds),
        takes_map: this.overPixels(places.takes),
      };
    }

    /** Numbers of the map's places over the pixels that lead there through both kernels. */
    overPixels(places) {
      const { image_shape, map_shape, kernel, stride, padding } = this.is;
      const [, height, width] = image_shape;
      const [rows, columns] = map_shape;
      const side = 2 * kernel - 1;
      const ways = Float64Array.from({ length: side }, (_, i) => Math.min(i + 1, side - i) / kernel ** 2);
      const pixels = new Float32Array(height * width);
      for (let place = 0; place < rows * columns; place++) {
        const top = Math.floor(place / columns) * stride - 2 * padding;
        const left = (place % columns) * stride - 2 * padding;
        for (let y = Math.max(0, -top); y < side && top + y < height; y++) {
          for (let x = Math.max(0, -left); x < side && left + x < width; x++) {
            pixels[(top + y) * width + left + x] += places[place] * ways[y] * ways[x];
          }
        }
      }
      return pixels;
    }

    /** Draw class `label` with a pose of E numbers: bytes (C, H, W). */
    decode(label, pose) {
      const E = this.top.output_size;
      let values = Float64Array.from(pose);
      let rows = Int32Array.from(pose, (_, e) => label * E + e); // all other capsules are zero
      let totals = null;
      this.decoder.forEach(({ weight, bias }, number) => {
        totals = Float64Array.from(bias);
        addRows(totals, 0, bias.length, values, rows, values.length, weight);
        if (number === this.decoder.length - 1) return;
        rows = Int32Array.from(totals.keys()).filter((o) => totals[o] > 0);
        values = Float64Array.from(rows, (o) => totals[o]);
      });
      return Uint8Array.from(totals, (total) => Math.round(255 / (1 + Math.exp(-total))));
    }

    /** A pose with one component, or one after the other, moved over its range: strips of images. */
    sweep(label, pose, component, steps, reach) {
      const components = component === null ? pose.map((_, e) => e) : [component];
      return components.map((e) =>
        Array.from({ length: steps }, (_, step) => {
          const moved = [...pose];
          moved[e] += reach * ((2 * step) / (steps - 1) - 1);
          return this.decode(label, moved);
        }),
      );
    }
  }

  return { Network };
}
