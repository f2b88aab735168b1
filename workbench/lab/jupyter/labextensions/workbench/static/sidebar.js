// The sidebar of runs. It needs no kernel: the server reads the runs' files, and this module draws the rows that show.
import connect from './server.js';
import curvePanels from './curves.js';
import {badge, columnsOf, comparison, curve, NAME, USUAL, written} from './columns.js';
import {age, element, stored} from './drawing.js';
import {groupRow, groupsOf, labelIn, STATES} from './groups.js';
import {newsOf, notices} from './notices.js';

const ROW_PX = 68, TABLE_ROW_PX = 28;
const WIDE_PX = 640;  // from this width on the list is a table
const GAP_PX = 10;  // between two columns
const TAIL = 6;  // letters at the end of a name that are never cut: they tell runs of one experiment apart
const POLL_MS = 2000;
const HIDDEN_POLL_MS = 20000;
const MOST_DIFFERENCES = 20;  // of one request
const MOST_CURVES = 50;  // of one dashboard, as the server draws them
const DIFFERENCE_MS = 10000;  // between two looks at a run that trains
const last = nothing => value => value ?? nothing;
const ORDERS = {  // label, and comparison of two rows
  newest: ['newest first', (a, b) => b.created - a.created],
  name: ['by name', (a, b) => a.name.localeCompare(b.name, undefined, {numeric: true})],
  heldout: ['lowest held-out loss', (a, b) => last(Infinity)(a.eval_loss) - last(Infinity)(b.eval_loss) || b.created - a.created],
  loss: ['lowest loss', (a, b) => last(Infinity)(a.loss) - last(Infinity)(b.loss) || b.created - a.created],  // in groups
  speed: ['fastest', (a, b) => last(0)(b.tokens_per_s) - last(0)(a.tokens_per_s)],
  left: ['next to end', (a, b) => last(1e12)(a.eta_s) - last(1e12)(b.eta_s)],
};
const SETTINGS = 'workbench:runs';

// Returns which losses compare with those of a row: equal texts do.
const basisOf = row => row.loss == null ? '' : JSON.stringify([row.held_out, row.basis]);

// Returns why the losses of some rows do not compare, as `workbench.runs.loss_basis.why_not_compared` does.
function whyNotCompared(rows) {
  const known = rows.filter(row => row.loss != null && row.basis?.length);
  if (new Set(known.map(row => row.held_out)).size > 1) {
    return 'These losses do not compare: some are held-out losses and some are training losses.';
  }
  const facts = known.map(row => Object.fromEntries(row.basis));
  const names = [...new Set(facts.flatMap(Object.keys))];
  const differ = names.filter(name => new Set(facts.map(fact => fact[name])).size > 1);
  return differ.length ? `These losses do not compare: the runs differ in ${differ.join(', ')}. Those that do stand together.` : '';
}
const ICON = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" fill="none" stroke-width="2">
  <path class="jp-icon3" stroke="#616161" d="M3 3v18h18"/>
  <path class="jp-icon-brand0" stroke="#0072b2" d="M6 6c2 9 6 11 14 11"/>
