"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
const touch = !matchMedia("(hover: hover) and (pointer: fine)").matches;

function theme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = {
    automargin: true, gridcolor: colour("--rule"), linecolor: colour("--soft"), showline: true, ticks: "outside",
    tickcolor: colour("--soft"), ticklen: 4, zeroline: false, title: { standoff: 8 },
  };
  return {
    ink: colour("--ink"),
    layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, bargap: 0.3,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("--ink") },
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--soft"), font: { color: colour("--ink") } },
      margin: { l: 52, r: 12, t: 24, b: 44 }, annotationdefaults: { showarrow: false },
      xaxis: axis, yaxis: axis, uniformtext: { minsize: 10, mode: "hide" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--ink") },
      // A finger on a plot scrolls the page.
      dragmode: touch ? false : "zoom",
    },
  };
}

function draw() {
  const { ink, layout } = theme();
  const source = document.getElementById("figures").textContent;
  const figures = JSON.parse(source, (key, value) => (value === "@ink" ? ink : value));
  for (const [id, figure] of Object.entries(figures)) {
    const buttons = { displayModeBar: touch ? false : "hover", modeBarButtonsToRemove: ["select2d", "lasso2d"] };
    const config = { responsive: true, displaylogo: false, ...buttons };
    Plotly.react(id, figure.data, { ...figure.layout, template: { layout } }, config);
  }
}

draw();
dark.addEventListener("change", draw);
