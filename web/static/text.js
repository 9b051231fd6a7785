// Formats numbers as the terminal's tables do (common/reporting/report.py). Text is inserted as text, never as HTML.
const SVG = ['svg', 'polyline', 'circle', 'line', 'text', 'path', 'marker', 'defs'];
export function make(tag, attributes = {}, ...children) {
  const node = SVG.includes(tag) ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
// Updates children by key in place, so that readers and screen readers keep their position.
export function inPlace(parent, keys, build, change = () => {}) {
  const wanted = new Set(keys.map(String)), known = new Map();
  for (const node of [...parent.children]) { if (wanted.has(node.dataset.key)) known.set(node.dataset.key, node); else node.remove(); }
  keys.forEach((key, at) => {
    const node = known.get(String(key)) || build(key);
    node.dataset.key = key;
    if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] || null);
    change(node, key);
  });
}
export function say(node, text) { if (node.textContent !== String(text)) node.textContent = text; }
export const $ = id => document.getElementById(id);
const WHOLE = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 }); // shared: creating one takes longer than a row
export const whole = value => value === null ? '–' : WHOLE.format(Math.round(value));
export function shortNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  const size = Math.abs(value);
  return size === 0 || (size >= 0.001 && size < 10000) ? value.toFixed(3) : value.toExponential(2);
}
export const share = value => `${Math.round(value * 100)} %`;
export const price = amount => amount >= 0.1 || amount === 0 ? amount.toFixed(2) : amount.toPrecision(2);
export function size(bytes) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let at = 0;
  while (bytes >= 1000 && at < units.length - 1) { bytes /= 1000; at += 1; }
  return `${at ? bytes.toFixed(bytes < 10 ? 2 : 1) : bytes} ${units[at]}`;
}
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return '–';
  if (seconds < 60) return `${seconds < 9.95 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${String(Math.round(seconds % 60)).padStart(2, '0')} s` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, '0')} min`;
}
// The value of a metric, by its unit as in common/reporting/metrics.py.
const UNITS = {
  count: whole, rate: value => (value < 100 ? value.toFixed(1) : whole(value)), seconds: value => value.toFixed(1), duration, bytes: size, share,
  mean: value => value.toFixed(2), number: shortNumber, price,
};
export const written = (metric, value) => (value === null || value === undefined ? '–' : UNITS[metric.unit](value));
export const labelOf = ({ rank, region }) => region && region !== String(rank) ? `${rank} ${region}` : String(rank);
export const nameOf = ({ rank, region }) => region ? `region ${region}` : `worker ${rank}`;
export const clock = unix => new Date(unix * 1000).toLocaleTimeString([], { hour12: false });
export const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
