// Arithmetic on curves: points of a run, smoothing, and the band of runs that differ only in their seed. No DOM.
import { duration, size } from './text.js';
// By name: the column, the label, how a value is written, and how those at the axis are (undefined: as numbers).
export const AXES = { step: ['step', 'steps'], time: ['elapsed_s', 'seconds', duration], samples: ['samples', 'samples'], bytes: ['num_bytes', 'traffic', size, size] };

// The points [x, y] of a metric. A run that takes up a snapshot goes back: what it had beyond is replaced.
export function pointsOf(curves, metric, axis) {
  const column = AXES[axis][0];
  const rows = metric.startsWith('eval.')
    ? curves.evaluations.map(point => [point[column], point.metrics[metric.slice(5)]])
    : (curves.series[metric] || []).map((value, at) => [curves.series[column]?.[at], value]);
  const points = [];
  for (const [x, y] of rows) {
    if (typeof x !== 'number' || typeof y !== 'number') continue;
    while (points.length && points[points.length - 1][0] > x) points.pop();
    points.push([x, y]);
  }
  return points;
}

// Exponential moving average with the correction for its start, as TensorBoard draws it.
export function smoothed(points, weight) {
  if (!weight || points.length < 3) return points;
  let last = 0, norm = 0;
  return points.map(([x, y]) => { last = weight * last + (1 - weight) * y; norm = weight * norm + 1 - weight; return [x, last / norm]; });
}

function at(points, x, from) {
  let row = from;
  while (row + 1 < points.length && points[row + 1][0] <= x) row += 1;
  const [x0, y0] = points[row], [x1, y1] = points[Math.min(row + 1, points.length - 1)];
  return [row, x1 === x0 ? y0 : y0 + (y1 - y0) * (x - x0) / (x1 - x0)];
}

// Mean, least and most of several curves, each read between its points: {xs, mean, low, high}.
export function band(curves, most = 400) {
  const known = curves.filter(points => points.length), all = [...new Set(known.flatMap(points => points.map(([x]) => x)))].sort((a, b) => a - b);
  const stride = Math.max(1, Math.ceil(all.length / most)), xs = all.filter((x, row) => row % stride === 0 || row === all.length - 1);
  const rows = known.map(() => 0), found = { xs, mean: [], low: [], high: [] };
  for (const x of xs) {
    const values = [];
    known.forEach((points, index) => {
      if (x < points[0][0] || x > points[points.length - 1][0]) return;
      const [row, y] = at(points, x, rows[index]);
      rows[index] = row; values.push(y);
    });
    found.mean.push(values.reduce((sum, value) => sum + value, 0) / values.length);
    found.low.push(Math.min(...values)); found.high.push(Math.max(...values));
  }
  return found;
}

// Columns for one chart of curves with different x: the union of all x, null where a curve has no point.
export function joined(curves) {
  const xs = [...new Set(curves.flatMap(points => points.map(([x]) => x)))].sort((a, b) => a - b), row = new Map(xs.map((x, index) => [x, index]));
  return [xs, ...curves.map(points => { const column = new Array(xs.length).fill(null); for (const [x, y] of points) column[row.get(x)] = y; return column; })];
}

// Groups of runs that differ only in their seed; each run alone without `areSeeds`.
export function grouped(all, areSeeds) {
  const groups = new Map();
  for (const curves of all) {
    const settings = Object.entries(curves.settings).filter(([name]) => name !== 'run.seed').sort(([a], [b]) => a < b ? -1 : 1);
    const key = areSeeds && curves.group ? curves.group : areSeeds && settings.length && curves.run.work ? JSON.stringify([curves.run.work, curves.run.mode, curves.run.model, settings]) : curves.run.id;
    groups.set(key, [...(groups.get(key) || []), curves]);
  }
  return [...groups.values()];
}

// The settings in which groups differ: [name, value of each group]. The seed is left out where a group has several.
export function differences(groups) {
  const names = [...new Set(groups.flatMap(group => Object.keys(group[0].settings)))].sort(), hasSeeds = groups.some(group => group.length > 1);
  return names.filter(name => !(hasSeeds && name === 'run.seed')).map(name => [name, groups.map(group => group[0].settings[name])])
    .filter(([, values]) => values.some(value => JSON.stringify(value) !== JSON.stringify(values[0])));
}
