"use strict";
/* Asks the server. `static.js` has the same functions without one. */

class ServerBackend {
  constructor() {
    this.where = "Your images stay on the machine that runs torchcaps serve.";
  }

  async ask(path, options) {
    let answer;
    try {
      answer = await fetch(`api/${path}`, options);
    } catch {
      throw new Error("The server does not answer: is torchcaps serve still running?");
    }
    const content = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(content.error || `The server answered with ${answer.status}.`);
    return content;
  }

  post(path, content) {
    return this.ask(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(content),
    });
  }

  info() {
    return this.ask("info");
  }

  async analyse(bytes, label) {
    const { answers } = await this.post("analyse", { image: textOf(bytes), label });
    return answers.map((answer) => ({
      ...answer,
      reconstructions: answer.reconstructions.map((each) => ({ ...each, image: bytesOf(each.image) })),
      map: answer.map && {
        ...answer.map,
        adds_map: new Float32Array(bytesOf(answer.map.adds_map).buffer),
        takes_map: new Float32Array(bytesOf(answer.map.takes_map).buffer),
      },
    }));
  }

  async decode(model, label, pose) {
    const { image } = await this.post("decode", { model, label, pose });
    return bytesOf(image);
  }

  async sweep(model, label, pose, component) {
    const { strips } = await this.post("sweep", { model, label, pose, component });
    return strips.map((strip) => strip.map(bytesOf));
  }

  async samples(kind, count, model) {
    const { pictures } = await this.ask(`samples?kind=${kind}&count=${count}&model=${model}`);
    return pictures.map((picture) => ({ ...picture, image: bytesOf(picture.image) }));
  }

  async upload(file) {
    const { image } = await this.ask("upload", {
      method: "POST",
      headers: { "content-type": "application/octet-stream" },
      body: file,
    });
    return bytesOf(image);
  }
}

const makeBackend = () => new ServerBackend();
