// Notices of the browser: a run has failed or ended, its loss is not finite, or has stopped to fall.
//
// They come while JupyterLab is open, also in a hidden tab, and only once somebody has asked for them.
import {element, stored} from './drawing.js';

const SETTING = 'workbench:notices';
const MOST = 5;  // notices of one answer of the server: more are told as a number

// Returns what is news about a run since its earlier row, as sentences.
export function newsOf(before, row) {
  if (!before?.state) return [];
  const news = [];
  if (row.ended && !before.ended) news.push(`${row.state}. ${row.message ?? ''}`.trim());
  if (row.words?.includes('not finite') && !before.words?.includes('not finite')) news.push('The loss is not finite.');
  return [...news, ...(row.alerts ?? []).slice(before.alerts?.length ?? 0).filter(() => !news.length)];
}

// Returns the control that switches notices on, and tells `runs` what to do with news.
export function notices(runs) {
  const tick = Object.assign(element('input'), {type: 'checkbox'});
  const label = element('label', 'wb-archive', tick, 'notices');
  const allowed = () => window.Notification?.permission === 'granted';
  label.title = 'Let the browser tell when a run fails or ends, and when a loss is not finite or stops to fall';
  tick.checked = Boolean(stored(SETTING).on) && allowed();
  tick.addEventListener('change', async () => {
    if (tick.checked && !allowed()) tick.checked = await window.Notification?.requestPermission() === 'granted';
    localStorage.setItem(SETTING, JSON.stringify({on: tick.checked}));
    if (!tick.checked && window.Notification?.permission === 'denied') label.title = 'This browser does not allow notices of this page; its settings can.';
  });
  runs.tell = news => {
    if (!tick.checked || !allowed()) return;
    for (const [name, words] of news.slice(0, MOST)) new Notification(name, {body: words, tag: `workbench ${name}`});
    if (news.length > MOST) new Notification('Workbench', {body: `and ${news.length - MOST} further runs`});
  };
  return label;
}