</svg>`;

// All runs as the server last told them. `listeners` are called after each answer.
class Runs {
  constructor(request) {
    this.request = request;
    this.rows = new Map();
    this.answer = {version: 0, index: '', queue: [], devices: []};
    this.problem = '';
    this.listeners = new Set();
    this.tell = () => {};  // called with the news of runs: pairs of a name and a sentence
  }

  async poll() {
    try {
      const {version, index} = this.answer;
      const answer = await this.request(`runs?since=${version}&index=${index}`);
      const earlier = new Map(this.rows);
      if (answer.since !== version) this.rows.clear();
      for (const path of answer.gone) this.rows.delete(path);
      for (const row of answer.rows) {
        const words = [row.name, row.words, row.notes, ...(row.tags ?? [])];
        const {difference, differenceAt} = this.rows.get(row.path) ?? {};
        this.rows.set(row.path, {...row, tags: row.tags ?? [], text: words.join('\n').toLowerCase(), difference, differenceAt});
      }
      const news = answer.rows.flatMap(row => newsOf(earlier.get(row.path), row).map(words => [row.name, words]));
      if (news.length) this.tell(news);
      this.answer = answer;
      this.problem = '';
    } catch (error) {
      this.problem = `The server does not answer: ${error.message}`;
    }
    this.listeners.forEach(listener => listener());
  }

  async act(path, action, value) {
    await this.request('run', {path, action, value});
    await this.poll();
  }

  // Does something to several runs, and returns why those refused that did.
  async actOnAll(paths, action, value, queues) {
    const {refused} = await this.request('run', {paths, action, value, queues});
    await this.poll();
    return refused;
  }
}

// The runs that a row stands for.
const pathsOf = row => row.isGroup ? row.shown.map(({path}) => path) : [row.path];

// The list with its search field; only the rows in view are in the page.
class RunList {
  constructor(runs, actions) {
    this.runs = runs;
    this.actions = actions;
    this.ticked = new Set();
    this.drawn = new Map();
    this.shown = [];
    this.pending = new Map();
    this.groupRows = new Map();
    this.settings = {order: 'newest', archived: false, details: true, folds: true, open: [], columns: USUAL, ...stored(SETTINGS)};
    this.open = new Set(this.settings.open);  // ids of groups whose members show
    this.baseline = this.settings.baseline ?? null;  // path of the pinned run
    this.askedAt = new Map();
    this.chosen = new Set(this.settings.columns);
    this.sorted = this.settings.sorted ?? null;  // {name, down}: the column of the table by which rows are ordered
    this.wide = false;
    this.node = element('div', 'wb-runs');
    this.search = element('input', 'wb-search jp-mod-styled');
    this.search.type = 'search';
    this.search.placeholder = 'Search runs';
    this.search.title = 'Search names, tags and notes';
    this.search.setAttribute('aria-label', 'Search runs');
    this.state = this.choice('State', {'': 'all states', ...Object.fromEntries(STATES.map(state => [state, state]))});
    this.tag = this.choice('Tag', {'': 'all tags'});
    this.order = this.choice('Order', Object.fromEntries(Object.entries(ORDERS).map(([name, [label]]) => [name, label])));
    this.order.value = this.settings.order in ORDERS ? this.settings.order : 'newest';
    this.archived = element('input');
    this.archived.type = 'checkbox';
    this.archived.checked = this.settings.archived;
    const archive = element('label', 'wb-archive', 'show archived');
    archive.prepend(this.archived);
    archive.title = 'Show archived runs too';
    this.folds = element('input');
    this.folds.type = 'checkbox';
    this.folds.checked = this.settings.folds;
    const fold = element('label', 'wb-archive', 'groups');
    fold.prepend(this.folds);
    fold.title = 'Fold the runs of a sweep, a grid or seeds into one row';
    this.count = element('span', 'wb-count');
    this.apart = element('div', 'wb-apart');
    this.apart.setAttribute('role', 'note');
    this.compare = this.button('Compare', 'Curves of the ticked runs', () => actions.open([...this.ticked]));
    this.compare.classList.add('wb-compare');
    this.differs = this.button('What differs', 'Everything in which the ticked runs differ', () => actions.differs([...this.ticked]));
    this.bulk = element('div', 'wb-bar wb-bulk');
    this.move = this.button('⇱', 'Move to the main area', actions.move);
    this.scroller = element('div', 'wb-scroller');
    this.scroller.tabIndex = -1;
    this.space = element('div', 'wb-space');
    this.empty = element('div', 'wb-empty');
    this.scroller.append(this.empty, this.space);
    this.head = element('div', 'wb-head');
    this.head.setAttribute('role', 'row');
    this.table = element('div', 'wb-table', this.head, this.scroller);
    this.columns = element('details', 'wb-columns', element('summary', 'jp-mod-styled', 'Columns'), element('div'));
    this.details = element('details', 'wb-devices');
    this.details.open = this.settings.details;
    this.details.append(element('summary', '', 'Devices and queue'), element('div'));
    this.node.append(
      element('div', 'wb-bar', this.search, this.move),
      element('div', 'wb-bar', this.state, this.tag, this.order, archive, fold, notices(runs)),
      element('div', 'wb-bar', this.count, this.columns, this.compare),
      this.bulk,
      this.apart,
      this.table,
      this.details,
    );
    this.search.addEventListener('input', () => this.update(true));
    for (const control of [this.state, this.tag, this.order, this.archived, this.folds]) {
      control.addEventListener('change', () => {
        if (control === this.order && this.order.value in ORDERS) this.sorted = null;
        this.update(true);
      });
    }
    this.node.addEventListener('click', ({target}) => this.columns.contains(target) || (this.columns.open = false));
    this.details.addEventListener('toggle', () => this.store());
    this.scroller.addEventListener('scroll', () => this.draw());
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.scroller);
    this.resized.observe(this.table);
    runs.listeners.add(() => this.update());
  }

  choice(label, options) {
    const select = element('select', 'wb-choice jp-mod-styled');
    select.setAttribute('aria-label', label);
    this.fill(select, options);
    return select;
  }

  fill(select, options) {
    const value = select.value;
    select.replaceChildren(...Object.entries(options).map(([name, text]) => {
      const option = element('option', '', text);
      option.value = name;
      return option;
    }));
    select.value = value in options ? value : Object.keys(options)[0];
  }

  button(text, title, onclick) {
    const button = element('button', 'wb-button jp-mod-styled', text);
    button.title = title;
    if (title) button.setAttribute('aria-label', title);
    button.addEventListener('click', event => {
      event.stopPropagation();
      onclick(button);
    });
    return button;
  }

  store() {
    const settings = {
      order: this.order.value, archived: this.archived.checked, details: this.details.open,
      columns: [...this.chosen], sorted: this.sorted, folds: this.folds.checked, open: [...this.open], baseline: this.baseline,
    };
    localStorage.setItem(SETTINGS, JSON.stringify({...stored(SETTINGS), ...settings}));
  }

  update(byUser = false) {
    if (byUser) {
      this.store();
      this.scroller.scrollTop = 0;
    }
    const all = [...this.runs.rows.values()];
    const tags = [...new Set(all.flatMap(row => row.tags))].sort();
    if (String(tags) !== this.tags) {
      this.tags = String(tags);
      this.fill(this.tag, {'': 'all tags', ...Object.fromEntries(tags.map(tag => [tag, tag]))});
      this.tag.hidden = !tags.length;  // its room is wanted in a narrow list
    }
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const listed = all.filter(row => this.archived.checked || !row.archived);
    const found = listed.filter(row =>
      (!this.state.value || row.state === this.state.value)
      && (!this.tag.value || row.tags.includes(this.tag.value))
      && words.every(word => row.text.includes(word)));
    this.found = found.length;
    const isNarrowed = Boolean(words.length || this.state.value || this.tag.value);
    this.known = columnsOf(all);
    const by = this.sorted && {name: NAME, ...this.known}[this.sorted.name];
    const orders = Object.fromEntries(Object.entries(ORDERS).map(([name, [label]]) => [name, label]));
    this.fill(this.order, by ? {...orders, column: `by ${by.label}`} : orders);
    if (by) this.order.value = 'column';
    const compared = by ? comparison(by, this.sorted.down) : ORDERS[this.order.value][1];
    this.shown = this.folded(found.sort(compared), this.folds.checked ? groupsOf(listed) : new Map()).sort(compared);
    const isByLoss = by ? this.sorted.name.endsWith('_loss') : ['loss', 'heldout'].includes(this.order.value);
    const apart = isByLoss ? whyNotCompared(this.shown) : '';
    if (apart) {  // a group begins where its best run stands
      const groups = Map.groupBy(this.shown, basisOf);
      this.shown = [...groups.values()].flat();
    }
    this.apart.textContent = apart;
    this.apart.hidden = !apart;
    this.shown = this.shown.flatMap(row => row.isGroup && (isNarrowed || this.open.has(row.path))
      ? [row, ...row.shown.map(member => this.member(member, row))] : [row]);
    const pinned = this.runs.rows.get(this.baseline);
    if (pinned) this.shown = [pinned, ...this.shown.filter(row => row.path !== this.baseline)];
    for (const path of this.ticked) if (!this.runs.rows.has(path)) this.ticked.delete(path);
    const hidden = all.length - this.found;
    this.count.textContent = this.runs.problem
      || (!all.length ? 'No run yet. wb.launch starts one.'
        : !this.found ? `None of ${all.length} runs matches.`
        : `${this.found} run${this.found === 1 ? '' : 's'}${hidden ? `, ${hidden} not shown` : ''}`);
    this.tellEmpty(all.length);
    this.drawDevices();
    this.draw();
  }

  // Returns rows with one for each group in the place of its members; it stays the same object while they do.
  folded(found, groups) {
    const shown = Map.groupBy(found.filter(row => groups.has(row.group?.id)), row => row.group.id);
    const rows = new Map([...shown].map(([id, members]) => {
      const before = this.groupRows.get(id), of = [...groups.get(id), null, ...members];
      const same = before && of.length === before.of.length && of.every((row, index) => row === before.of[index]);
      return [id, same ? before : {of, row: groupRow(id, groups.get(id), members, basisOf), members: new Map()}];
    }));
    this.groupRows = rows;
    return [...found.filter(row => !groups.has(row.group?.id)), ...[...rows.values()].map(({row}) => row)];
  }

  // Returns the row of a member below that of its group, named by what differs; the same object while the run is.
  member(row, group) {
    const {members} = this.groupRows.get(row.group.id);
    if (members.get(row.path)?.of !== row) {
      members.set(row.path, {of: row, row: {...row, isMember: true, label: labelIn(group.members)(row)}});
    }
    return members.get(row.path).row;
  }

  // Says in the place of the rows why there are none, and offers to show all.
  tellEmpty(count) {
    this.empty.hidden = Boolean(this.found);
    if (this.found) return;
    const words = this.search.value.trim();
    const chosen = [words && `the search “${words}”`, this.state.value && `the state “${this.state.value}”`,
      this.tag.value && `the tag “${this.tag.value}”`].filter(Boolean).join(', ');
    const all = this.button('Show all', 'Show all runs', () => {
      [this.search.value, this.state.value, this.tag.value] = ['', '', ''];
      this.archived.checked ||= !chosen;
      this.update(true);
    });
    this.empty.replaceChildren(...!count ? ['No run yet. A run appears here when wb.launch starts it.']
      : [chosen ? `None of ${count} runs matches ${chosen}.` : `All ${count} runs are archived.`, ' ', all]);
  }

  // Chooses between cards, which are narrow, and a table; draws the table's head.
  arrange() {
    const wide = this.table.clientWidth >= WIDE_PX;
    this.rowPx = wide ? TABLE_ROW_PX : ROW_PX;
    this.visible = wide ? Object.entries(this.known ?? {}).filter(([name]) => this.chosen.has(name)) : [];
    const arranged = JSON.stringify([wide, this.visible.map(([name]) => name), this.sorted]);
    this.space.style.height = `${this.shown.length * this.rowPx}px`;
    this.head.hidden = this.columns.hidden = !wide;
    this.space.setAttribute('role', wide ? 'rowgroup' : 'list');
    if (wide) this.table.setAttribute('role', 'table'); else this.table.removeAttribute('role');
    const choices = Object.entries(this.known ?? {});
    if (String(choices.map(([name]) => name)) !== this.offered) {
      this.offered = String(choices.map(([name]) => name));
      this.columns.lastChild.replaceChildren(...choices.map(([name, column]) => this.columnChoice(name, column)));
    }
    if (arranged === this.arranged) return;
    this.arranged = arranged;
    this.wide = wide;
    this.drawn.forEach(({node}) => node.remove());
    this.drawn = new Map();
    const widths = ['20px', ...[['name', NAME], ...this.visible].map(([, {width}]) => width)];
    this.table.style.setProperty('--wb-columns', widths.join(' '));
    const least = widths.reduce((sum, width) => sum + Number(/(\d+)px/.exec(width)[1]) + GAP_PX, 2 * GAP_PX);
    this.table.style.setProperty('--wb-least', wide ? `${least}px` : '0');
    this.head.replaceChildren(element('span'), ...[['name', NAME], ...this.visible].map(([name, column]) => this.header(name, column)));
  }

  columnChoice(name, {label, setting}) {
    const tick = Object.assign(element('input'), {type: 'checkbox', checked: this.chosen.has(name)});
    tick.addEventListener('change', () => {
      if (tick.checked) this.chosen.add(name); else this.chosen.delete(name);
      this.store();
      this.draw();
    });
    return element('label', setting ? 'wb-setting' : '', tick, label);
  }

  header(name, column) {
    const by = this.sorted?.name === name ? this.sorted.down : null;
    const button = element('button', 'wb-header', `${column.label}${by === null ? '' : by ? ' ▼' : ' ▲'}`);
    button.title = column.value ? `Order by ${column.label}` : column.label;
    button.disabled = !column.value;
    button.addEventListener('click', () => {
      this.sorted = {name, down: by === null ? Boolean(column.down) : !by};
      this.update(true);
    });
    const cell = element('span', column.number ? 'wb-cell wb-number' : 'wb-cell', button);
    cell.setAttribute('role', 'columnheader');
    if (by !== null) cell.setAttribute('aria-sort', by ? 'descending' : 'ascending');
    return cell;
  }

  draw() {
    this.arrange();
    this.compare.textContent = this.ticked.size ? `Compare ${this.ticked.size}` : 'Tick to compare';
    this.compare.disabled = !this.ticked.size;
    this.drawBulk();
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / this.rowPx) - 3);
    const visible = this.shown.slice(first, first + Math.ceil(this.scroller.clientHeight / this.rowPx) + 7);
    const kept = new Map(), wanted = new Set(visible.map(({path}) => path)), held = this.held();
    for (const [path, {node}] of this.drawn) if (!wanted.has(path)) node.remove();
    visible.forEach((row, index) => {
      const before = this.drawn.get(row.path);
      const node = before?.row === row ? before.node : this.row(row);
      node.style.top = `${(first + index) * this.rowPx}px`;
      const since = node.querySelector('.wb-age');
      if (since) since.textContent = age(row.time || row.created);
      this.showTick(node.querySelector('.wb-tick'), row);
      if (before && before.node !== node) before.node.replaceWith(node);
      const there = this.space.children[index];  // keys and screen readers go through rows in the order of the page
      if (there !== node) this.space.insertBefore(node, there ?? null);
      kept.set(row.path, {row, node});
    });
    this.drawn = kept;
    this.hold(held);
    this.askDifferences(visible);
  }

  // Returns the control of a row that has the focus; null if none has. A row that is drawn anew, or moved, would lose it.
  held() {
    const control = document.activeElement, node = this.space.contains(control) && control.closest('.wb-run');
    return node ? {path: node.dataset.path, control, name: control.getAttribute('aria-label'), look: control.className} : null;
  }

  hold(held) {
    if (!held || document.activeElement === held.control) return;
    const controls = [...this.drawn.get(held.path)?.node.querySelectorAll('button, input') ?? []];
    const again = controls.find(each => each.getAttribute('aria-label') === held.name && each.className === held.look)
      ?? controls.find(each => each.className === held.look && held.look !== 'wb-button jp-mod-styled');
    (again ?? controls.find(each => each.className === 'wb-name'))?.focus({preventScroll: true});
  }

  showTick(tick, row) {
    const paths = pathsOf(row), ticked = paths.filter(path => this.ticked.has(path)).length;
    tick.checked = ticked === paths.length;
    tick.indeterminate = ticked > 0 && ticked < paths.length;
  }

  // Draws what may be done to the ticked runs, of which one may be deleted as well.
  drawBulk() {
    const paths = [...this.ticked];
    if (String(paths) === this.bulkOf) return;
    this.bulkOf = String(paths);
    this.bulk.hidden = !paths.length;
    this.bulk.replaceChildren(...paths.length > 1 ? [this.differs] : [], ...this.bulkButtons(paths, `${paths.length} ticked`));
  }

  bulkButtons(paths, name, isGroup = false) {
    const button = (text, action, title) => this.button(text, `${title}: ${name}`, () => this.actions.onAll(paths, action, isGroup));
    return [
      button('Stop', 'stop', 'Write checkpoints and end these runs'),
      button('Archive', 'archive', 'Hide these runs from the list'),
      button('Delete', 'delete', 'Delete these runs from the disk'),
    ];
  }

  pin(path) {
    this.baseline = this.baseline === path ? null : path;
    this.askedAt.clear();
    for (const [other, row] of this.runs.rows) this.runs.rows.set(other, {...row, difference: undefined, differenceAt: undefined});
    this.update(true);
    this.runs.listeners.forEach(listener => listener());
  }

  // Asks for the differences of rows in view from the baseline, as far as they are not known or have changed.
  async askDifferences(visible) {
    if (!this.runs.rows.has(this.baseline) || this.asks) return;
    const now = Date.now();
    const due = visible.filter(({path, isGroup, step, differenceAt}) => !isGroup && path !== this.baseline && step && differenceAt !== step
      && now - (this.askedAt.get(path) ?? 0) > DIFFERENCE_MS).slice(0, MOST_DIFFERENCES);
    if (!due.length) return;
    this.asks = true;
    due.forEach(({path}) => this.askedAt.set(path, now));
    try {
      const {baseline} = this;
      const {differences} = await this.runs.request('together', {ask: 'difference', baseline, paths: due.map(({path}) => path)});
      for (const {path, step} of baseline === this.baseline ? due : []) {
        const row = this.runs.rows.get(path);
        if (row) this.runs.rows.set(path, {...row, difference: differences[path], differenceAt: step});
      }
    } catch {  // a run was deleted meanwhile; the next drawing asks again
    }
    this.asks = false;
    this.update();
  }

  row(row) {
    const {path, name, message, notes, isGroup} = row, shown = row.label ?? name, paths = pathsOf(row);
    const tick = element('input', 'wb-tick');
    tick.type = 'checkbox';
    tick.setAttribute('aria-label', `Compare ${isGroup ? `the ${paths.length} runs of ${name}` : name}`);
    tick.addEventListener('change', () => {
      for (const each of paths) if (tick.checked) this.ticked.add(each); else this.ticked.delete(each);
      this.draw();
    });
    const title = element('button', 'wb-name', element('span', '', shown.slice(0, -TAIL)), element('span', '', shown.slice(-TAIL)));
    title.title = isGroup ? `${name}\n${row.place}\nOpen the dashboard of its runs` : `${name}\n${row.place}\nOpen its dashboard`;
    title.addEventListener('click', () => this.actions.open(paths));
    const named = element('span', 'wb-named', ...isGroup ? [this.toggle(row)] : [], title);
    if (path === this.baseline) title.prepend(element('span', 'wb-pin', 'baseline '));
    const note = [message && row.state !== 'finished' ? message : '', row.alerts?.at(-1), notes].filter(Boolean).join(' · ');
    const node = element('div', 'wb-run', ...this.wide ? this.cells(row, tick, named) : this.lines(row, tick, named, note));
    if (this.wide) node.title = [row.facts, note].filter(Boolean).join('\n');
    node.setAttribute('role', this.wide ? 'row' : 'listitem');
    node.addEventListener('dblclick', ({target}) => target.closest('button, input') || this.actions.open(paths));
    node.dataset.path = path;
    if (isGroup) node.classList.add('wb-group');
    if (row.isMember) node.classList.add('wb-member');
    if (path === this.baseline) node.classList.add('wb-baseline');
    if (row.archived) node.classList.add('wb-archived');
    return node;
  }

  // Shows and hides the members of a group.
  toggle(row) {
    const {path, name} = row, isOpen = this.open.has(path);
    const toggle = this.button(isOpen ? '▾' : '▸', `${isOpen ? 'Hide' : 'Show'} the runs of ${name}`, () => {
      if (isOpen) this.open.delete(path); else this.open.add(path);
      this.drawn.get(path).row = null;  // it is drawn anew
      this.store();
      this.update();
    });
    toggle.className = 'wb-toggle';
    toggle.setAttribute('aria-expanded', String(isOpen));
    return toggle;
  }

  // A row of the table.
  cells(row, tick, title) {
    const shown = this.visible.map(([name, {show, number}]) => {
      const cell = element('span', number ? 'wb-cell wb-number' : 'wb-cell', show(row));
      cell.setAttribute('role', 'cell');
      if (name === 'age') cell.classList.add('wb-age');
      return cell;
    });
    if (row.isGroup) title.append(element('span', 'wb-note', row.states));
    return [tick, title, ...shown, this.buttons(row)];
  }

  // A card of three lines.
  lines(row, tick, title, note) {
    const {step, loss, pace = '', facts = 'reading …', tags, isGroup, difference} = row;
    const reached = loss == null ? '' : `${row.held_out ? '◆ ' : ''}${written(row, 'loss')}`;
    const said = element('span', 'wb-said', step === undefined && !isGroup ? facts : reached);
    said.title = row.held_out ? `${facts}\n◆ the last held-out loss` : facts;
    const below = element('span', 'wb-below', element('span', 'wb-age'));
    if (isGroup) below.append(element('span', 'wb-note', row.states), ...row.apart ? [element('span', 'wb-note', row.apart)] : []);
    else if (step !== undefined) below.append(element('span', 'wb-note', written(row, 'step')));
    if (difference?.value != null) below.append(Object.assign(element('span', 'wb-note', `Δ ${difference.words}`), {title: difference.said}));
    const rest = pace ? [element('span', 'wb-note', pace)] : [], noted = note ? [element('span', 'wb-note', note)] : [];
    rest.push(...tags.map(tag => element('span', 'wb-tag', tag)));
    below.append(...row.ended ? [...noted, ...rest] : [...rest, ...noted]);  // why it ended says more than how fast it was
    below.title = [isGroup ? row.facts : pace, difference && `From the baseline: ${difference.said}`, tags.join(', '), note].filter(Boolean).join('\n');
    return [
      element('div', 'wb-line', tick, title),
      element('div', 'wb-line', badge(row), curve(row), said),
      element('div', 'wb-line', below, this.buttons(row)),
    ];
  }

  buttons(row) {
    const {path, name} = row;
    const buttons = element('span', 'wb-actions');
    const notebook = row.notebook ? [this.button('Notebook', `Open ${row.notebook}, which launched ${name}`, () => this.actions.notebook(row.notebook))] : [];
    if (row.isGroup) {
      buttons.append(...notebook, ...this.bulkButtons(pathsOf(row), name, true));
      return buttons;
    }
    const pending = this.pending.get(path);
    if (pending && pending.state === row.state) {
      buttons.append(element('span', '', pending.label));
    } else {
      this.pending.delete(path);
      if (row.state && !row.ended) buttons.append(this.acting(row, 'Stop', 'stop', 'Write a checkpoint and end this run'));
      if (row.resumable) buttons.append(this.acting(row, 'Resume', 'resume', 'Continue from the last checkpoint'));
    }
    const isPinned = path === this.baseline;
    buttons.append(
      ...notebook,
      this.button(isPinned ? 'Unpin' : 'Pin', isPinned ? `Compare with ${name} no longer` : `Pin ${name} as the baseline: it is drawn beside every run`, () => this.pin(path)),
      this.button('Tag', `Tags of ${name}`, () => this.actions.tag(row)),
      this.button('Note', `Note about ${name}`, () => this.actions.note(row)),
      this.button(row.archived ? 'Unarchive' : 'Archive', row.archived ? `List ${name} again` : `Hide ${name} from the list`,
        () => this.actions.act(path, 'archive', !row.archived)),
    );
    return buttons;
  }

  acting(row, text, action, title) {
    return this.button(text, `${title}: ${row.name}`, async button => {
      button.disabled = true;
      this.pending.set(row.path, {state: row.state, label: text === 'Stop' ? 'Stopping …' : 'Resuming …'});
      if (button === document.activeElement) button.closest('.wb-run').querySelector('.wb-name').focus();
      button.replaceWith(element('span', '', this.pending.get(row.path).label));
      if (!await this.actions.act(row.path, action)) {
        this.pending.delete(row.path);
        if (this.drawn.has(row.path)) this.drawn.get(row.path).row = null;
        this.draw();
      }
    });
  }

  drawDevices() {
    const {devices, queue} = this.runs.answer;
    const lines = devices.map(({name, share, used_bytes: used}) => {
      const bar = element('span', 'wb-meter', element('span'));
      bar.firstChild.style.width = `${Math.round(100 * (share ?? 0))}%`;
      const memory = used === null ? '' : `, ${(used / 2 ** 30).toFixed(1)} GiB`;
      const line = element('div', 'wb-line', element('span', 'wb-device', name), bar,
        element('span', '', `${share === null ? '?' : Math.round(100 * share)} %${memory}`));
      line.title = 'Used by all processes, of anybody; the panel of a run on CPUs shows the share of its own.';
      return line;
    });
    const waiting = queue.map(({name, waits_for: others}) =>
      element('div', 'wb-line', `${name} waits for ${others.length ? others.join(', ') : 'its devices'}`));
    this.details.lastChild.replaceChildren(...lines, ...waiting);
  }
}

export default async function sidebar(library) {
  const [{ILayoutRestorer}, {Widget}, {Dialog, ICommandPalette, InputDialog, showDialog, showErrorMessage}, {LabIcon}, request] = await Promise.all([
    library('@jupyterlab/application'),
    library('@lumino/widgets'),
    library('@jupyterlab/apputils'),
    library('@jupyterlab/ui-components'),
    connect(library),
  ]);
  const curves = await curvePanels(library, request);

  class Panel extends Widget {
    onCloseRequest() {  // the tab in the main area closes: the runs go back to the side
      this.toSide();
    }
  }

  return {
    id: 'workbench:runs',
    autoStart: true,
    optional: [ILayoutRestorer, ICommandPalette],
    activate: (app, restorer, palette) => {
      const style = document.createElement('link');
      style.rel = 'stylesheet';
      style.href = new URL('sidebar.css', import.meta.url).href;
      document.head.append(style);
      const runs = new Runs(request);
      const guarded = async (path, action, value) => {
        try {
          await runs.act(path, action, value);
          return true;
        } catch (error) {
          await showErrorMessage(`${runs.rows.get(path)?.name ?? path}: ${action}`, error.message);
          return false;
        }
      };
      const drawn = curves(app, restorer, runs);
      const open = paths => drawn(paths.slice(0, MOST_CURVES));
      const notebook = path => app.commands.execute('docmanager:open', {path});
      const confirmed = async (title, body, accept) => {
        const buttons = [Dialog.cancelButton(), Dialog.warnButton({label: accept})];
        return (await showDialog({title, body, buttons})).button.accept;
      };
      // Asks before something is done to several runs, and tells why those refused that did.
      const onAll = async (paths, action, isGroup) => {
        const rows = paths.map(path => runs.rows.get(path)).filter(Boolean), some = rows.length === 1 ? '1 run' : `${rows.length} runs`;
        const training = rows.filter(row => !row.ended);
        const queues = isGroup && rows.some(({group}) => group && group.of !== 'seeds');
        try {
          if (action === 'delete') {
            const {may, words} = await request('together', {ask: 'lost', paths});
            if (!may) return await showErrorMessage(`Delete ${some}`, words);
            if (!await confirmed(`Delete ${some}?`, words, `Delete ${some}`)) return;
          } else if (action === 'stop') {
            const each = training.length === 1 ? 'It writes a checkpoint and ends' : 'Each writes a checkpoint and ends';
            const queued = queues ? ' Runs that the queue has not begun stay out; resume() of the sweep or the grid goes on.' : '';
            const words = training.length ? `${training.length} of ${some} ${training.length === 1 ? 'trains' : 'train'}. ${each}; Resume goes on.${queued}` : `None of ${some} trains.`;
            if (!training.length) return await showErrorMessage(`Stop ${some}`, words);
            if (!await confirmed(`Stop ${training.length}?`, words, `Stop ${training.length}`)) return;
          } else {
            const words = 'Nothing is deleted. What is archived is listed only if “show archived” is ticked.';
            if (!await confirmed(`Archive ${some}?`, words, `Archive ${some}`)) return;
          }
          const refused = await runs.actOnAll(action === 'stop' ? training.map(({path}) => path) : paths, action, action === 'archive' || undefined, queues);
          if (refused.length) await showErrorMessage(`${refused.length} of ${some} refused`, refused.slice(0, 5).join('\n'));
        } catch (error) {
          await showErrorMessage(`${action}: ${some}`, error.message);
        }
      };
      // Shows everything in which some runs differ.
      const differs = async paths => {
        try {
          const {names, rows, left_out: more} = await request('together', {ask: 'differs', paths});
          const cells = (tag, texts) => element('tr', '', ...texts.map(text => element(tag, '', text)));
          const table = element('table', 'wb-differs', cells('th', ['', ...names]), ...rows.map(([name, values]) => cells('td', [name, ...values])));
          const said = !rows.length ? 'Nothing: experiments, plans and environments are equal.' : more ? `and ${more} more` : '';
          const body = new Widget({node: element('div', 'wb-differs-of', ...rows.length ? [table] : [], said)});
          await showDialog({title: `What differs between ${names.length} runs`, body, buttons: [Dialog.okButton({label: 'Close'})]});
        } catch (error) {
          await showErrorMessage('What differs', error.message);
        }
      };
      const tag = async row => {
        const {value, button} = await InputDialog.getText({title: 'Tags, separated by commas', text: row.tags.join(', ')});
        if (!button.accept) return;
        const wanted = value.split(',').map(word => word.trim()).filter(Boolean);
        for (const word of wanted) if (!row.tags.includes(word)) await guarded(row.path, 'tag', word);
        for (const word of row.tags) if (!wanted.includes(word)) await guarded(row.path, 'untag', word);
      };
      const note = async row => {
        const {value, button} = await InputDialog.getText({title: 'Note', text: row.notes ?? ''});
        if (button.accept) await guarded(row.path, 'note', value);
      };
      const panel = new Panel();
      const move = area => {
        localStorage.setItem(SETTINGS, JSON.stringify({...stored(SETTINGS), area}));
        panel.title.label = area === 'main' ? 'Runs' : '';
        panel.title.closable = area === 'main';
        list.move.textContent = area === 'main' ? '⇲' : '⇱';
        list.move.title = area === 'main' ? 'Move back to the side' : 'Move to the main area';
        list.move.setAttribute('aria-label', list.move.title);
        app.shell.add(panel, area, {rank: 150});
        app.shell.activateById(panel.id);
      };
      const toggle = () => move(stored(SETTINGS).area === 'main' ? 'left' : 'main');
      const list = new RunList(runs, {open, tag, note, act: guarded, move: toggle, onAll, differs, notebook});
      runs.baseline = () => list.baseline;
      panel.toSide = () => move('left');
      panel.id = 'workbench-runs';
      panel.title.caption = 'Runs of Workbench';
      panel.title.icon = new LabIcon({name: 'workbench:runs', svgstr: ICON});
      panel.addClass('wb-panel');
      panel.node.append(list.node);
      app.shell.add(panel, 'left', {rank: 150});
      restorer?.add(panel, panel.id);
      if (stored(SETTINGS).area === 'main') app.restored.then(() => move('main'));
      app.commands.addCommand('workbench:show-runs', {
        label: 'Workbench: show the runs',
        execute: () => app.shell.activateById(panel.id),
      });
      app.commands.addCommand('workbench:move-runs', {
        label: 'Workbench: move the runs between the side and the main area',
        execute: toggle,
      });
      for (const command of ['workbench:show-runs', 'workbench:move-runs']) palette?.addItem({command, category: 'Workbench'});
      let timer = null;
      const follow = async () => {
        clearTimeout(timer);
        await runs.poll();
        clearTimeout(timer);
        const idle = document.hidden || !(panel.isVisible || runs.listeners.size > 1);
        timer = setTimeout(follow, runs.answer.unread ? 0 : idle ? HIDDEN_POLL_MS : POLL_MS);
      };
      panel.node.addEventListener('pointerenter', follow);
      document.addEventListener('visibilitychange', () => document.hidden || follow());
      follow();
    },
  };
}
