// Curves, bands and bars with axes, hover, zoom and a sentence for screen readers. Only this file knows uPlot.
import { color, make, shortNumber, whole } from './text.js';
import { faded } from './palette.js';
const charts = new Map();
const MAX_IN_TIP = 14, MAX_SENTENCES = 12;
const dark = matchMedia('(prefers-color-scheme: dark)');

// uPlot comes with the page of a run; the list of runs loads it with the first comparison.
export function loaded() {
  if (globalThis.uPlot) return Promise.resolve();
  const script = make('script', { src: '/static/vendor/uPlot.iife.min.js' }), style = make('link', { rel: 'stylesheet', href: '/static/vendor/uPlot.min.css' });
  return new Promise((done, failed) => { script.onload = done; script.onerror = failed; document.head.append(style, script); });
}

// The direction of the newest quarter; changes below a twentieth of the range count as steady.
function trend(values) {
  const mean = part => part.reduce((sum, value) => sum + value, 0) / part.length, size = Math.max(1, Math.floor(values.length / 4));
  if (values.length < 4) return '';
  const newest = mean(values.slice(-size)), before = mean(values.slice(-2 * size, -size)), range = Math.max(...values) - Math.min(...values);
  return Math.abs(newest - before) < range / 20 || !range ? ', steady' : newest > before ? ', rising' : ', falling';
}

function sentence(chart) {
  const [xs, ...columns] = chart.columns, { series, axis } = chart;
  if (chart.kind === 'bars') {
    const total = columns[0].reduce((sum, count) => sum + count, 0);
    return `${whole(total)} ${series[0].label} by ${axis}: ${xs.slice(0, 8).map((x, at) => `${whole(columns[0][at])} at ${x}`).join(', ')}${xs.length > 8 ? `, and up to ${xs[xs.length - 1]}` : ''}`;
  }
  const named = series.map((curve, at) => [curve, columns[at]]).filter(([curve]) => !curve.isAside);
  const sentences = named.slice(0, MAX_SENTENCES).map(([{ label }, column]) => {
    const known = xs.map((x, row) => [x, column[row]]).filter(([x, value]) => x !== null && value !== null && value !== undefined);
    if (!known.length) return `${label}: nothing yet`;
    const [first, last] = [known[0], known[known.length - 1]], values = known.map(point => point[1]);
    return `${label} over ${axis}: ${known.length} point${known.length > 1 ? 's' : ''} from ${chart.formatX(first[0])} to ${chart.formatX(last[0])}, first ${shortNumber(first[1])}, newest ${shortNumber(last[1])}, lowest ${shortNumber(Math.min(...values))}, highest ${shortNumber(Math.max(...values))}${trend(values)}`;
  });
  return sentences.join('; ') + (named.length > MAX_SENTENCES ? `; and ${named.length - MAX_SENTENCES} more curves` : '');
}

function tipOf(host, known) {
  const tip = make('div', { class: 'tip', hidden: '', 'aria-hidden': 'true' });
  let isInside = false;
  const show = u => {
    const at = u.cursor.idx, { chart } = known;
    if (!isInside || at === null || at === undefined || u.cursor.left < 0) { tip.hidden = true; return; }
    const rows = chart.series.map((curve, index) => [curve, u.cursor.idxs[index + 1], index + 1]).filter(([curve, , index]) => !curve.isAside && u.series[index].show)
      .map(([curve, row, index]) => [curve, row === null || row === undefined ? null : u.data[index][row], row === null || row === undefined ? null : u.data[0][row]]).filter(([, value]) => value !== null && value !== undefined);
    if (!rows.length) { tip.hidden = true; return; }
    const shown = rows.slice(0, MAX_IN_TIP).map(([curve, value]) => { const mark = make('i'); mark.style.background = curve.stroke; return make('tr', {}, make('td', {}, mark, curve.label), make('td', {}, make('b', {}, chart.format(value)))); });
    tip.replaceChildren(make('div', { class: 'dim' }, `${chart.axis} ${chart.formatX(u.data[0][at])}`), make('table', {}, make('tbody', {}, ...shown)), ...(rows.length > MAX_IN_TIP ? [make('div', { class: 'dim' }, `and ${rows.length - MAX_IN_TIP} more`)] : []));
    tip.hidden = false;
    const { left, top } = u.cursor, over = u.over, width = tip.offsetWidth, room = over.clientWidth - left;
    tip.style.left = `${over.offsetLeft + (room > width + 16 ? left + 12 : Math.max(0, left - width - 12))}px`;
    tip.style.top = `${Math.max(0, Math.min(over.offsetTop + top - 10, host.clientHeight - tip.offsetHeight - 4))}px`;
  };
  return { hooks: { init: u => { host.append(tip); u.over.addEventListener('mouseenter', () => { isInside = true; }); u.over.addEventListener('mouseleave', () => { isInside = false; tip.hidden = true; }); }, setCursor: show } };
}

