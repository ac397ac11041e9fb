"use strict";
(() => {
  const report = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const states = report.sections.map(() => ({ hidden: new Set(), seeds: false }));

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  // plotly takes a few tags in texts; names have none.
  const plain = (text) =>
    text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function decode(array) {
    const bytes = Uint8Array.from(atob(array.data), (c) => c.charCodeAt(0));
    return array.type === "f4" ? new Float32Array(bytes.buffer) : new Float64Array(bytes.buffer);
  }

  function decoded(line) {
    if (!line.samples.length) {
      for (const name of ["samples", "mean", "error", "values"]) line[name] = decode(line[name]);
    }
    return line;
  }

  function faint(hex, alpha) {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return `rgba(${r}, ${g}, ${b}, ${alpha})`;
  }

  function isVisible(section, kind, arm) {
    const state = states[section];
    return !state.hidden.has(arm) && (kind !== "seed" || state.seeds);
  }

  function band(line) {
    const there = [...line.mean.keys()].filter((i) => Number.isFinite(line.error[i]));
    const back = [...there].reverse();
    return {
      x: [...there, ...back].map((i) => line.samples[i]),
      y: there.map((i) => line.mean[i] + line.error[i]).concat(
        back.map((i) => line.mean[i] - line.error[i])
      ),
    };
  }

  function traces(section, figure) {
    const bands = [], seeds = [], means = [];
    for (const raw of figure.lines) {
      const line = decoded(raw);
      const arm = report.sections[section].arms[line.arm];
      const ink = colour(`--c${arm.colour}`);
      const add = (into, kind, told, trace) => into.push({
        type: "scatter", mode: "lines", name: plain(arm.name), ...trace,
        visible: isVisible(section, kind, line.arm),
        meta: { arm: line.arm, kind, told: plain(told), label: plain(arm.name) },
        hovertemplate: "<b>%{meta.label}</b><br>%{meta.told}<br>" +
          `${figure.unit.slice(0, -1)} %{x:,}<br>` +
          `${plain(figure.title.toLowerCase())} %{y:.5~g}<extra></extra>`,
      });
      if (line.seeds.length > 1) {
        add(bands, "band", "", { ...band(line), fill: "toself", hoverinfo: "skip",
          fillcolor: faint(ink, 0.2), line: { width: 0 } });
        bands[bands.length - 1].hovertemplate = undefined;
      }
      const points = line.samples.length;
      if (line.shown) {
        line.seeds.forEach((seed, k) => add(seeds, "seed", `seed ${seed}`, {
          x: line.samples, y: line.values.subarray(k * points, (k + 1) * points),
          line: { width: 1, color: faint(ink, 0.45), dash: arm.dash } }));
      }
      const told = line.seeds.length > 1 ? `mean of ${line.seeds.length} seeds`
        : `seed ${line.seeds[0]}`;
      const marked = points === 1 ? { mode: "markers", marker: { color: ink } } : {};
      add(means, "mean", told, { x: line.samples, y: line.mean, ...marked,
        line: { width: 2.25, color: ink, dash: arm.dash } });
    }
    return [...bands, ...seeds, ...means];
  }

  // Results by the value of a hyperparameter: a line per method, its best set, what diverged.
  function setTraces(figure) {
    const found = [];
    const [low, high] = figure.limits;
    for (const line of figure.sets) {
      const ink = colour(`--c${line.colour}`);
      const add = (trace) => found.push({ type: "scatter", name: plain(line.name), cliponaxis: false,
        meta: { arm: -1, kind: "set", told: "", label: plain(line.name) }, ...trace });
      add({ mode: "lines+markers", x: line.x, y: line.y, text: line.told.map(plain),
        line: { width: 2.25, color: ink, dash: line.dash }, cliponaxis: true,
        error_y: { type: "data", array: line.error, color: ink, thickness: 1, width: 0 },
        hovertemplate: "<b>%{meta.label}</b><br>%{text}<br>" +
          `${plain(figure.title.toLowerCase())} %{y:.5~g}<extra></extra>` });
      add({ mode: "markers", x: [line.best[0]], y: [line.best[1]],
        marker: { symbol: "star", size: 14, color: ink, line: { width: 1, color: colour("--paper") } },
        hovertemplate: `<b>${plain(line.name)}</b><br>best: ${plain(line.set)}<extra></extra>` });
      if (line.lost.length) {
        const edge = line.best[1] > (low + high) / 2 ? low : high;
        add({ mode: "markers", x: line.lost, y: line.lost.map(() => edge),
          marker: { symbol: "x", size: 9, color: ink },
          hovertemplate: `<b>${plain(line.name)}</b><br>every set diverged<extra></extra>` });
      }
    }
    return found;
  }

  function setLayout(figure) {
    const base = layout(figure);
    const ends = figure.sets.map((line) => ({ x: line.x.at(-1), y: line.y.at(-1), line }));
    const [low, high] = figure.limits;
    const gap = (high - low) / 14;  // of names at the lines
    ends.sort((a, b) => a.y - b.y);
    ends.forEach((end, n) => {
      end.place = Math.max(Math.min(Math.max(end.y, low), high), n ? ends[n - 1].place + gap : low);
    });
    const names = ends.map(({ place, line }) => ({ text: plain(line.name), x: 1, xref: "paper",
      xanchor: "left", xshift: 8, y: place, showarrow: false,
      font: { color: colour(`--c${line.colour}`) } }));
    const longest = Math.max(...figure.sets.map((line) => line.name.length));
    return { ...base, annotations: names, margin: { ...base.margin, r: Math.min(160, 24 + 8 * longest) },
      xaxis: { ...base.xaxis, title: { text: plain(figure.unit) }, tickvals: figure.ticks,
        ticktext: figure.labels.map(plain), range: figure.range, rangemode: "normal",
        zeroline: false },
      yaxis: { ...base.yaxis, range: figure.limits, zeroline: false } };
  }

  function layout(figure) {
    const axis = { gridcolor: colour("--rule"), zerolinecolor: colour("--rule"),
      linecolor: colour("--edge"), automargin: true };
    return {
      uirevision: "kept", showlegend: false, hovermode: "closest", autosize: true,
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      margin: { l: 50, r: 24, t: 28, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 13, color: colour("--ink") },
      hoverlabel: { bgcolor: colour("--paper"), bordercolor: colour("--edge"), align: "left",
        font: { color: colour("--ink"), size: 13 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"),
        activecolor: colour("--ink") },
      xaxis: { ...axis, rangemode: "tozero", tickformat: "~s",
        title: { text: figure.unit[0].toUpperCase() + figure.unit.slice(1) },
        ticklabeloverflow: "allow" },
      yaxis: { ...axis, title: { text: plain(figure.title) } },
    };
  }

  function settings(figure) {
    return {
      responsive: true, displaylogo: false, scrollZoom: false,
      // By name: none that leads elsewhere.
      modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
      toImageButtonOptions: { format: "svg", filename: figure.file },
    };
  }

  const figureOf = (plot) => report.sections[plot.dataset.section].figures[plot.dataset.figure];

  // Those inside a closed part are not; they are drawn anew whenever it is opened.
  const isShown = (plot) => !plot.closest("details:not([open])");

  function draw(plot) {
    const figure = figureOf(plot);
    const [drawn, frame] = figure.sets ? [setTraces(figure), setLayout(figure)]
      : [traces(+plot.dataset.section, figure), layout(figure)];
    return Plotly.react(plot, drawn, frame, settings(figure));
  }

  function drawAll(within) {
    [...within.querySelectorAll(".plot")].filter(isShown).forEach(draw);
  }

  function show(section) {
    const plots = document.querySelectorAll(`.plot[data-section="${section}"]`);
    for (const plot of [...plots].filter(isShown)) {
      const visible = plot.data.map((t) => isVisible(section, t.meta.kind, t.meta.arm));
      Plotly.restyle(plot, { visible }, visible.map((_, i) => i));
    }
  }

  function press(button) {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    const section = +button.dataset.section, state = states[section];
    if (button.classList.contains("seeds")) state.seeds = on;
    else if (on) state.hidden.delete(+button.dataset.arm);
    else state.hidden.add(+button.dataset.arm);
    show(section);
  }

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  }

  const theme = document.getElementById("theme");
  function recolour() {
    theme.textContent = isDark() ? "Light colours" : "Dark colours";
    drawAll(document);
  }

  // Zoom and move along the samples from the keyboard: factor and shift of the range's width.
  const KEYS = { "+": [0.5, 0], "=": [0.5, 0], "-": [2, 0], ArrowLeft: [1, -0.25],
    ArrowRight: [1, 0.25] };
  function key(event) {
    const plot = event.currentTarget;
    if (event.target !== plot || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "0") {
      Plotly.relayout(plot, { "xaxis.autorange": true, "yaxis.autorange": true });
    } else if (KEYS[event.key]) {
      const [factor, shift] = KEYS[event.key];
      const [low, high] = plot._fullLayout.xaxis.range.map(Number);
      const middle = (low + high) / 2 + shift * (high - low);
      const half = ((high - low) / 2) * factor;
      Plotly.relayout(plot, { "xaxis.range": [middle - half, middle + half] });
    } else return;
    event.preventDefault();
  }

  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    recolour();
  });
  dark.addEventListener("change", recolour);
  for (const tools of document.querySelectorAll(".tools")) tools.hidden = false;
  for (const button of document.querySelectorAll("button[aria-pressed]")) {
    button.addEventListener("click", () => press(button));
  }
  for (const plot of document.querySelectorAll(".plot")) plot.addEventListener("keydown", key);
  for (const details of document.querySelectorAll("details")) {
    details.addEventListener("toggle", () => details.open && drawAll(details));
  }
  recolour();
})();
