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

const shape = (name, points) => {
  const node = document.createElementNS('http://www.w3.org/2000/svg', name);
  node.setAttribute('points', points.join(' '));
  return node;
};

// The loss as a line, `points` of [step, loss], or the mean of several runs in a band, of [step, mean, least, greatest]; its end
// in words is the number beside it. A loss that diverges leaves the top: the height is that of the lower nine tenths of the values.
export function sparkline(points, reached) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg'), isBand = points[0]?.length > 2;
  svg.setAttribute('class', 'wb-sparkline');
  svg.setAttribute('viewBox', `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute('preserveAspectRatio', 'none');
  svg.setAttribute('role', 'img');
  const spelt = loss => Number(loss.toPrecision(4));
  const said = `${isBand ? 'Mean loss' : 'Loss'} from ${spelt(points[0]?.[1] ?? 0)} to ${reached ?? spelt(points.at(-1)?.[1] ?? 0)}`;
  svg.setAttribute('aria-label', points.length ? said : 'No loss yet');
  if (points.length < 2) return svg;
  const sorted = points.flatMap(([, ...losses]) => losses).sort((a, b) => a - b);
  const low = sorted[0], usual = sorted[Math.floor(0.9 * (sorted.length - 1))];
  const high = Math.min(sorted.at(-1), usual + 2 * (usual - low) || Infinity);
  const end = points.at(-1)[0] - points[0][0];
  const at = (step, loss) => {
    const x = 1 + (WIDTH - 2) * (step - points[0][0]) / end;
    const y = HEIGHT - 1 - (HEIGHT - 2) * (high > low ? (Math.min(loss, high) - low) / (high - low) : 0.5);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  };
  if (isBand) {
    const upper = points.map(([step, , , most]) => at(step, most)), lower = points.map(([step, , least]) => at(step, least));
    svg.append(shape('polygon', [...upper, ...lower.reverse()]));
  }
  svg.append(shape('polyline', points.map(([step, loss]) => at(step, loss))));
  return svg;
}
