// Draws figures whose state changes, in a notebook and in the pages of the sidebar. A figure is a model as anywidget has it:
// `get`, `set`, `save_changes`, `on` and `off`. Its states come from a kernel over a comm (`Plot` of live_widget.py) or from
// the server in answers over HTTP (`Polled`). `figure` is JSON with `layout`, `config`, the `name` that a screen reader says,
// and either `data` (all traces) or `traces` (their number; each is then a state of its own, `trace_0`, `trace_1`, ...).

// The model of a figure that a page asks for: `update` takes an answer.
export class Polled {
  listeners = new Map();
  constructor(states) { this.states = states; }
  get(name) { return this.states[name]; }
  set(name, value) { this.states[name] = value; }
  save_changes() {}
  on(event, listener) { this.listeners.set(event, listener); }
  off(event) { this.listeners.delete(event); }
  update(states) {
    Object.assign(this.states, states);
    Object.keys(states).forEach(name => this.listeners.get(`change:${name}`)?.());
  }
}

// Returns plotly.js, which the first figure of a page loads from its source. All others wait for that one, in `render`:
// anywidget allows a module two seconds to load, which a busy machine exceeds.
function plotly(source) {
  globalThis.workbenchPlotly ??= load(source).catch(error => {
    globalThis.workbenchPlotly = undefined;  // the next figure tries again
    throw error;
  });
  return globalThis.workbenchPlotly;
}

async function load(source) {
  // a page with a module loader of its own would otherwise be given plotly.js instead of the window
  const parts = ["const module = undefined, exports = undefined, define = undefined;\n", await source()];
  const url = URL.createObjectURL(new Blob(parts, { type: "text/javascript" }));
  try {
    await import(/* @vite-ignore */ /* webpackIgnore: true */ url);
  } finally {
    URL.revokeObjectURL(url);
  }
  return globalThis.Plotly;
}

// Returns the source of plotly.js out of the kernel's model that `library` names.
async function packed(model) {
  const library = await model.widget_manager.get_model(model.get("library").slice("IPY_MODEL_".length));
  const unpacked = new Blob([library.get("packed")]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(unpacked).blob();
}

function bytes(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text), values = new Uint8Array(letters.length);
  for (let at = 0; at < values.length; at++) values[at] = letters.charCodeAt(at);
  return values;
}

function decoded(trace) {
  for (const [name, column] of Object.entries(trace)) {
    if (typeof column?.float64 !== "string") continue;
    const values = new Float64Array(bytes(column.float64).buffer), width = column.width;
    trace[name] = !width ? values
      : Array.from({ length: values.length / width }, (_, row) => values.subarray(row * width, (row + 1) * width));
  }
  return trace;
}

// Names the controls beside a figure for screen readers, which ipywidgets does not: its sliders have no name, and those over
// a list tell a position in it; buttons of several rows have the same text. A button's title tells them apart.
const named = new WeakSet();

function nameControls(root) {
  if (!root) return;
  const set = (node, name, value) => node.getAttribute(name) === value || node.setAttribute(name, value);
  const name = () => {
    for (const slider of root.querySelectorAll(".widget-slider")) {
      const words = part => slider.querySelector(part)?.textContent.trim();
      for (const handle of slider.querySelectorAll("[role=slider]")) {
        set(handle, "aria-label", words(".widget-label") ?? "");
        if (words(".widget-readout")) set(handle, "aria-valuetext", words(".widget-readout"));
      }
    }
    for (const button of root.querySelectorAll("button[title]"))
      if (button.title.startsWith(button.textContent.trim())) set(button, "aria-label", button.title);
      else button.removeAttribute("aria-label");
  };
  name();
  if (named.has(root)) return;
  named.add(root);
  new MutationObserver(name).observe(root, { attributeFilter: ["title", "aria-valuetext"], subtree: true });
}

