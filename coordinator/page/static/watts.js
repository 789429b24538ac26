// The chart of the watts of a supply, or of the whole fleet, over the last minutes.
"use strict";
(async () => {
  const KEPT = 900;
  const place = document.getElementById("watts");
  if (place === null) return;
  const columns = [[], [], [], []];
  const add = (each) => {
    if (columns[0].length > 0 && each.at_unix_s <= columns[0].at(-1)) return;
    [each.at_unix_s, each.budget_w, each.set_aside_w, each.drawn_w].forEach((value, k) => columns[k].push(value));
    if (columns[0].length > KEPT) columns.forEach((column) => column.shift());
  };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const width = () => Math.max(240, place.clientWidth);
  const watts = (_, value) => (value === null ? "-" : `${value.toFixed(1)} W`);
  const clock = (unix_s) => new Date(1000 * unix_s).toLocaleTimeString([], { hour12: false });
  // Ten thousand watts and more need room.
  const labelWidth = (_, labels) => 24 + 8 * Math.max(5, ...(labels ?? []).map((label) => label.length));
  const points = { show: false };
  let chart = null;

  // Without a cursor on the chart, the legend has the newest values.
  function show() {
    chart.setData(columns);
    if (chart.cursor.idx == null) chart.setLegend({ idx: columns[0].length - 1 });
  }

  function draw() {
    if (chart !== null) chart.destroy();
    const axis = { stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    const options = {
      width: width(),
      height: 220,
      scales: { y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map(clock), space: 90 }, { ...axis, values: (_, ticks) => ticks.map((tick) => `${tick} W`), size: labelWidth }],
      series: [
        { label: "Time", value: (_, at) => (at === null ? "-" : clock(at)) },
        { label: "Allowed", stroke: colour("--vermillion"), width: 2, dash: [8, 4], value: watts, points },
        { label: "Set aside", stroke: colour("--blue"), width: 2, value: watts, points },
        { label: "Drawn", stroke: colour("--green"), width: 2, dash: [2, 3], value: watts, points },
      ],
    };
    chart = new uPlot(options, columns, place);
    show();
  }

  try {
    const { supply } = place.dataset;
    const query = supply === undefined ? "" : `?${new URLSearchParams({ supply })}`;
    (await (await fetch(`/watts.json${query}`)).json()).forEach(add);
  } catch {
    // The updates bring what is missing.
  }
  draw();
  document.addEventListener("watts", (event) => {
    add(event.detail);
    show();
  });
  new ResizeObserver(() => chart.setSize({ width: width(), height: 220 })).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
