// How long the rest of some cells takes. `workbench execute` computes the same (`workbench/notebooks/countdown.py`).

const MOST_TIMES = 12; // by which a machine is taken to be slower than the one on which a template was timed
const LEAST_TIMES = 0.25; // a cell that took less was spared its work by what was stored, and tells nothing of the others
const PRIOR_S = 4; // weight of the assumption that there is no difference, as that of a cell of so many seconds
const OVERRUN = 0.25; // part of its time so far that a cell still takes which has taken longer than expected
const LEAST_SHARE = 0.1; // part of its work that a call must have done while it was heard until its pace is believed
const RECENT_SHARE = 0.5; // part of its work by which a call's pace is judged, the last: a wait that happened before is forgotten
const LAUNCHED = 'Waiting for '; // beginning of the words of a call that waits for runs, its name until the next colon

// The factor by which what has ended took longer than expected, from pairs of expected and real seconds: their median, each
// with its expected seconds as its weight. One cell that had to wait, as for a device, tells nothing of those to come.
export function slowness(ended) {
  const factors = ended.map(([expected, took]) => [took / expected, expected]).filter(([times]) => times > LEAST_TIMES && times < Infinity);
  factors.push([1, PRIOR_S]);
  factors.sort(([left], [right]) => left - right);
  let half = factors.reduce((sum, [, weight]) => sum + weight, 0) / 2;
  const [factor] = factors.find(([, weight]) => (half -= weight) <= 0);
  return Math.min(factor, MOST_TIMES);
}

// The seconds left of a part of a cell: the first begins with it, each further one where it begins to wait for other runs. A
// call tells [share, seconds left]. One that may be followed by others only lengthens what is left; one that is alone in its
// part also shortens it, entirely from half of its work on: of several runs, the first may be the shortest.
export function partLeft(factor, expected, running, call, isAlone) {
  const left = Math.max(factor * expected - running, OVERRUN * running);
  if (!call) return left;
  const [share, seconds] = call, trust = isAlone ? Math.min(1, 2 * share) : 0;
  return seconds >= left || !expected ? seconds : left ** (1 - trust) * seconds ** trust;
}

// Name, share and seconds of `Waiting for a: step 30 of 40 (75%) (12.0 s)`: ['Waiting for a', 0.75, 12]; null without all. A
// number counts what is done: of what follows it, half is done on average.
export function toldProgress(words) {
  const lasted = /\((?:(\d+) h )?(?:(\d+) min ?)?(?:([\d.]+) (ms|s))?\)$/.exec(words);
  const percents = [...words.matchAll(/(\d+(?:\.\d+)?) ?%/g)].pop(), counts = [...words.matchAll(/([\d,]*\d) of ([\d,]*\d)/g)].pop();
  if (!lasted || !(percents || counts)) return null;
  const [, hours, minutes, seconds, unit] = lasted;
  const passed = 3600 * (hours ?? 0) + 60 * (minutes ?? 0) + (seconds ?? 0) / (unit === 'ms' ? 1000 : 1);
  const [done, total] = percents ? [+percents[1], 100] : counts.slice(1).map(count => +count.replaceAll(',', ''));
  const before = words.slice(0, (percents ?? counts).index);
  const half = percents || !done || done >= total ? 0 : 0.5;
  return total ? [before.slice(0, Math.max(0, before.lastIndexOf(': '))), Math.min(1, (done + half) / total), passed] : null;
}

// How fast a call advances, by the words in which it tells its progress. What it did before its first progress, as to start,
// does not happen again, and other calls of the same cell have a pace of their own.
export class Pace {
  #name = '';
  #heard = [];

  call = null; // [share, seconds left] when it was heard last; null while too little of it was heard

  hear(words) {
    const told = toldProgress(words);
    if (!told) return;
    const [name, share, seconds] = told;
    if (name !== this.#name || share < this.#heard.at(-1)[0] || !this.#heard[0][0]) [this.#name, this.#heard] = [name, []];
    this.#heard.push([share, seconds]);
    while (this.#heard.length > 1 && this.#heard[1][0] <= share - RECENT_SHARE) this.#heard.shift();
    const [since, began] = this.#heard[0], done = share - since;
    this.call = done >= LEAST_SHARE ? [share, (1 - share) * (seconds - began) / done] : null;
  }
}

const sum = numbers => numbers.reduce((total, each) => total + each, 0);
const named = words => words.replace(/ \([^()]*\)$/, '').split(':')[0];

// The parts of the cell that runs, by what it says at times in s: those that have ended, and how far the last is.
export class Parts {
  took = [];
  #said = '';
  #waited = [];
  #pace = new Pace();
  #since;
  #heard;

  constructor(now) {
    this.#since = this.#heard = now;
  }

  // What the call says that the cell waits for; '' when it has ended.
  hear(words, now) {
    if (words === this.#said) return;
    const call = named(words);
    if (call.startsWith(LAUNCHED) && !this.#waited.includes(call)) {
      if (this.#waited.length) {
        this.took.push(now - this.#since);
        this.#since = now;
      }
      this.#waited.push(call);
    }
    if (call !== named(this.#said)) this.#pace = new Pace();
    this.#pace.hear(words);
    [this.#said, this.#heard] = [words, now];
  }

  // The seconds until this cell and those after it have ended: `ended` are pairs of expected and real seconds of cells,
  // `stated` the seconds of this cell, or those of each of its parts, `later` those of each cell after it.
  left(ended, stated, later, now) {
    const isInParts = Array.isArray(stated), isAlone = isInParts && this.#waited.length > 0;
    const [own = 0, ...parts] = isInParts ? stated.slice(this.took.length) : [stated];
    const compared = isInParts ? [...ended, ...this.took.slice(0, stated.length).map((each, at) => [stated[at], each])] : [...ended];
    const running = now - this.#since + (isInParts ? 0 : sum(this.took));
    let {call} = this.#pace;
    if (call) call = [call[0], Math.max(0, call[1] - (now - this.#heard))];
    if (isAlone && !this.#said) call = [1, 0]; // the runs have ended, and what follows is short
    const left = partLeft(slowness(compared), own, running, call, isAlone);
    if (isAlone && call) compared.push([own, running + left]);
    return left + slowness(compared) * (sum(parts) + sum(later));
  }
}

// The time of a cell that is to be expected after some times that it took, which a wait that happened once does not move.
export function usual(times) {
  return [...times].sort((left, right) => left - right)[Math.floor((times.length - 1) / 2)] ?? 0;
}