// Draws the figure of a model into an element from now on; returns the function that ends it.
export async function render({ model, el }, source = () => packed(model)) {
  const Plotly = await plotly(source);
  const node = document.createElement("div");
  node.setAttribute("role", "figure");
  el.append(node);
  const parsed = [];  // for each trace: its JSON text and its value
  let timer = null, stale = true, ended = 0, duration = 0, width = 0, listening = false, gone = false;
  let pointing = null, drawing = null;

  const trace = index => {
    const text = model.get(`trace_${index}`);
    if (parsed[index]?.text !== text) parsed[index] = { text, value: decoded(JSON.parse(text)) };
    return { ...parsed[index].value };
  };

  const draw = () => {
    timer = null;
    if (gone || !node.offsetWidth) return;  // not on the page yet: the observer asks again
    if (node._dragging) return ask(50);
    const started = performance.now();
    const { traces, data, layout, config, name } = JSON.parse(model.get("figure"));
    stale = false;
    if (!layout) return;
    width = node.offsetWidth;
    node.setAttribute("aria-label", name);
    nameControls(node.closest(".jp-OutputArea-output"));
    const shown = data ?? Array.from({ length: traces }, (_, index) => trace(index));
    drawing = Plotly.react(node, shown, { ...layout, width, autosize: false }, { ...config, responsive: false });
    if (!listening) {
      node.on("plotly_afterplot", tell);
      node.on("plotly_hover", point);
      setTimeout(ask, 1000);  // the second drawing is twice as fast: have it before the user acts
      setTimeout(rehearse, 1500);
      listening = true;
    }
    ended = performance.now();
    duration = ended - started;
  };

  const rehearse = () => {  // draws once, out of sight, so that the browser compiles what it needs
    const text = model.get("rehearsal");
    if (gone || !text) return;
    if (timer !== null) return setTimeout(rehearse, 1000);
    const { data, layout, config } = JSON.parse(text);
    const stage = document.createElement("div");
    stage.style = `position:absolute;visibility:hidden;left:-9999px;width:${width}px`;
    document.body.append(stage);
    Plotly.newPlot(stage, data, { ...layout, width, autosize: false }, { ...config, responsive: false });
    Plotly.purge(stage);
    stage.remove();
    model.set("rehearsal", "");
    model.save_changes();
  };

  const ask = (after = 0) => {  // leaves the page as much time for other work as the last drawing took
    stale = true;
    if (timer !== null) return;
    const wait = Math.max(after, ended + duration - performance.now());
    timer = wait > 0 ? setTimeout(draw, wait) : 0;
    if (timer === 0) queueMicrotask(draw);  // waits until all states of one message are set
  };

  const changed = () => ask();
  const { traces: count = 0 } = JSON.parse(model.get("figure"));
  const states = ["figure", ...Array.from({ length: count }, (_, index) => `trace_${index}`)];

  const tell = () => {  // plotly_relayout would come later than the drawing that it reports
    const { range, autorange } = node._fullLayout.xaxis ?? {};
    const seen = autorange || !range ? null : range.map(Number);
    if (JSON.stringify(seen) === JSON.stringify(model.get("visible"))) return;
    model.set("visible", seen);
    model.save_changes();
  };

  const point = ({ points }) => {  // the kernel hears of the last of many movements
    const x = Number(points[0]?.x);
    if (!model.get("tells_hover") || !Number.isFinite(x) || x === model.get("hovered")) return;
    model.set("hovered", x);
    clearTimeout(pointing);
    pointing = setTimeout(() => model.save_changes(), 80);
  };

  const fit = new ResizeObserver(() => {
    if (node.offsetWidth && (stale || node.offsetWidth !== width)) ask();
  });

  if (model.get("visible")) {  // a page that was loaded again shows the whole axis
    model.set("visible", null);
    model.save_changes();
  }
  draw();
  fit.observe(el);
  states.forEach(name => model.on(`change:${name}`, changed));
  return () => {
    states.forEach(name => model.off(`change:${name}`, changed));
    fit.disconnect();
    clearTimeout(timer);
    clearTimeout(pointing);
    gone = true;
    Promise.resolve(drawing).catch(() => {}).then(() => Plotly.purge(node));  // plotly.js draws again for its margins
  };
}
export default { render };
