// How long the rest of some cells takes. `workbench execute` computes the same (`workbench/notebooks/countdown.py`).

const MOST_TIMES = 12; // by which a machine is taken to differ, up or down, from the one on which a template was timed
const PRIOR_S = 4; // weight of the assumption that there is no difference, as that of a cell of so many seconds
const OVERRUN = 0.25; // part of its time so far that a cell still takes which has taken longer than expected
const LEAST_SHARE = 0.1; // part of its work from which on a call's progress is believed: the time before includes its start

// The factor by which cells that have ended took longer than expected: their median, each with its expected seconds as its
// weight. One cell that had to wait, as for a device, tells nothing of those to come.
export function slowness(expected, took) {
  const factors = took.map((now, at) => [now / expected[at], expected[at]]).filter(([, weight]) => weight > 0);
  factors.push([1, PRIOR_S]);
  factors.sort(([left], [right]) => left - right);
  let half = factors.reduce((sum, [, weight]) => sum + weight, 0) / 2;
  const [factor] = factors.find(([, weight]) => (half -= weight) <= 0);
  return Math.min(Math.max(factor, 1 / MOST_TIMES), MOST_TIMES);
}

// The seconds left of the cell that runs. What a call tells of its own progress, [share, seconds], can only lengthen the time
// that is left of a cell whose time is expected, the more so the nearer the call is to its end: others may follow it.
export function cellLeft(factor, now, running, told) {
  const left = Math.max(factor * now - running, OVERRUN * running);
  if (!told || told[0] < LEAST_SHARE) return left;
  const ofCall = told[1] * (1 - told[0]) / told[0];
  return now ? left + told[0] * Math.max(0, ofCall - left) : ofCall;
}

// Share and seconds of `Waiting for a: step 30 of 40 (75%) (12.0 s)`: [0.75, 12]; null without both.
export function toldProgress(words) {
  const lasted = /\((?:(\d+) h )?(?:(\d+) min ?)?(?:([\d.]+) (ms|s))?\)$/.exec(words);
  const percents = [...words.matchAll(/(\d+(?:\.\d+)?) ?%/g)].pop(), counts = [...words.matchAll(/([\d,]*\d) of ([\d,]*\d)/g)].pop();
  if (!lasted || !(percents || counts)) return null;
  const [, hours, minutes, seconds, unit] = lasted;
  const passed = 3600 * (hours ?? 0) + 60 * (minutes ?? 0) + (seconds ?? 0) / (unit === 'ms' ? 1000 : 1);
  const [done, total] = percents ? [+percents[1], 100] : counts.slice(1).map(count => +count.replaceAll(',', ''));
  return total ? [Math.min(1, done / total), passed] : null;
}

// The time of a cell that is to be expected after some times that it took, which a wait that happened once does not move.
export function usual(times) {
  return [...times].sort((left, right) => left - right)[Math.floor((times.length - 1) / 2)] ?? 0;
}
