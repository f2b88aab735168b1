// Keeps the curve in view: the cell tagged `curve`, where JupyterLab's Run All scrolls to the end of the notebook. Until its
// turn comes, that cell says which cell runs, because the progress of the others is out of view.
import {Parts, slowness, usual} from './countdown.js';
import {addStyle, element, stored} from './drawing.js';

const SETTLING_MS = 6000; // figures above the curve are drawn within this time and move it
const EVERY_MS = 300;
const OWN_SCROLLING = ['wheel', 'pointerdown', 'keydown'];
const AHEAD = 'from workbench.runs.launching.launcher import import_ahead as _ahead; _ahead(); del _ahead';
const SECONDS = 'workbench:cell-times'; // how long cells took in this browser the last times, by their id
const LONGEST_S = 1e6; // longest time of a cell that is believed: anybody may have written the metadata of a notebook
const MOST_REMEMBERED = 200, TIMES = 3;
const STYLE = `
  .workbench-progress { padding: 4px 8px; margin: 4px 0; font-size: var(--jp-ui-font-size1); color: var(--jp-ui-font-color1);
    background: var(--jp-layout-color2); border-left: 3px solid var(--jp-brand-color1); font-variant-numeric: tabular-nums; }
`;

const isCurve = cell => (cell.model.getMetadata('tags') ?? []).includes('curve');
const believed = seconds => (seconds > 0 && seconds < LONGEST_S ? +seconds : 0);
const total = seconds => [seconds].flat().reduce((sum, each) => sum + each, 0);
const pause = () => new Promise(resolve => setTimeout(resolve, EVERY_MS));

// Holds the top of the cell at the top of the notebook until everything above is drawn, or the user scrolls.
async function hold(notebook, cell) {
  const user = new AbortController();
  const signal = user.signal;
  for (const event of OWN_SCROLLING) {
    notebook.node.addEventListener(event, () => user.abort(), {signal, capture: true, passive: true});
  }
  notebook.activeCellIndex = notebook.widgets.indexOf(cell);
  for (const until = Date.now() + SETTLING_MS; Date.now() < until && !signal.aborted && !notebook.isDisposed; ) {
    await notebook.scrollToItem(notebook.widgets.indexOf(cell), 'start', 0).catch(() => {});
    await pause();
  }
  user.abort();
}

// The name by which a cell is known in every copy of its template with the same parameters, which are short as a number.
function known(notebook, cell) {
  const source = widget => widget?.model.sharedModel.getSource() ?? '';
  const parameters = source(notebook.widgets.find(({model}) => (model.getMetadata('tags') ?? []).includes('parameters')));
  const number = [...parameters].reduce((sum, each) => (31 * sum + each.codePointAt(0)) | 0, 0);
  return `${source(notebook.widgets[0]).split('\n')[0]}: ${cell.model.id}: ${number}`;
}

function remember(name, seconds) {
  const {[name]: times = [], ...others} = stored(SECONDS);
  const kept = Object.entries({...others, [name]: [...times, Math.round(seconds)].slice(-TIMES)}).slice(-MOST_REMEMBERED);
  localStorage.setItem(SECONDS, JSON.stringify(Object.fromEntries(kept)));
}

// The seconds that a cell takes, or each of its parts where they are stated: those of the last times in this browser, and
// those that its template states.
function expected(notebook, cell) {
  const value = cell.model.getMetadata('expected_s'), stated = Array.isArray(value) ? value.map(believed) : believed(value);
  const times = stored(SECONDS)[known(notebook, cell)] ?? [], all = total(stated);
  const now = usual(all ? [...times, all] : times);
  return all && Array.isArray(stated) ? stated.map(each => each * now / all) : now;
}

// The words of the call that a cell waits for, if there is one.
function waitsFor(cell) {
  const outputs = cell.outputArea.model;
  for (let at = outputs.length - 1; at >= 0; at--) {
    const {data} = outputs.get(at);
    if (String(data['text/html'] ?? '').includes('workbench-waiting')) return String(data['text/plain']);
  }
  return '';
}

