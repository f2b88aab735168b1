// The plugins of Workbench. Each module exports a function that takes `library` (see remoteEntry.js) and returns a plugin.
import launcher from './launcher.js';

const MODULES = [launcher];

export default library => Promise.all(MODULES.map(make => make(library)));
