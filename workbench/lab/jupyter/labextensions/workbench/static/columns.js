// The columns of the table of runs: what each says of a row, and how rows are ordered by it.
import {age, element, sparkline} from './drawing.js';

// Returns how the server spells a number of a row, such as "82.1 k".
export const written = (row, name) => row.written?.[name] ?? '';

export function badge({words = '', color = ''}) {
  const node = element('span', 'wb-badge', words.split(', ').at(-1));
  node.style.background = color;
  return node;
}

export const curve = row => sparkline(row.band ?? row.losses ?? [], row.written?.training_loss);

const number = (label, width, name, down = false) =>
  ({label, width, down, number: true, value: row => row[name], show: row => written(row, name)});

// For each column its name, width as CSS, the value by which it orders, what it shows, and whether larger values come first.
const FIXED = {
  state: {label: 'State', width: '86px', value: row => row.state, show: badge},
  curve: {label: 'Loss curve', width: '92px', show: curve},
  eval_loss: number('Held-out loss', '124px', 'eval_loss'),
  training_loss: number('Training loss', '124px', 'training_loss'),
  difference: {label: 'From baseline', width: '116px', number: true, value: row => row.difference?.value, show: row => row.difference?.words ?? ''},
  step: number('Step', '112px', 'step'),
  tokens: number('Tokens', '80px', 'tokens', true),
  tokens_per_s: number('Tokens/s', '80px', 'tokens_per_s', true),
  mfu: number('MFU', '60px', 'mfu', true),
  left: number('Left', '80px', 'eta_s'),
  devices: {label: 'Devices', width: '76px', number: true, value: row => row.devices, show: row => row.devices ?? ''},
  peak: number('Peak memory', '100px', 'peak_bytes'),
  age: {label: 'Age', width: '64px', number: true, value: row => -row.created, show: row => age(row.time || row.created)},
  tags: {label: 'Tags', width: 'minmax(60px, 1fr)', value: row => row.tags.join(', '), show: row => row.tags.join(', ')},
  notes: {label: 'Notes', width: 'minmax(80px, 1.5fr)', value: row => row.notes, show: row => row.notes ?? ''},
};
export const NAME = {label: 'Name', width: 'minmax(180px, 2.5fr)', value: row => row.name};
export const USUAL = ['state', 'curve', 'eval_loss', 'training_loss', 'difference', 'step', 'tokens_per_s', 'age', 'tags'];
const MARK = 'set:';  // begins the name of a column that holds a value of the experiment

// All columns by name: the fixed ones, then each value of the experiments that is not the same in all of these rows.
export function columnsOf(rows) {
  const found = new Map();
  for (const {settings = {}} of rows) {
    for (const [name, value] of Object.entries(settings)) (found.get(name) ?? found.set(name, new Set()).get(name)).add(value);
  }
  const differ = [...found].filter(([name, values]) => name !== 'name' && values.size > 1).map(([name]) => name).sort();
  return {...FIXED, ...Object.fromEntries(differ.map(name => [MARK + name, settingColumn(name)]))};
}

function settingColumn(name) {
  const value = row => row.settings?.[name];
  const show = row => typeof value(row) === 'number' ? String(Number(value(row).toPrecision(6))) : String(value(row) ?? '');
  return {label: name, width: 'minmax(72px, 1fr)', setting: true, value, show};
}

// Returns the comparison of two rows by a column; a row without a value comes last in both directions.
export function comparison({value}, down) {
  return (a, b) => {
    const [first, second] = [value(a), value(b)], missing = one => one == null || one === '';
    if (missing(first) || missing(second)) return missing(first) - missing(second) || b.created - a.created;
    const order = typeof first === 'number' && typeof second === 'number' ? first - second
      : String(first).localeCompare(String(second), undefined, {numeric: true});
    return (down ? -order : order) || b.created - a.created;
  };
}
