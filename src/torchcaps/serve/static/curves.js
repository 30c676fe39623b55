"use strict";
/* The curves of training, as SVG. */

const SVG = "http://www.w3.org/2000/svg";
const CHART = { width: 460, height: 210, left: 46, right: 26, top: 12, bottom: 30 };

function svgElement(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Round numbers, about `count` of them, from 0 to `most` or just above. */
function ticks(most, count) {
  const rough = most / count;
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const all = [];
  for (let value = 0; value < most + 0.5 * step; value += step) all.push(Number(value.toPrecision(6)));
  return all;
}

/** A chart of lines [{name, number, points: [[x, y], ...]}], both axes from 0. */
function lineChart(title, unit, lines) {
  const { width, height, left, right, top, bottom } = CHART;
  const xMost = Math.max(...lines.flatMap((line) => line.points.map(([x]) => x)), 1);
  const highest = Math.max(...lines.flatMap((line) => line.points.map(([, y]) => y)), 1e-6);
  const yTicks = ticks(highest, 4);
  const yMost = Math.max(highest, yTicks[yTicks.length - 1]);
  const x = (value) => left + (value / xMost) * (width - left - right);
  const y = (value) => height - bottom - (value / yMost) * (height - top - bottom);
  const last = lines.map((line) => `${line.name} ends at ${line.points[line.points.length - 1][1].toPrecision(3)}${unit}`);
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", `${title} over the steps of training: ${last.join("; ")}`);
  for (const value of yTicks) {
    svg.append(svgElement("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(svgElement("text", { class: "tick", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, `${value}${unit}`));
  }
  for (const value of ticks(xMost, 5).filter((tick) => tick <= xMost)) {
    svg.append(
      svgElement("text", { class: "tick", x: x(value), y: height - 10, "text-anchor": "middle" }, value.toLocaleString("en")),
    );
  }
  for (const { number, points } of lines) {
    const path = points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`);
    svg.append(svgElement("path", { class: `line run-${number}`, d: path.join("") }));
    if (points.length === 1) {
      const [[step, value]] = points;
      svg.append(svgElement("circle", { class: `dot run-${number}`, cx: x(step), cy: y(value), r: 3 }));
    }
  }
  const figure = element("figure");
  figure.append(element("figcaption", "", `${title}, by step`), svg);
  return figure;
}

/** Fill a place with the curves of one or two models; false if they have none. */
function showCurves(place, models) {
  const charts = [
    ["evaluation_error", "Wrong answers on images it has not seen", "%"],
    ["train_error", "Wrong answers while training", "%"],
    ["loss", "Loss", ""],
  ];
  for (const [column, title, unit] of charts) {
    const lines = models
      .map((model, number) => ({ name: model.name, number, points: pointsOf(model.curves, column) }))
      .filter((line) => line.points.length);
    if (lines.some((line) => line.points.length > 1)) place.append(lineChart(title, unit, lines));
  }
  if (!place.children.length) return false;
  if (models.length > 1) {
    const legend = element("p", "run-legend");
    legend.append(...models.map((model, number) => element("span", `run-${number}`, model.name)));
    place.append(legend);
  }
  return true;
}

function pointsOf(curves, column) {
  const points = [];
  (curves[column] || []).forEach((value, i) => {
    if (value !== null && curves.step[i] !== null) points.push([curves.step[i], value]);
  });
  return points;
}