// The nearest row with a value: curves of several runs seldom have a point at the same x.
function nearest(u, index, row) {
  const column = u.data[index];
  if (column[row] !== null && column[row] !== undefined) return row;
  for (let by = 1; by < column.length; by += 1) {
    const before = column[row - by], after = column[row + by], hasBefore = before !== null && before !== undefined, hasAfter = after !== null && after !== undefined;
    if (hasBefore || hasAfter) return hasBefore ? row - by : row + by;
  }
  return null;
}

function plotted(curve, chart) {
  if (chart.kind === 'bars') return { label: curve.label, stroke: curve.stroke, fill: faded(curve.stroke, 0.75), paths: uPlot.paths.bars({ size: [0.7, 60] }), points: { show: false } };
  const isDotted = chart.kind === 'points' || curve.isDotted;
  return { label: curve.label, stroke: curve.isEdge ? 'transparent' : curve.stroke, width: curve.isEdge ? 0 : curve.width || 1.8, dash: curve.dash || [], alpha: curve.alpha || 1, spanGaps: true, show: !curve.isHidden,
    points: curve.isAside ? { show: false } : { show: isDotted ? true : (u, index) => u.data[index].filter(value => value !== null && value !== undefined).length === 1, size: 5, fill: curve.stroke } };
}

// Labels of an axis that fit: large numbers get a short unit.
const SHORT = new Intl.NumberFormat('en-US', { notation: 'compact', maximumSignificantDigits: 4 });
const ticks = format => (u, values) => values.map(value => value === null ? '' : format ? format(value) : Math.abs(value) >= 10000 ? SHORT.format(value) : Math.abs(value) < 0.001 && value ? value.toExponential(0) : String(Number(value.toPrecision(6))));

function rounded(value, round) { const unit = 10 ** Math.floor(Math.log10(value)); return Number((round(value / unit) * unit).toPrecision(3)); }

// As many charts in a row as fit, without a last row that is nearly empty.
export function balance(host, least = 265) {
  const count = [...host.children].filter(node => !node.hidden).length, most = Math.max(1, Math.floor((host.clientWidth + 12) / (least + 12)));
  host.style.gridTemplateColumns = `repeat(${Math.max(1, Math.ceil(count / Math.ceil(count / most)))}, minmax(0, 1fr))`;
}

function options(host, known) {
  const { chart } = known, stroke = color('dim'), grid = { stroke: color('grid'), width: 1 }, isBars = chart.kind === 'bars';
  const x = isBars ? { time: false, range: (u, low, high) => [low - 0.5, high + 0.5] } : { time: false, distr: chart.logX ? 3 : 1 };
  const font = `11px ${getComputedStyle(document.body).fontFamily}`, labelFont = `600 ${font}`;
  const common = { stroke, grid, ticks: { ...grid, size: 4 }, font, labelFont, labelSize: 16, labelGap: 0, gap: 4 };
  return {
    width: Math.max(220, host.clientWidth), height: Math.round(Math.min(340, Math.max(215, host.clientWidth * 0.5))), padding: [10, 20, 0, 0], legend: { show: false }, plugins: [tipOf(host, known)],
    cursor: { y: false, drag: { x: !isBars, y: false, setScale: true }, points: { size: 7 }, dataIdx: (u, index, row) => index === 0 ? row : nearest(u, index, row), ...(chart.sync ? { sync: { key: chart.sync, scales: ['x', null] } } : {}) },
    scales: { x, y: { distr: chart.logY ? 3 : 1, ...(chart.logY ? { range: (u, low, high) => low > 0 ? [rounded(low, Math.floor), rounded(high, Math.ceil)] : [0.1, 1] } : {}), ...(isBars ? { range: (u, low, high) => [0, Math.max(1, high) * 1.08] } : {}) } },
    series: [{ label: chart.axis }, ...chart.series.map(curve => plotted(curve, chart))], bands: chart.bands || [],
    axes: [{ ...common, size: 30, label: chart.axis, values: ticks(chart.tickX), ...(isBars ? { incrs: [1, 2, 5, 10, 20, 50, 100] } : {}) },
      { ...common, size: chart.tickY ? 70 : 52, label: chart.unit || '', values: ticks(chart.tickY) }],
    hooks: { setScale: [(u, key) => { if (key === 'x') markZoom(host, known, u); }] },
  };
}

