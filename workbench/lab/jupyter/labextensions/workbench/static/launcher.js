// A card for each template in the launcher's Workbench section. One click makes a named copy in the current folder, runs
// it, and keeps the cell tagged `curve` in view. A form changes the parameters of a copy before it runs.
import connect from './server.js';
import follow from './curve.js';
import {addStyle} from './drawing.js';
import form from './form.js';

const CATEGORY = 'Workbench';
const CARD = `.jp-LauncherCard[data-category="${CATEGORY}"]`;
const STYLE = `
  .jp-Launcher-content { display: flex; flex-direction: column; }
  .jp-Launcher-section:has(${CARD}) { order: -1; }
  .workbench-form { display: grid; grid-template-columns: max-content 16em minmax(14em, 28em);
    gap: 6px 12px; align-items: center; }
  .workbench-form .workbench-refused { grid-column: 1 / -1; color: var(--jp-error-color0, #b00020); font-weight: 600; }
  .workbench-form label, .workbench-form input, .workbench-form select { font-family: var(--jp-code-font-family); }
  .workbench-form .jp-select-wrapper { margin: 0; }
  .workbench-form [aria-invalid] { outline: 2px solid var(--jp-error-color1); }
  .workbench-form small { color: var(--jp-ui-font-color2); }
`;
const drawn = inside => `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" fill="none" stroke-width="2">${inside}</svg>`;
const gray = path => `<path class="jp-icon3" stroke="#616161" d="${path}"/>`;
const blue = path => `<path class="jp-icon-brand0" stroke="#0072b2" d="${path}"/>`;
const AXES = gray('M3 3v18h18');
const CURVE = drawn(AXES + blue('M6 6c2 9 6 11 14 11'));
const ICONS = {  // by the name of the template
  bert_scaling: drawn(AXES + gray('M6 5c2 7 6 8 14 8') + blue('M6 6c2 9 6 12 14 12')),  // two curves
  fine_tuning: drawn(AXES + gray('M6 18c3-9 6-10 14-10') + blue('M6 18c4-12 7-13 14-13')),  // accuracies that rise
  gpt_frontier: drawn(AXES + blue('M5 5v5h5v4h5v3h5') + gray('M10 5h2M15 8h2M19 12h2')),  // a front of memory and speed
  gpt_sweep: drawn(gray('M3 3h18v18H3zM3 9h18M3 15h18M9 3v18M15 3v18') + blue('M9 9h6v6H9z')),  // a grid of plans
  opt_zero: drawn(gray('M4 21V5h4v16zM10 21v-8h4v8') + blue('M16 21v-4h4v4zM10 21v-8h4v8z')),  // memory that is sharded
  scaling_ladder: drawn(AXES + blue('M6 6l14 11') + gray('M7 5v4M12 9v4M17 13v4')),  // a law through points
  sparse_pareto: drawn(gray('M3 3h18v18H3z') + blue('M4 4h5v5H4zM15 9h5v5h-5zM9 15h5v5H9z')),  // blocks of a matrix
  sweep: drawn(AXES + blue('M6 5c2 16 9 16 14 2')),  // a loss with its best rate
};
const SLIDERS = drawn(gray('M3 7h8m6 0h4M3 17h3m6 0h9') + blue('M11 4h6v6h-6zM6 14h6v6H6z'));

