// JupyterLab loads this file as a classic script and asks the entry that it leaves in window._JUPYTERLAB for its plugins.
(() => {
  const index = new URL('index.js', document.currentScript.src).href;
  let scope = {};
  // Returns a library of the running JupyterLab, such as '@jupyterlab/launcher'.
  const library = async name => {
    const versions = Object.values(scope[name] ?? {});
    if (!versions.length) throw new Error(`This JupyterLab shares no library ${name}.`);
    return (await (versions.find(version => version.loaded) ?? versions[0]).get())();
  };
  window._JUPYTERLAB = window._JUPYTERLAB ?? {};
  window._JUPYTERLAB.workbench = {
    init: shared => { scope = shared; },
    get: async () => {
      const plugins = await (await import(index)).default(library);
      return () => ({__esModule: true, default: plugins});
    },
  };
})();
