// Dashboards of the main area, of one run or of several; the server computes the figures, and no kernel runs.
import {element} from './drawing.js';
import {Polled, render} from './plot.js';

const REFRESH_MS = 2000;
const COMMAND = 'workbench:curves';

export default async function curvePanels(library, request) {
  const [{Widget}, {WidgetTracker}] = await Promise.all([library('@lumino/widgets'), library('@jupyterlab/apputils')]);

  class Curves extends Widget {
    constructor(paths, runs) {
      super();
      this.paths = paths;
      this.runs = runs;
      this.id = `workbench-curves-${paths.join('|')}`;
      this.title.label = paths.length === 1 ? paths[0].split('/').at(-1) : `${paths.length} runs`;
      this.title.caption = paths.map(path => runs.rows.get(path)?.place ?? path.split('/').at(-1)).join('\n');
      this.title.closable = true;
      this.addClass('wb-curves');
      this.facts = element('div', 'wb-curve-facts');
      this.note = element('div', 'wb-curve-note', 'reading …');
      this.failures = element('div', 'wb-curve-failures');
      this.plots = [];
      this.ends = [];
      this.node.append(this.facts, this.failures, this.note);
      this.listener = () => this.tell();
      runs.listeners.add(this.listener);
      this.tell();
      this.follow();
    }

    tell() {
      this.facts.replaceChildren(...this.paths.map(path => {
        const row = this.runs.rows.get(path);
        const words = row ? [row.words, row.facts, row.message, row.notes] : ['this run was deleted'];
        return element('div', '', element('b', '', row?.name ?? path.split('/').at(-1)), ` ${words.filter(Boolean).join(' · ')}`);
      }));
    }

    async follow() {
      if (this.isDisposed) return;
      if (!document.hidden && (this.isVisible || !this.seen)) {
        try {
          const answer = await request('curves', {paths: this.paths, seen: this.seen, baseline: this.runs.baseline?.() ?? null});
          if (answer.figures) this.failures.textContent = answer.failures;
          for (const [index, figure] of (answer.figures ?? []).entries()) {
            if (this.plots[index]) this.plots[index].update({figure});
            else this.plots[index] = await this.plot(figure);
          }
          this.seen = answer.seen;
          this.note.textContent = '';
        } catch (error) {
          const gone = this.runs.rows.size && this.paths.every(path => !this.runs.rows.has(path));  // which the facts say
          this.note.textContent = gone ? '' : error.message;
        }
      }
      const ended = this.seen && this.paths.every(path => this.runs.rows.get(path)?.ended);
      this.timer = setTimeout(() => this.follow(), ended ? 5 * REFRESH_MS : REFRESH_MS);
    }

    async plot(figure) {
      const model = new Polled({figure}), el = element('div', 'wb-plot');
      const end = await render({model, el}, async () => (await request('plotly')).source);
      if (this.isDisposed) end();
      else this.node.append(el);
      this.ends.push(end);
      return model;
    }

    dispose() {
      if (this.isDisposed) return;
      clearTimeout(this.timer);
      this.runs.listeners.delete(this.listener);
      this.ends.forEach(end => end());
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
