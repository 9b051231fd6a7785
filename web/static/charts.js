// Curves, bars and sparklines. Only this file knows uPlot, so that another library can replace it.
import { color, shortNumber, make, whole } from './text.js';
const charts = new Map();

function options(host, labels, axis, kind, height) {
  const stroke = color('dim'), grid = { stroke: color('line'), width: 1 };
  const colors = [color('accent'), color('compute'), color('transfer'), color('apply'), color('bad'), stroke];
  const series = labels.map((label, at) => kind === 'bars'
    ? { label, stroke: colors[at % colors.length], fill: colors[at % colors.length], paths: uPlot.paths.bars({ size: [0.7, 60] }), points: { show: false } }
    : { label, stroke: colors[at % colors.length], width: 1.6, spanGaps: true, points: { show: kind === 'points', size: 5 } });
  const isBars = kind === 'bars';
  const x = isBars ? { time: false, range: (u, low, high) => [low - 0.5, high + 0.5] } : { time: false };
  return {
    width: Math.max(240, host.clientWidth), height, legend: { live: true }, cursor: { drag: { x: true, y: false } },
    scales: { x }, series: [{ label: axis }, ...series],
    axes: [{ stroke, grid, ticks: grid, ...(isBars ? { incrs: [1, 2, 5, 10, 20, 50] } : {}) }, { stroke, grid, ticks: grid, size: 58 }],
  };
}

// The direction of the newest quarter; changes below a twentieth of the range count as steady.
function trend(values) {
  const mean = part => part.reduce((sum, value) => sum + value, 0) / part.length, size = Math.max(1, Math.floor(values.length / 4));
  if (values.length < 4) return '';
  const newest = mean(values.slice(-size)), before = mean(values.slice(-2 * size, -size)), range = Math.max(...values) - Math.min(...values);
  return Math.abs(newest - before) < range / 20 || !range ? ', steady' : newest > before ? ', rising' : ', falling';
}

function sentence(labels, axis, columns, kind) {
  const [xs, ...series] = columns;
  if (kind === 'bars') {
    const total = series[0].reduce((sum, count) => sum + count, 0);
    return `${whole(total)} ${labels[0]} by ${axis}: ${xs.slice(0, 8).map((x, at) => `${whole(series[0][at])} at ${x}`).join(', ')}${xs.length > 8 ? `, and up to ${xs[xs.length - 1]}` : ''}`;
  }
  return labels.map((label, at) => {
    const known = xs.map((x, row) => [x, series[at][row]]).filter(([x, value]) => x !== null && value !== null);
    if (!known.length) return `${label}: nothing yet`;
    const [first, last] = [known[0], known[known.length - 1]], values = known.map(point => point[1]);
    return `${label} over ${axis}: ${known.length} point${known.length > 1 ? 's' : ''} from ${whole(first[0])} to ${whole(last[0])}, first ${shortNumber(first[1])}, newest ${shortNumber(last[1])}, lowest ${shortNumber(Math.min(...values))}, highest ${shortNumber(Math.max(...values))}${trend(values)}`;
  }).join('; ');
}

// `columns`: x, then one for each label. The chart is made again only where labels, width or colours have changed.
export function draw(host, labels, axis, columns, kind = 'line', height = 190) {
  host.setAttribute('role', 'img');
  host.setAttribute('aria-label', sentence(labels, axis, columns, kind));
  const dark = matchMedia('(prefers-color-scheme: dark)').matches;
  const key = JSON.stringify([labels, axis, host.clientWidth, dark, kind]);
  const known = charts.get(host);
  if (known && known.key === key) { known.chart.setData(columns); return; }
  if (known) known.chart.destroy();
  host.replaceChildren();
  charts.set(host, { key, chart: new uPlot(options(host, labels, axis, kind, height), columns, host) });
}

export function sparkline(values) {
  const width = 90, height = 18, known = values.filter(value => value !== null);
  const low = Math.min(...known), high = Math.max(...known), range = high - low || 1;
  const points = values.map((value, at) => value === null ? '' : `${(at / Math.max(1, values.length - 1) * width).toFixed(1)},${(height - 2 - (value - low) / range * (height - 4)).toFixed(1)}`);
  return make('svg', { width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' },
    make('polyline', { points: points.join(' '), fill: 'none', stroke: 'currentColor', 'stroke-width': 1.2 }));
}
