"use strict";
/* Answers without a server: the networks are in this page, and run in a worker so that it stays quick to the touch. */

/** What the worker runs: the text of this function, of capsuleEngine and of bytesOf. */
function answerMessages(makeEngine) {
  const { Network } = makeEngine();
  let networks = [];
  const does = {
    load: (stored) => {
      networks = stored.map((each) => new Network(each));
    },
    analyse: (bytes, label) => networks.map((network) => network.analyse(bytes, label)),
    decode: (model, ...rest) => networks[model].decode(...rest),
    sweep: (model, ...rest) => networks[model].sweep(...rest),
  };
  return (name, given) => does[name](...given);
}

class StaticBackend {
  constructor(content) {
    this.content = content;
    this.where = "The network is in this page: nothing you draw or upload leaves it.";
    this.waiting = new Map();
    this.asked = 0;
    this.connect();
    this.ask("load", content.networks);
  }

  connect() {
    const source = `"use strict";
      ${bytesOf}
      const answer = (${answerMessages})(${capsuleEngine});
      onmessage = ({ data: { number, name, given } }) => {
        try { postMessage({ number, result: answer(name, given) }); }
        catch (error) { postMessage({ number, problem: String(error) }); }
      };`;
    try {
      this.worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
      this.worker.onmessage = ({ data }) => this.onAnswer(data);
    } catch {
      this.answer = answerMessages(capsuleEngine); // a browser that lets no file have a worker
    }
  }

  ask(name, ...given) {
    if (!this.worker) return pause(0).then(() => this.answer(name, given));
    const number = ++this.asked;
    return new Promise((resolve, reject) => {
      this.waiting.set(number, { resolve, reject });
      this.worker.postMessage({ number, name, given });
    });
  }

  onAnswer({ number, result, problem }) {
    const { resolve, reject } = this.waiting.get(number);
    this.waiting.delete(number);
    if (problem) reject(new Error(problem));
    else resolve(result);
  }

  async info() {
    return this.content.info;
  }

  analyse(bytes, label) {
    return this.ask("analyse", bytes, label);
  }

  decode(model, label, pose) {
    return this.ask("decode", model, label, pose);
  }

  sweep(model, label, pose, component) {
    const { sweep_steps, sweep_reach } = this.content.info;
    return this.ask("sweep", model, label, pose, component, sweep_steps, sweep_reach);
  }

  async samples(kind, count, model) {
    const all = kind === "wrong" ? this.content.wrong[model] : this.content.samples;
    if (!all.length) throw new Error("There are no such images in this page.");
    const shuffled = [...all].sort(() => Math.random() - 0.5);
    return shuffled.slice(0, count).map((picture) => ({ ...picture, image: bytesOf(picture.image) }));
  }

  /** An image file of any size, brought to the network's. */
  async upload(file) {
    const { source_shape, image_shape, fit } = this.content.info;
    let picture;
    try {
      picture = await createImageBitmap(file);
    } catch {
      throw new Error("The file is not an image that can be read.");
    }
    const [, height, width] = source_shape;
    const ratios = [width / picture.width, height / picture.height];
    const ratio = fit === "pad" ? Math.min(...ratios) : Math.max(...ratios);
    const [across, down] = fit === "stretch" ? [width, height] : [picture.width * ratio, picture.height * ratio];
    const scale = 4; // drawn larger and averaged, for the browser's own smoothing is coarse
    const canvas = hiddenCanvas(width * scale, height * scale);
    const context = canvas.getContext("2d");
    const place = [((width - across) / 2) * scale, ((height - down) / 2) * scale, across * scale, down * scale];
    context.fillStyle = "#000";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = "#fff"; // behind what is transparent
    context.fillRect(...place);
    context.imageSmoothingEnabled = across !== picture.width || down !== picture.height;
    context.imageSmoothingQuality = "high";
    context.drawImage(picture, ...place);
    return fromCanvas(canvas, image_shape, scale);
  }
}

const makeBackend = () => new StaticBackend(window.TORCHCAPS);
