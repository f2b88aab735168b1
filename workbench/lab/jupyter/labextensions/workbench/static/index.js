// The plugins of Workbench. Each module exports a function that takes `library` (see remoteEntry.js) and returns a plugin.
import figures from './figures.js';
import launcher from './launcher.js';
import sidebar from './sidebar.js';

const MODULES = [figures, launcher, sidebar];

export default library => Promise.all(MODULES.map(make => make(library)));