export default async function launcher(library) {
  const [{ILauncher}, apputils, {LabIcon}, {IDefaultFileBrowser}, {NotebookActions}, {Widget}, request] =
    await Promise.all([
      library('@jupyterlab/launcher'),
      library('@jupyterlab/apputils'),
      library('@jupyterlab/ui-components'),
      library('@jupyterlab/filebrowser'),
      library('@jupyterlab/notebook'),
      library('@lumino/widgets'),
      connect(library),
    ]);

  return {
    id: 'workbench:launcher',
    autoStart: true,
    optional: [ILauncher, IDefaultFileBrowser, apputils.ICommandPalette],
    activate: async (app, launcher, browser, palette) => {
      addStyle(STYLE);
      const curve = follow(NotebookActions);
      const {templates} = await request('templates');

      const folderOf = cwd => app.serviceManager.contents.localPath(cwd ?? browser?.model.path ?? '');
      // Makes a copy, opens it and runs it; `parameters` holds the text of each value that the user changed.
      const start = async ({name}, cwd, parameters = {}) => {
        const {path} = await request('notebooks', {template: name, folder: folderOf(cwd), parameters});
        await request('session', {path}).catch(() => {});  // without it, the notebook starts a kernel of its own
        const panel = await app.commands.execute('docmanager:open', {path, factory: 'Notebook'});
        void curve.runAll(panel);
        return panel;
      };
      // While somebody looks at the cards, a kernel imports what their notebooks use.
      const prepare = ({content} = {}) => {
        if (!content?.node?.classList.contains('jp-Launcher')) return;
        request('kernel', {folder: folderOf(content.cwd)}).catch(() => {});
      };
      const refuse = ({title}, error) => apputils.showErrorMessage(`${title} was not started`, error.message);

      const startWithParameters = async (template, cwd) => {
        const {parameters} = await request(`parameters?template=${encodeURIComponent(template.name)}`);
        for (let given = {}, refusal = ''; ; ) {
          const body = form(Widget, parameters, given, refusal);
          const buttons = [apputils.Dialog.cancelButton(), apputils.Dialog.okButton({label: 'Start'})];
          const answer = await apputils.showDialog({title: template.title, body, buttons, focusNodeSelector: '.workbench-begin'});
          if (!answer.button.accept) return undefined;
          given = answer.value;
          try {
            return await start(template, cwd, given);
          } catch (error) {
            refusal = error.message;
          }
        }
      };

      templates.forEach((template, rank) => {
        const command = `workbench:start-${template.name}`;
        app.commands.addCommand(command, {
          label: template.title,
          caption: `${template.description}\nRight-click to change its parameters.`,
          icon: new LabIcon({name: `workbench:${template.name}`, svgstr: ICONS[template.name] ?? CURVE}),
          execute: ({cwd}) => start(template, cwd).catch(error => refuse(template, error)),
        });
        launcher?.add({command, category: CATEGORY, rank});
        palette?.addItem({command, category: CATEGORY});
      });

      const current = () => prepare(app.shell.currentWidget ?? undefined);
      app.shell.currentChanged?.connect(current);
      void app.restored.then(current);
      let pointed = null;
      document.addEventListener('pointerover', ({target}) => {
        const card = target.closest?.(CARD) ?? null;
        if (card && card !== pointed) prepare([...app.shell.widgets('main')].find(({node}) => node.contains(card)));
        pointed = card;
      });

      // The template of the card whose menu was used, or the one that the user chooses.
      const chosen = async ofCard => {
        const card = ofCard && app.contextMenuHitTest(node => node.matches(CARD));
        const title = card?.querySelector('.jp-LauncherCard-label')?.textContent;
        const found = templates.find(template => template.title === title);
        if (found) return found;
        const titles = templates.map(template => template.title);
        const {value} = await apputils.InputDialog.getItem({title: 'Which template?', items: titles});
        return templates.find(template => template.title === value);
      };
      app.commands.addCommand('workbench:start-with-parameters', {
        label: 'Change parameters…',
        caption: 'Start a template with other parameters.',
        icon: new LabIcon({name: 'workbench:sliders', svgstr: SLIDERS}),
        execute: async ({cwd, ofCard}) => {
          const template = await chosen(ofCard);
          return template && startWithParameters(template, cwd).catch(error => refuse(template, error));
        },
      });
      launcher?.add({command: 'workbench:start-with-parameters', category: CATEGORY, rank: templates.length});
      palette?.addItem({command: 'workbench:start-with-parameters', category: CATEGORY});
      app.contextMenu.addItem({
        command: 'workbench:start-with-parameters', args: {ofCard: true}, selector: CARD, rank: 0,
      });
    },
  };
}
