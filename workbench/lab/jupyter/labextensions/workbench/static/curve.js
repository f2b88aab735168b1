// Keeps the curve in view: the cell tagged `curve`, where JupyterLab's Run All scrolls to the end of the notebook.

const SETTLING_MS = 6000; // figures above the curve are drawn within this time and move it
const EVERY_MS = 300;
const OWN_SCROLLING = ['wheel', 'pointerdown', 'keydown'];

const isCurve = cell => (cell.model.getMetadata('tags') ?? []).includes('curve');

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
    await new Promise(resolve => setTimeout(resolve, EVERY_MS));
  }
  user.abort();
}

export default function follow(NotebookActions) {
  NotebookActions.executed.connect((_, {notebook, cell, success}) => {
    if (success && isCurve(cell)) void hold(notebook, cell);
  });
  return {
    // Runs all cells of a notebook that has just been opened.
    runAll: async panel => {
      await Promise.all([panel.context.ready, panel.revealed, panel.sessionContext.ready]);
      await panel.sessionContext.session?.kernel?.info;
      const notebook = panel.content;
      void NotebookActions.runCells(notebook, notebook.widgets, panel.sessionContext);
      const curve = notebook.widgets.find(isCurve);
      if (curve) await hold(notebook, curve);
    },
  };
}