function markZoom(host, known, u) {
  const xs = u.data[0], { min, max } = u.scales.x;
  if (known.chart.kind === 'bars' || !xs.length || min === null || min === undefined) return;
  known.isZoomed = min > xs[0] || max < xs[xs.length - 1];
  known.button.hidden = !known.isZoomed;
}
function zoom(known, share, shift) {
  const u = known.plot, { min, max } = u.scales.x, half = (max - min) / 2 * share, middle = (min + max) / 2 + shift * (max - min), xs = u.data[0];
  u.setScale('x', { min: Math.max(xs[0], middle - half), max: Math.min(xs[xs.length - 1], middle + half) });
}
const reset = known => known.plot.setData(known.plot.data, true);

// With the keyboard: + and - zoom, arrows move, 0 shows all.
function withKeys(host, known) {
  const acts = { '+': () => zoom(known, 0.5, 0), '=': () => zoom(known, 0.5, 0), '-': () => zoom(known, 2, 0), ArrowLeft: () => zoom(known, 1, -0.2), ArrowRight: () => zoom(known, 1, 0.2), 0: () => reset(known) };
  host.tabIndex = 0;
  host.title = 'Drag to zoom, double-click to see all; with the keyboard: + - ← → 0';
  host.addEventListener('keydown', event => { if (event.target === host && acts[event.key] && known.plot) { event.preventDefault(); acts[event.key](); } });
}

// Draw a chart. `chart`: {series: [{label, stroke, dash}], columns: [x, y...], axis, unit, kind: line, points or bars,
// logX, logY, bands, sync, format, formatX}. It is made again only where more than its data has changed.
export function draw(host, chart) {
  const full = { kind: 'line', ...chart, format: chart.format || shortNumber, formatX: chart.formatX || whole };
  host.setAttribute('role', 'img');
  host.setAttribute('aria-label', sentence(full));
  if (full.logY) full.columns = [full.columns[0], ...full.columns.slice(1).map(column => column.map(value => value > 0 ? value : null))];
  if (full.logX) { const rows = full.columns[0].map((x, at) => at).filter(at => full.columns[0][at] > 0); full.columns = full.columns.map(column => rows.map(at => column[at])); }
  const key = JSON.stringify([full.series, full.bands, full.axis, full.unit, full.kind, full.logX, full.logY, host.clientWidth, dark.matches]);
  let known = charts.get(host);
  if (known && known.key === key && known.plot) {
    known.chart = full;
    known.plot.setData(full.columns, !known.isZoomed);
    if (known.isZoomed) known.plot.redraw();
    return;
  }
  if (!known) {
    known = { button: make('button', { class: 'small unzoom', type: 'button', hidden: '' }, 'show all') };
    known.button.addEventListener('click', () => reset(known));
    charts.set(host, known);
    withKeys(host, known);
  }
  known.plot?.destroy();
  Object.assign(known, { key, chart: full, isZoomed: false });
  host.replaceChildren(known.button);
  known.button.hidden = true;
  known.plot = new uPlot(options(host, known), full.columns, host);
}

// Forget a chart whose host is gone.
export function forget(host) { charts.get(host)?.plot?.destroy(); charts.delete(host); }
// Highlight one curve by its label, or all with null.
export function highlight(host, label) {
  const known = charts.get(host);
  if (!known?.plot) return;
  known.chart.series.forEach((curve, at) => { known.plot.series[at + 1].alpha = label === null || curve.group === label ? curve.alpha || 1 : 0.15; });
  known.plot.redraw(false);
}

export function sparkline(values) {
  const width = 64, height = 18, known = values.filter(value => value !== null);
  const low = Math.min(...known), high = Math.max(...known), range = high - low || 1;
  const points = values.map((value, at) => value === null ? '' : `${(at / Math.max(1, values.length - 1) * width).toFixed(1)},${(height - 2 - (value - low) / range * (height - 4)).toFixed(1)}`);
  return make('svg', { width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' },
    make('polyline', { points: points.join(' '), fill: 'none', stroke: 'currentColor', 'stroke-width': 1.2 }));
}