// What a cell does: the words of its call that waits, or the heading above it.
function doing(notebook, cell) {
  const words = waitsFor(cell).replace(/ \([^()]*\)$/, '');
  if (words) return words[0].toLowerCase() + words.slice(1);
  const above = notebook.widgets.slice(0, notebook.widgets.indexOf(cell)).reverse();
  const heading = above.map(({model}) => model.type === 'markdown' && /^#+ (.*)/m.exec(model.sharedModel.getSource())?.[1]);
  return heading.find(Boolean) || 'running';
}

// Shows in the curve's cell what runs above it, from now on until its own turn is over.
function tell(notebook, curve) {
  if (curve.node.querySelector('.workbench-progress')) return;
  const line = element('div', 'workbench-progress', 'starting the kernel');
  line.setAttribute('role', 'status');
  curve.node.insertBefore(line, curve.node.querySelector('.jp-Cell-outputWrapper'));
  const code = notebook.widgets.filter(({model}) => model.type === 'code'), before = code.slice(0, code.indexOf(curve) + 1);
  const took = new Map();  // seconds of cells that have ended
  let current, since = Date.now(), began = false, parts;
  const timer = setInterval(() => {
    const running = before.find(({model}) => model.executionState === 'running');
    const seconds = (Date.now() - since) / 1000;
    if (running !== current) {
      if (current) took.set(current, {seconds, expected: total(expected(notebook, current))});
      if (current && seconds >= 1) remember(known(notebook, current), seconds);
      [current, since, parts] = [running, Date.now(), new Parts(Date.now() / 1000)];
    }
    began ||= Boolean(running);
    if (notebook.isDisposed || curve.isDisposed || (began && !running)) {
      clearInterval(timer);
      line.remove();
      return;
    }
    const runs = (Date.now() - since) / 1000, said = `${Math.floor(runs)} s`;
    if (!running) {
      line.textContent = `starting the kernel, ${said}`;
      return;
    }
    const ended = [...took.values()].map(each => [each.expected, each.seconds]), factor = slowness(ended);
    const own = total(expected(notebook, running)), later = before.slice(before.indexOf(running) + 1);
    parts.hear(waitsFor(running), Date.now() / 1000);
    const left = parts.left(ended, expected(notebook, running), later.map(cell => total(expected(notebook, cell))), Date.now() / 1000);
    const about = factor * own > runs ? `, about ${Math.ceil(factor * own)} s` : '';
    line.textContent = `cell ${code.indexOf(running) + 1} of ${code.length}: ${doing(notebook, running)}${about} (${said})`
      + (left >= 1 && running !== curve ? `; training starts in about ${Math.ceil(left)} s` : '');
  }, EVERY_MS);
}

export default function follow(NotebookActions) {
  addStyle(STYLE);
  NotebookActions.executionScheduled.connect((_, {notebook, cell}) => {
    if (isCurve(cell)) tell(notebook, cell);
  });
  NotebookActions.executed.connect((_, {notebook, cell, success}) => {
    if (success && isCurve(cell)) void hold(notebook, cell);
  });
  return {
    // Runs all cells of a notebook that has just been opened.
    runAll: async panel => {
      await Promise.all([panel.context.ready, panel.revealed]);
      const notebook = panel.content, curve = notebook.widgets.find(isCurve);
      if (curve) {
        tell(notebook, curve);
        void notebook.scrollToItem(notebook.widgets.indexOf(curve), 'start', 0).catch(() => {});
      }
      await panel.sessionContext.ready;
      const kernel = panel.sessionContext.session?.kernel;
      await kernel?.info;
      // Its answer does not matter: a kernel without Workbench says what is wrong in the notebook's first cell.
      kernel?.requestExecute({code: AHEAD, silent: true, store_history: false, stop_on_error: false}).done.catch(() => {});
      void NotebookActions.runCells(notebook, notebook.widgets, panel.sessionContext);
      if (curve) await hold(notebook, curve);
    },
  };
}
