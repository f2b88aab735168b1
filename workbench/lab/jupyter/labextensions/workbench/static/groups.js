// Runs of a sweep, a grid or seeds as one row: which belong together, and what their row says.
import {age} from './drawing.js';

export const STATES = ['running', 'queued', 'starting', 'stalled', 'finished', 'stopped', 'failed'];
const MOST_NAMED = 4;  // labels in the name of a member

// Returns the groups of some rows by their ids: two runs of a sweep or a grid, or of one recipe whose seeds differ.
export function groupsOf(rows) {
  const groups = Map.groupBy(rows.filter(row => row.group), row => row.group.id);
  for (const [id, members] of groups) {
    const seeds = new Set(members.map(({group}) => group.labels.seed));
    if (members.length < 2 || (members[0].group.of === 'seeds' && seeds.size < 2)) groups.delete(id);
  }
  return groups;
}

// Returns what tells a member from the others of its group, such as "learning_rate 0.001 · seed 1".
export function labelIn(members) {
  const names = [...new Set(members.flatMap(({group}) => Object.keys(group.labels)))];
  const differ = names.filter(name => new Set(members.map(({group}) => group.labels[name])).size > 1);
  return ({group, name}) => differ.slice(0, MOST_NAMED).filter(label => label in group.labels)
    .map(label => `${label} ${group.labels[label]}`).join(' · ') || name;
}

const short = value => String(Number(value.toPrecision(4)));
const known = (rows, name) => rows.map(row => row[name]).filter(value => value != null);
const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;

// Returns a mean with half of the distance from the least to the greatest value: "3.214 ± 0.035".
export function withBand(values) {
  const half = (Math.max(...values) - Math.min(...values)) / 2;
  if (half < 1e-12) return short(values[0]);
  const digits = Math.min(6, Math.max(0, 1 - Math.floor(Math.log10(half))));
  return `${mean(values).toFixed(digits)} ± ${half.toFixed(digits)}`;
}

// Returns the mean curve of some rows with the least and the greatest loss, up to where the shortest ends.
export function bandOf(rows, points = 40) {
  const curves = rows.map(({losses = []}) => losses).filter(curve => curve.length > 1);
  if (!curves.length) return [];
  const first = Math.max(...curves.map(curve => curve[0][0])), last = Math.min(...curves.map(curve => curve.at(-1)[0]));
  if (last <= first) return [];
  return Array.from({length: points}, (_, index) => {
    const at = first + (last - first) * index / (points - 1);
    const values = curves.map(curve => {
      const after = Math.max(1, curve.findIndex(([step]) => step >= at));
      const [[before, low], [next, high]] = [curve[after - 1], curve[after]];
      return low + (high - low) * (at - before) / (next - before);
    });
    return [at, mean(values), Math.min(...values), Math.max(...values)];
  });
}

// Returns the row of a group. Losses of runs that do not compare have no mean.
export function groupRow(id, members, shown, basisOf) {
  const names = [...Map.groupBy(members, ({group}) => group.name)].sort(([, a], [, b]) => b.length - a.length);
  const [[name]] = names, {of} = members[0].group;
  const counted = Map.groupBy(shown, row => row.state);
  const states = STATES.filter(state => counted.has(state)).map(state => `${counted.get(state).length} ${state}`).join(', ');
  const urgent = shown.find(row => !row.ended) ?? shown.find(row => row.state === 'failed') ?? shown[0];
  const bases = new Set(shown.map(basisOf).filter(Boolean));
  const row = {
    path: `group ${id}`, name, of, members, shown, isGroup: true, tags: [], state: urgent.state, words: urgent.words, color: urgent.color,
    ended: shown.every(each => each.ended), created: Math.max(...shown.map(each => each.created)),
    time: Math.max(...shown.map(each => each.time || 0)), archived: shown.every(each => each.archived), written: {}, settings: {},
    place: members[0].place.split('/').slice(0, -1).join('/'), held_out: shown[0].held_out, basis: shown[0].basis,
    notebook: new Set(members.map(each => each.notebook)).size === 1 ? members[0].notebook : null,
  };
  const noun = {sweep: 'runs of a sweep', grid: 'runs of a grid', seeds: 'seeds'}[of];
  row.states = `${shown.length}${shown.length < members.length ? ` of ${members.length}` : ''} ${noun}: ${states}`;
  const alarmed = shown.filter(each => each.alerts?.length).length;
  if (alarmed) row.states += `, ${alarmed} with an alert`;
  for (const loss of ['eval_loss', 'training_loss', 'loss']) {
    const values = bases.size > 1 ? [] : known(shown, loss);
    row[loss] = values.length ? mean(values) : null;
    if (values.length) row.written[loss] = withBand(values);
    if (values.length) row.range = `mean loss ${short(mean(values))}, from ${short(Math.min(...values))} to ${short(Math.max(...values))}`;
  }
  row.eta_s = Math.max(-1, ...known(shown, 'eta_s'));
  if (row.eta_s < 0) row.eta_s = null;
  else row.written.eta_s = shown.find(each => each.eta_s === row.eta_s).written.eta_s;
  row.band = bases.size > 1 ? [] : bandOf(shown);
  row.tags = members[0].tags.filter(tag => members.every(each => each.tags.includes(tag)));
  const values = Object.entries(members[0].settings ?? {});
  row.settings = Object.fromEntries(values.filter(([key, value]) => members.every(each => each.settings?.[key] === value)));
  row.apart = bases.size > 1 ? 'Losses of these runs do not compare, so they have no mean.' : '';
  row.facts = [row.states, row.apart, row.range, age(row.time || row.created)].filter(Boolean).join(' · ');
  return row;
}
