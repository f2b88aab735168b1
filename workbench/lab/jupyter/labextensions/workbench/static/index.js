// The plugins of Workbench. Each module exports a function that takes `library` (see remoteEntry.js) and returns a plugin.
const MODULES = ['attach.js', 'figures.js', 'launcher.js', 'sidebar.js'];

// A fault of one module, such as a library that this JupyterLab does not share, leaves the others in the page.
export default async library => {
  const made = await Promise.allSettled(MODULES.map(async name => (await import(`./${name}`)).default(library)));
  made.forEach(({reason}, index) => reason && console.error(`Workbench goes without ${MODULES[index]}: ${reason}`));
  return made.flatMap(({status, value}) => status === 'fulfilled' ? [value] : []);
};
