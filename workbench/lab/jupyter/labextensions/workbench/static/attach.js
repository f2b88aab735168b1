// A button beside the last state of a view whose kernel has ended. It runs, in a new cell, the call that the words name.
import {addStyle, element} from './drawing.js';

const CALL = '.workbench-saved-last code';
const OURS = /^wb\.(live|sweeps\.load_(sweep|grid))\([^()\n]*\)$/;  // nothing else that a stranger's notebook holds is run
const ARRIVED = 'workbench-last-state-arrived';
const STYLE = `@keyframes ${ARRIVED} { from { outline-color: transparent; } } ${CALL} { animation: ${ARRIVED} 1ms; }`;

export default async function attach(library) {
  const {NotebookActions} = await library('@jupyterlab/notebook');
  return {
    id: 'workbench:attach',
    autoStart: true,
    activate: app => {
      addStyle(STYLE);
      const run = (call, button) => {
        const holds = ({node}) => node.contains(button);
        const panel = [...app.shell.widgets('main')].find(({content}) => content?.widgets?.some?.(holds));
        const notebook = panel.content;
        notebook.activeCellIndex = notebook.widgets.findIndex(holds);
        NotebookActions.insertBelow(notebook);
        notebook.activeCell.model.sharedModel.setSource(`import workbench as wb\n${call}`);
        void NotebookActions.run(notebook, panel.sessionContext);
        return notebook.scrollToItem(notebook.activeCellIndex, 'start', 0);
      };
      document.addEventListener('animationstart', ({target, animationName}) => {
        if (animationName !== ARRIVED || target.parentElement.querySelector('button')) return;
        if (!OURS.test(target.textContent)) return;
        const button = element('button', 'jp-mod-styled jp-mod-accept', 'Attach');
        button.title = 'Run this call in a new cell.';
        button.addEventListener('click', () => void run(target.textContent, button));
        target.after(' ', button);
      });
    },
  };
}
