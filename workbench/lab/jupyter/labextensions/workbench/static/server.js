// Requests to the server extension. ServerConnection adds the token and JupyterHub's _xsrf.

export default async function connect(library) {
  const {ServerConnection} = await library('@jupyterlab/services');
  const settings = ServerConnection.makeSettings();

  // Returns the JSON that the server answers; throws an Error with the server's sentence if it refuses.
  return async (path, body) => {
    const request = body === undefined ? {} : {method: 'POST', body: JSON.stringify(body)};
    const response = await ServerConnection.makeRequest(`${settings.baseUrl}workbench/${path}`, request, settings);
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(answer.message ?? `The server answered ${response.status}.`);
    return answer;
  };
}
