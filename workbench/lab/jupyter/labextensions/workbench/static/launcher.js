// A card for each template in the launcher's Workbench section: one click makes a named copy and opens it.
import connect from './server.js';

const CATEGORY = 'Workbench';
const ICON = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" fill="none" stroke-width="2">
  <path class="jp-icon3" stroke="#616161" d="M3 3v18h18"/>
  <path class="jp-icon-brand0" stroke="#0072b2" d="M6 6c2 9 6 11 14 11"/>
</svg>`;

export default async function launcher(library) {
  const [{ILauncher}, {showErrorMessage}, {LabIcon}, request] = await Promise.all([
    library('@jupyterlab/launcher'),
    library('@jupyterlab/apputils'),
    library('@jupyterlab/ui-components'),
    connect(library),
  ]);
  return {
    id: 'workbench:launcher',
    autoStart: true,
    optional: [ILauncher],
    activate: async (app, launcher) => {
      const icon = new LabIcon({name: 'workbench:template', svgstr: ICON});
      const {templates} = await request('templates');
      templates.forEach(({name, title, description}, rank) => {
        const command = `workbench:new-${name}`;
        app.commands.addCommand(command, {
          label: title,
          caption: description,
          icon,
          execute: async ({cwd = ''}) => {
            try {
              const {path} = await request('notebooks', {template: name, folder: cwd});
              return await app.commands.execute('docmanager:open', {path, factory: 'Notebook'});
            } catch (error) {
              await showErrorMessage(`${title} cannot be started`, error.message);
            }
          },
        });
        launcher?.add({command, category: CATEGORY, rank});
      });
    },
  };
}
