// Dashboards of the main area, of one run or of several; the server computes the figures, and no kernel runs.
import {element} from './drawing.js';

const REFRESH_MS = 2000;
const MUTED = '#5B6472';  // of figures; other colours are those of runs
const LOSS_PX = 460;  // titles and menus are placed for about this height
const COMMAND = 'workbench:curves';
const ENDED = ['finished', 'stopped', 'failed'];

// Returns Plotly, which the first figure of a page loads; widgets of notebooks share it.
async function plotly(request) {
  globalThis.workbenchPlotly ??= (async () => {
    const {source} = await request('plotly');
    // the page has a module loader of its own, which would otherwise be given plotly.js instead of the window
    const parts = ['const module = undefined, exports = undefined, define = undefined;\n', source];
    const url = URL.createObjectURL(new Blob(parts, {type: 'text/javascript'}));
    await import(url).finally(() => URL.revokeObjectURL(url));
    return globalThis.Plotly;
  })().catch(error => {
    globalThis.workbenchPlotly = undefined;  // the next figure tries again
    throw error;
  });
  return globalThis.workbenchPlotly;
}

// Returns the figure's layout in the colours of JupyterLab's theme, as wide as its node.
function themed(layout, node, height) {
  const style = getComputedStyle(document.body), color = name => style.getPropertyValue(name).trim();
  const ink = color('--jp-ui-font-color1'), paper = color('--jp-layout-color1'), grid = color('--jp-border-color2');
  const text = part => ({...part, font: {...part?.font, color: ink}});
  const axes = Object.fromEntries(Object.entries(layout).filter(([name]) => /^[xy]axis/.test(name)).map(([name, axis]) =>
    [name, {...axis, title: text(axis.title), color: ink, gridcolor: grid, linecolor: grid, zerolinecolor: grid,
      tickfont: {...axis.tickfont, color: ink}}]));
  return {
    ...layout,
    ...axes,
    paper_bgcolor: paper,
    plot_bgcolor: paper,
    font: {...layout.font, color: ink},
    title: {...text(layout.title), ...(layout.title?.subtitle && {subtitle: text(layout.title.subtitle)})},
    legend: {...text(layout.legend), bgcolor: paper, bordercolor: grid},
    updatemenus: (layout.updatemenus ?? []).map(menu => ({...text(menu), bgcolor: paper, bordercolor: grid})),
    uirevision: 'kept',  // a zoom stays when the curves grow
    autosize: false,
    annotations: (layout.annotations ?? []).map(part => part.font?.color === MUTED ? text(part) : part),
    width: node.clientWidth,
    height,
  };
}

export default async function curvePanels(library, request) {
  const [{Widget}, {WidgetTracker}] = await Promise.all([library('@lumino/widgets'), library('@jupyterlab/apputils')]);

  class Curves extends Widget {
    constructor(paths, runs) {
      super();
      this.paths = paths;
      this.runs = runs;
      this.id = `workbench-curves-${paths.join('|')}`;
      this.title.label = paths.length === 1 ? paths[0].split('/').at(-1) : `${paths.length} runs`;
      this.title.caption = paths.map(path => path.split('/').slice(-2).join('/')).join('\n');
      this.title.closable = true;
      this.addClass('wb-curves');
      this.facts = element('div', 'wb-curve-facts');
      this.note = element('div', 'wb-curve-note', 'reading …');
      this.failures = element('div', 'wb-curve-failures');
      this.plots = [];
      this.node.append(this.facts, this.failures, this.note);
      this.listener = () => this.tell();
      runs.listeners.add(this.listener);
      this.sized = new ResizeObserver(() => this.draw());
      this.sized.observe(this.node);
      this.theme = new MutationObserver(() => setTimeout(() => this.draw(), 300));  // when its style sheet is there
      this.theme.observe(document.body, {attributeFilter: ['data-jp-theme-name']});
      this.tell();
      this.follow();
    }

    tell() {
      this.facts.replaceChildren(...this.paths.map(path => {
        const row = this.runs.rows.get(path);
        const words = row ? [row.words, row.facts, row.message, row.notes] : ['this run is gone'];
        return element('div', '', element('b', '', row?.name ?? path), ` ${words.filter(Boolean).join(' · ')}`);
      }));
    }

    async follow() {
      if (this.isDisposed) return;
      if (!document.hidden && (this.isVisible || !this.figures)) {
        try {
          const answer = await request('curves', {paths: this.paths, seen: this.seen});
          this.seen = answer.seen;
          if (answer.figures) {
            this.figures = answer.figures;
            this.failures.textContent = answer.failures;
            await this.draw();
          }
          this.note.textContent = '';
        } catch (error) {
          this.note.textContent = error.message;
        }
      }
      const ended = this.figures && this.paths.every(path => ENDED.includes(this.runs.rows.get(path)?.state));
      this.timer = setTimeout(() => this.follow(), ended ? 5 * REFRESH_MS : REFRESH_MS);
    }

    async draw() {
      if (!this.figures || this.isDisposed) return;
      const Plotly = await plotly(request);
      if (!this.node.clientWidth || this.isDisposed) return;  // hidden: the observer asks again
      const config = {displaylogo: false, responsive: false};
      for (const [index, {data, layout}] of this.figures.entries()) {
        this.plots[index] ??= this.node.appendChild(element('div', 'wb-plot'));
        const plot = this.plots[index], height = layout.height ?? LOSS_PX;
        if (this.isDisposed) return;
        this.drawing = Plotly.react(plot, data, themed(layout, plot, height), config);
        await this.drawing;
      }
    }

    dispose() {
      if (this.isDisposed) return;
      clearTimeout(this.timer);
      this.runs.listeners.delete(this.listener);
      this.sized.disconnect();
      this.theme.disconnect();
      const purge = () => this.plots.forEach(plot => globalThis.Plotly?.purge(plot));
      Promise.resolve(this.drawing).catch(() => {}).then(purge);  // plotly.js draws again for its margins
      super.dispose();
    }
  }

  // Returns the function that opens a panel, and brings panels back when the page is loaded again.
  return (app, restorer, runs) => {
    const tracker = new WidgetTracker({namespace: 'workbench-curves'});
    const open = paths => {
      const id = `workbench-curves-${paths.join('|')}`;
      const panel = tracker.find(widget => widget.id === id) ?? new Curves(paths, runs);
      if (!panel.isAttached) {
        app.shell.add(panel, 'main');
        tracker.add(panel);
      }
      app.shell.activateById(panel.id);
      return panel;
    };
    app.commands.addCommand(COMMAND, {label: 'Workbench: curves of runs', execute: ({paths}) => paths?.length && open(paths)});
    restorer?.restore(tracker, {command: COMMAND, args: ({paths}) => ({paths}), name: ({id}) => id});
    return open;
  };
}
