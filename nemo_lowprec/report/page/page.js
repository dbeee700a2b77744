"use strict";
// Draws the charts of a page. Their specifications and numbers are in #packed, as gzipped JSON.

const root = document.documentElement;
const wide = matchMedia("(min-width: 900px)");
const SVG_CELLS = 6000; // of a heatmap; more cells are drawn faster on a canvas

let contents;
const views = {}; // of the heatmaps of layers, by metric
const chosen = { layer: "" };

const variable = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
const variables = (name) => variable(name).split(",").map((part) => part.trim());
const seriesColours = () => Array.from({ length: 10 }, (_, i) => variable(`s${i}`));

async function unpack() {
  const bytes = Uint8Array.from(atob(document.getElementById("packed").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

function config() {
  const [ink, quiet, line, series] = [variable("ink"), variable("second-ink"), variable("line"), seriesColours()];
  const text = { labelColor: quiet, titleColor: quiet, labelFontSize: 11.5, titleFontSize: 12, titleFontWeight: "normal" };
  return {
    background: null,
    font: variable("font"),
    view: { stroke: null },
    axis: { ...text, gridColor: line, domain: false, ticks: false, labelPadding: 6 },
    axisX: { domain: true, domainColor: line },
    legend: text,
    line: { strokeWidth: 1.8, color: series[0] },
    area: { color: series[0] },
    bar: { color: series[0] },
    point: { color: series[0] },
    text: { color: ink, fontSize: 12.5 },
    range: { category: series, heatmap: variables("heat"), ramp: variables("ratio-heat") },
    params: [
      { name: "ink", value: ink },
      { name: "quiet", value: quiet },
      { name: "second", value: series[1] },
    ],
  };
}

async function draw(element, spec, datasets = {}) {
  const cells = datasets.cells ? datasets.cells.length : 0;
  const renderer = cells > SVG_CELLS ? "canvas" : "svg";
  const found = await vegaEmbed(element, { ...spec, datasets }, { mode: "vega-lite", actions: false, renderer, config: config() });
  return found.view;
}

function cellsOf(maps, panel, choice) {
  const end = maps.next[maps.next.length - 1];
  const steps = maps.first.map((first, i) => (first === maps.last[i] ? `${first}` : `${first} to ${maps.last[i]}, worst`));
  return maps.values[panel][choice].flatMap((row, r) =>
    row.map((value, i) => ({
      row: maps.rows[r], column: i, first: maps.first[i], next: maps.next[i], end, steps: steps[i], value,
    })),
  );
}

function forWidth(spec, isFirst) {
  const own = structuredClone(spec);
  const axis = own.encoding.y.axis;
  axis.labels = isFirst || !wide.matches;
  axis.labelLimit = wide.matches ? 190 : 120;
  return own;
}

async function drawMaps(place) {
  const name = place.dataset.maps;
  const maps = contents[name];
  const choice = chosen[name];
  const shown = maps.shown[choice];
  const figures = shown.map((panel) => {
    const { title, unit } = maps.panels[panel];
    const figure = document.createElement("figure");
    figure.dataset.panel = panel;
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    const small = document.createElement("span");
    small.className = "quiet";
    small.textContent = ` ${unit}`;
    caption.append(small);
    const chart = document.createElement("div");
    chart.className = "chart";
    chart.setAttribute("role", "img");
    chart.setAttribute("aria-label", `${title} of each row and sampled step`);
    figure.append(caption, chart);
    return figure;
  });
  place.replaceChildren(...figures);
  await Promise.all(
    shown.map(async (panel, i) => {
      const spec = forWidth(maps.panels[panel].chart, i === 0);
      const view = await draw(figures[i].lastChild, spec, { cells: cellsOf(maps, panel, choice) });
      if (name !== "layers") return;
      views[panel] = view;
      view.addEventListener("click", (event, item) => item?.datum?.row && show(item.datum.row));
      view.signal("chosen", chosen.layer).run();
    }),
  );
}

function offerChoices(place) {
  const name = place.dataset.for;
  for (const { name: choice, title } of contents[name].choices) {
    const label = document.createElement("label");
    const input = document.createElement("input");
    Object.assign(input, { type: "radio", name, value: choice, checked: choice === chosen[name] });
    input.addEventListener("change", () => {
      chosen[name] = choice;
      drawMaps(document.querySelector(`[data-maps="${name}"]`));
    });
    label.append(input, title);
    place.append(label);
  }
}

function historyOf(metric) {
  const { rows, last, values, choices } = contents.layers;
  const row = rows.indexOf(chosen.layer);
  return choices.flatMap(({ name, title }) =>
    values[metric][name][row].flatMap((value, i) =>
      value === null || ((metric === "amax" || metric === "scale") && value <= 0) ? [] : [{ step: last[i], operand: title, value }],
    ),
  );
}

async function drawHistory() {
  const charts = [...document.querySelectorAll("#history [data-chart]")];
  await Promise.all(
    charts.map((element) => {
      const name = element.dataset.chart;
      return draw(element, contents.charts[name], { history: historyOf(name.replace("history-", "")) });
    }),
  );
}

async function show(layer) {
  chosen.layer = layer;
  const history = document.getElementById("history");
  history.dataset.layer = layer;
  history.querySelector("select").value = layer;
  for (const view of Object.values(views)) view.signal("chosen", layer).run();
  await drawHistory();
}

function offerLayers() {
  const history = document.getElementById("history");
  const select = history.querySelector("select");
  select.replaceChildren(...contents.layers.rows.map((row) => new Option(row, row)));
  chosen.layer = history.dataset.layer || contents.layers.rows[0];
  history.dataset.layer = select.value = chosen.layer;
  select.addEventListener("change", () => show(select.value));
  for (const link of document.querySelectorAll("a.layer")) link.addEventListener("click", () => show(link.dataset.layer));
}

async function drawAll() {
  const plain = [...document.querySelectorAll("[data-chart]")].filter((e) => !e.closest("#history"));
  await Promise.all(plain.map((element) => draw(element, contents.charts[element.dataset.chart])));
  await Promise.all([...document.querySelectorAll("[data-maps]")].map(drawMaps));
  if (document.getElementById("history")) await drawHistory();
  document.body.dataset.drawn = `${Number(document.body.dataset.drawn || 0) + 1}`;
}

function setTheme(dark) {
  root.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").textContent = dark ? "Light" : "Dark";
}

async function start() {
  contents = await unpack();
  for (const place of document.querySelectorAll("[data-maps]")) {
    const name = place.dataset.maps;
    chosen[name] = place.dataset.chosen || contents[name].choices[0].name;
  }
  if (document.getElementById("history")) offerLayers();
  document.querySelectorAll(".choices").forEach(offerChoices);
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(root.dataset.theme !== "dark");
    drawAll();
  });
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  prefersDark.addEventListener("change", (event) => {
    setTheme(event.matches);
    drawAll();
  });
  wide.addEventListener("change", drawAll);
  await drawAll();
}

setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
start();
