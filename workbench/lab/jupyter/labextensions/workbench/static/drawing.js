// Small parts of the page. Text goes through textContent only, so that no name of a run is ever read as HTML.

// An element of a class; strings become text.
export function element(tag, className = '', ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

// Adds rules of CSS to the page.
export function addStyle(rules) {
  document.head.append(element('style', '', rules));
}

// Returns the object that this browser remembers under a name.
export function stored(name) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? {};
  } catch {
    return {};
  }
}

export function age(seconds) {
  if (!seconds) return '';
  const past = Math.max(0, Date.now() / 1000 - seconds);
  const [unit, size] = [['d', 86400], ['h', 3600], ['min', 60], ['s', 1]].find(([, size]) => past >= size) ?? ['s', 1];
  return `${Math.floor(past / size)} ${unit}`;
}

const WIDTH = 84, HEIGHT = 18;

// The loss as a line, whose end in words is the number beside it. A loss that diverges leaves the top: the height is that
// of the lower nine tenths of the values.
export function sparkline(points, end = points.at(-1)?.[1]) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('class', 'wb-sparkline');
  svg.setAttribute('viewBox', `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute('role', 'img');
  svg.setAttribute('aria-label', points.length ? `Loss from ${points[0][1]} to ${end}` : 'No loss yet');
  if (points.length < 2) return svg;
  const losses = points.map(([, loss]) => loss), sorted = [...losses].sort((a, b) => a - b);
  const low = sorted[0], usual = sorted[Math.floor(0.9 * (sorted.length - 1))];
  const high = Math.min(sorted.at(-1), usual + 2 * (usual - low) || Infinity);
  const end = points.at(-1)[0] - points[0][0];
  const line = points.map(([step, loss]) => {
    const x = 1 + (WIDTH - 2) * (step - points[0][0]) / end;
    const y = HEIGHT - 1 - (HEIGHT - 2) * (high > low ? (Math.min(loss, high) - low) / (high - low) : 0.5);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  const path = document.createElementNS('http://www.w3.org/2000/svg', 'polyline');
  path.setAttribute('points', line.join(' '));
  svg.append(path);
  return svg;
}
